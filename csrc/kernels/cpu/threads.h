// Detects forked processes, in which OpenMP threads no longer exist.
#pragma once

namespace spectrain {

// False in a child of fork(): its OpenMP threads are gone, and libgomp would wait for them forever.
bool threads_are_safe();

// The number of forks between the process that loaded the library and this one.
int forks();

}  // namespace spectrain
