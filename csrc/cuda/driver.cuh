// The CUDA launcher: the body of body.h in a persistent grid, its table in the kernel's parameters.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "../instances.h"
#include "body.h"
#include "capacity.h"

namespace spectrain {

template <size_t Bytes>
struct ParameterTable {
  uint32_t n_rows, n_streams, chunk_begin, chunk_end;
  alignas(8) unsigned char storage[Bytes];  // rows, then pointers

  static bool fits(const TableView& view) {
    return view.n_rows * (sizeof(Row) + view.n_streams * sizeof(void*)) <= Bytes;
  }
  explicit ParameterTable(const TableView& view)
      : n_rows(view.n_rows),
        n_streams(view.n_streams),
        chunk_begin(view.chunk_begin),
        chunk_end(view.chunk_end) {
    memcpy(storage, view.rows, n_rows * sizeof(Row));
    memcpy(storage + n_rows * sizeof(Row), view.pointers, n_rows * n_streams * sizeof(void*));
  }
  __device__ __forceinline__ TableView view() const {
    return {reinterpret_cast<const Row*>(storage),
            reinterpret_cast<void* const*>(storage + n_rows * sizeof(Row)),
            n_rows,
            n_streams,
            chunk_begin,
            chunk_end};
  }
};

template <class Rule, size_t Bytes>
__global__ void __launch_bounds__(LaunchPolicy::threads)
    run_table(const __grid_constant__ typename Rule::Args args,
              const __grid_constant__ ParameterTable<Bytes> table) {
  Body<Rule>::run(args, table.view(), {blockIdx.x, threadIdx.x, gridDim.x, blockDim.x});
}

template <class Rule>
struct Cuda {
  // As many blocks as the device holds at once, asked for once per device.
  static cudaError_t resident_blocks(int* blocks) {
    constexpr int kMaxDevices = 64;
    static std::atomic<int> known[kMaxDevices];
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    if (device < kMaxDevices && (*blocks = known[device].load()) > 0) return cudaSuccess;
    int per_multiprocessor = 0, multiprocessors = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &per_multiprocessor, run_table<Rule, kSmallTable>, LaunchPolicy::threads, 0);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    *blocks = per_multiprocessor * multiprocessors;
    if (device < kMaxDevices) known[device].store(*blocks);
    return cudaSuccess;
  }

  static const char* kernel(const TableView& view, const Hyper& hyper, void* stream) {
    int blocks = 0;
    cudaError_t error = resident_blocks(&blocks);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    const uint32_t chunks = view.chunk_end - view.chunk_begin;
    if (chunks < static_cast<uint32_t>(blocks)) blocks = static_cast<int>(chunks);
    const auto to = static_cast<cudaStream_t>(stream);
    const typename Rule::Args args = Rule::make(hyper);
    if (ParameterTable<kSmallTable>::fits(view)) {
      const ParameterTable<kSmallTable> table(view);
      run_table<Rule, kSmallTable><<<blocks, LaunchPolicy::threads, 0, to>>>(args, table);
    } else {
      const ParameterTable<kLargeTable> table(view);
      run_table<Rule, kLargeTable><<<blocks, LaunchPolicy::threads, 0, to>>>(args, table);
    }
    error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  }
};

}  // namespace spectrain
