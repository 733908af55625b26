// Borrows the memory of Python arrays of any framework.
#pragma once

#include "borrowed.h"

namespace spectrain {

// Borrows an array's memory by DLPack's C exchange API (torch), the buffer protocol (NumPy and
// other CPU arrays), `__dlpack__` (CuPy), or `__cuda_array_interface__`. Valid while the array and
// the loans live. Throws TypeError or ValueError that names the place. `anew`: false if the same
// array was borrowed before and only its address may have changed.
Borrowed borrow(py::handle array, const Place& place, Loans& loans, bool anew = true);
// Whether a borrowed array can move, because no loan pins its memory.
bool may_move(py::handle array);

}  // namespace spectrain
