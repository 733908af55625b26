// Arrays whose owner has no C exchange API: buffers, `__dlpack__`, `__cuda_array_interface__`.
#pragma once

#include "borrowed.h"

namespace spectrain {

// Borrows such an array; what it lends goes to the loans at once, so that an error gives it back.
Borrowed lend(py::handle array, const Place& place, Loans& loans);

}  // namespace spectrain
