// Python arrays in, of any framework.
#pragma once

#include "borrowed.h"

namespace spectrain {

// Borrows the memory of any array: over DLPack's C exchange API (torch), the buffer protocol (NumPy
// and all else on the CPU), `__dlpack__` (CuPy), or `__cuda_array_interface__`. Valid while the
// array and the loans live. Throws TypeError or ValueError that names the place.
// `anew`: false where that was done before with this array, and only its address is in question.
Borrowed borrow(py::handle array, const Place& place, Loans& loans, bool anew = true);
// Whether borrowing an array takes no loan that keeps its memory where it is.
bool may_move(py::handle array);

}  // namespace spectrain
