// Arrays whose owner has no C exchange API: buffers, `__dlpack__`, `__cuda_array_interface__`.
#pragma once

#include "borrow.h"

namespace spectrain {

// Borrows such an array; what it lends goes to the loans at once, so that an error gives it back.
Borrowed lend(py::handle array, const Place& place, Loans& loans);

// The current stream of the framework such an array belongs to. False: it names none.
bool current_stream_of(py::handle array, int device, void** stream);

// Memory that DLPack describes: checked for what every array must have.
Borrowed described(const dlpack::Tensor&, const Place&, Loans&);

std::string type_name(py::handle object);
// The first line of what an error says: the others may carry a C++ stack trace.
std::string first_line(const py::error_already_set&);

}  // namespace spectrain
