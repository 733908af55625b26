// How kernels are launched, and the shared memory that a launch asks for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace spectrain {

extern __shared__ __align__(16) unsigned char shared_memory[];

// The launch's own status, not cudaGetLastError(): that would blame it for an earlier call's. And
// <<<>>> would copy the arguments, up to 32 KB, once more.
template <class Arguments>
inline cudaError_t enqueue(void (*kernel)(Arguments), uint32_t blocks, uint32_t threads,
                           const Arguments& arguments, void* stream, size_t shared_bytes = 0) {
  void* list[] = {const_cast<Arguments*>(&arguments)};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), list, shared_bytes,
                          static_cast<cudaStream_t>(stream));
}

// Null, or the runtime's words.
inline const char* words(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace spectrain
