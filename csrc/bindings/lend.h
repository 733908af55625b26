// Borrows arrays without a C exchange API: buffers, `__dlpack__`, `__cuda_array_interface__`.
#pragma once

#include "borrowed.h"

namespace spectrain {

// Borrows such an array. Loans are recorded at once, so that they are returned on an error.
Borrowed lend(py::handle array, const Place& place, Loans& loans);

}  // namespace spectrain
