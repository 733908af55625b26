// Launches kernels, and sets their shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace spectrain {

extern __shared__ __align__(16) unsigned char shared_memory[];

// Returns the launch's own status. cudaGetLastError() may return an earlier call's error, and
// <<<>>> would copy the arguments (up to 32 KB) once more.
template <class Arguments>
inline cudaError_t enqueue(void (*kernel)(Arguments), uint32_t blocks, uint32_t threads,
                           const Arguments& arguments, void* stream, size_t shared_bytes = 0) {
  void* list[] = {const_cast<Arguments*>(&arguments)};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), list, shared_bytes,
                          static_cast<cudaStream_t>(stream));
}

// Returns null or the runtime's message.
inline const char* words(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace spectrain
