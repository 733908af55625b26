// Whether a parallel region may be entered in this process.
#pragma once

namespace spectrain {

// False in a child of fork(): the OpenMP threads did not survive, and libgomp waits for them
// forever.
bool threads_are_safe();

}  // namespace spectrain
