// What a fork leaves of threads.
#pragma once

namespace spectrain {

// False in a child of fork(): the OpenMP threads did not survive, and libgomp waits for them
// forever.
bool threads_are_safe();

// How many forks lie between this process and the one that loaded the library.
int forks();

}  // namespace spectrain
