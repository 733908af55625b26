// The CUDA launcher: runs body.h, a block per chunk, with the table in the kernel's parameters or
// in device memory. Each unit of operations.h is this file, compiled with SPECTRAIN_UNIT.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "body.h"
#include "enqueue.cuh"
#include "kernels/instances.h"
#include "units.h"

namespace spectrain {

// Arguments, rows and pointers, concatenated.
template <size_t Bytes>
struct ParameterTable {
  uint32_t n_rows, n_streams, chunk_begin, chunk_end;
  uint32_t stride, rows_at, pointers_at;  // in bytes
  StepOptions options;
  alignas(16) unsigned char storage[Bytes];

  void fill(const TableView& view, Settings settings, size_t stride_,
            void (*make)(Settings, size_t, void*)) {
    n_rows = view.n_rows;
    n_streams = view.n_streams;
    chunk_begin = view.chunk_begin;
    chunk_end = view.chunk_end;
    options = view.options;
    stride = static_cast<uint32_t>(stride_);
    rows_at = static_cast<uint32_t>(bytes_before_rows(settings.size * stride_));
    pointers_at = rows_at + static_cast<uint32_t>(n_rows * sizeof(Row));
    make(settings, stride_, storage);
    memcpy(storage + rows_at, view.rows, n_rows * sizeof(Row));
    memcpy(storage + pointers_at, view.pointers, n_rows * n_streams * sizeof(void*));
  }
  __device__ __forceinline__ TableView view() const {
    return {reinterpret_cast<const Row*>(storage + rows_at),
            reinterpret_cast<void* const*>(storage + pointers_at),
            n_rows,
            n_streams,
            chunk_begin,
            chunk_end,
            options};
  }
};

template <class Rule, bool Resident>
__device__ __forceinline__ void run_body(const unsigned char* arguments, uint32_t stride,
                                         const TableView& table) {
  Body<Rule, Resident>::run(arguments, stride, table,
                            {blockIdx.x, threadIdx.x, gridDim.x, blockDim.x});
}

template <class Rule, size_t Bytes>
__global__ void __launch_bounds__(LaunchPolicy::threads,
                                  LaunchPolicy::blocks_per_multiprocessor(Rule::divides,
                                                                          mixed<Rule>))
    run_table(const __grid_constant__ ParameterTable<Bytes> table) {
  run_body<Rule, false>(table.storage, table.stride, table.view());
}

// Rows and pointers are in device memory. Arguments are too, or here if they are few and made by
// the host.
struct ResidentTable {
  TableView view;
  const void* arguments;  // null: in storage
  uint32_t n_words;       // what a block reads of them
  uint32_t stride;        // 0: a block reads the arguments of its chunk's group alone
  alignas(16) uint32_t storage[kSmallTable / sizeof(uint32_t)];
};

// Blocks read their arguments from shared memory, wherever they come from: those of all groups, as
// long as they fit there.
template <class Rule>
__global__ void __launch_bounds__(LaunchPolicy::threads,
                                  LaunchPolicy::blocks_per_multiprocessor(Rule::divides, false))
    run_resident(const __grid_constant__ ResidentTable table) {
  auto* arguments = reinterpret_cast<uint32_t*>(shared_memory);
  TableView view = table.view;
  view.rows = global(view.rows);
  view.pointers = global(view.pointers);
  if (table.arguments != nullptr) {
    const auto* from = global(static_cast<const uint32_t*>(table.arguments));
    if (table.stride == 0) {
      const uint32_t row = view.find_row(view.chunk_begin + blockIdx.x);
      from += view.rows[row].setting * table.n_words;
    }
    for (uint32_t i = threadIdx.x; i < table.n_words; i += blockDim.x) arguments[i] = from[i];
  } else {
    for (uint32_t i = threadIdx.x; i < table.n_words; i += blockDim.x) {
      arguments[i] = table.storage[i];
    }
  }
  __syncthreads();
  run_body<Rule, true>(shared_memory, table.stride, view);
}

template <class Rule>
struct Cuda {
  using Args = typename Rule::Args;

  // One block per chunk: the device starts blocks in order, so that those under way access
  // neighbouring memory. On an H200, 2^28 elements take 4 to 10% less time than in a grid of as
  // many blocks as run at once, whose strides are larger. More chunks than a grid has blocks would
  // be 8 TB of 16-bit elements.
  static uint32_t blocks_for(const TableView& view) {
    return std::min<uint32_t>(view.chunk_end - view.chunk_begin, INT32_MAX);
  }

  template <size_t Bytes>
  static cudaError_t launch_with(const TableView& view, Settings settings, size_t stride,
                                 void* stream) {
    ParameterTable<Bytes> table;
    table.fill(view, settings, stride, make_arguments);
    return enqueue(run_table<Rule, Bytes>, blocks_for(view), LaunchPolicy::threads, table, stream);
  }

  static const char* launch(const TableView& view, Settings settings, size_t stride, void* stream) {
    const size_t bytes = bytes_before_rows(settings.size * stride) + bytes_of_rows(view);
    return words(bytes <= kSmallTable ? launch_with<kSmallTable>(view, settings, stride, stream)
                                      : launch_with<kLargeTable>(view, settings, stride, stream));
  }

  static void make_arguments(Settings settings, size_t stride, void* to) {
    for (int i = 0; i < settings.size; ++i) {
      void* at = static_cast<char*>(to) + i * stride;
      Rule::make(settings.data[i], *static_cast<Args*>(at));
    }
  }

  // `view` refers to device memory.
  static const char* launch_resident(const TableView& view, const CudaArguments& arguments,
                                     void* stream) {
    ResidentTable table;
    table.view = view;
    table.arguments = arguments.on_device;
    const bool all = arguments.bytes <= kSharedBytes;
    table.n_words =
        static_cast<uint32_t>((all ? arguments.bytes : arguments.stride) / sizeof(uint32_t));
    table.stride = static_cast<uint32_t>(all ? arguments.stride : 0);
    if (arguments.on_device == nullptr) memcpy(table.storage, arguments.on_host, arguments.bytes);
    return words(enqueue(run_resident<Rule>, blocks_for(view), LaunchPolicy::threads, table, stream,
                         table.n_words * sizeof(uint32_t)));
  }

  static CudaKernel kernel() {
    CudaKernel kernel{&launch, &launch_resident, &make_arguments, 0, 0, Body<Rule, true>::vector};
    if constexpr (Rule::has_outs) {
      using Terms = decltype(Args::predictions);
      kernel.term_bytes = sizeof(Terms::term[0]);
      kernel.setting_bytes = offsetof(Args, predictions) + offsetof(Terms, term);
    } else if (!std::is_empty_v<Args>) {
      kernel.setting_bytes = sizeof(Args);
    }
    return kernel;
  }
};

// find_cuda_copy, find_cuda_sgd, ...
CudaKernel SPECTRAIN_CONCAT(find_cuda_, SPECTRAIN_UNIT)(KernelKey key) {
  return find<CudaKernel, Cuda>(key);
}

}  // namespace spectrain
