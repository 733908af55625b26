// What the CUDA half uses of the CUDA runtime, for the host: csrc/cuda compiles against this header
// as plain C++, and runs on runtime.cpp. Names and values are CUDA's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define CUDART_VERSION 13000
#define __global__
#define __device__
#define __forceinline__ \
  __attribute__((noinline))  // one copy of every body: half the time to compile
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local  // all threads of a block are fibers of one thread

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;
void __syncthreads();

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorStreamCaptureImplicit = 906,
};
struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr unsigned long long cudaEnableDefault = 0;

cudaError_t cudaGetDeviceCount(int*);
cudaError_t cudaSetDevice(int);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t);
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*);
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void**, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult*);

namespace stand_in {
using Kernel = void (*)();
// Calls a kernel of one argument, which is copied when the kernel is launched, not when it runs.
using Caller = void (*)(Kernel, const void* argument);
cudaError_t launch(Caller, Kernel, const void* argument, size_t bytes, dim3 grid, dim3 block,
                   size_t shared, cudaStream_t);
}  // namespace stand_in

template <class Argument>
cudaError_t cudaLaunchKernel(void (*kernel)(Argument), dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  const auto call = [](stand_in::Kernel k, const void* given) {
    reinterpret_cast<void (*)(Argument)>(k)(*static_cast<const Argument*>(given));
  };
  return stand_in::launch(call, reinterpret_cast<stand_in::Kernel>(kernel), arguments[0],
                          sizeof(Argument), grid, block, shared, stream);
}
