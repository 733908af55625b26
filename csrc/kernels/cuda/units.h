// Functions of the *.cu files that launch.cpp uses, and the limits of what a launch takes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/kernels.h"
#include "rules/distance.h"

namespace spectrain {

// Kernel parameters have 32,764 bytes from CUDA 12.1 on, 4,096 before. Most calls have few rows,
// for which a smaller table avoids copying 32 KB at every launch.
constexpr size_t kSmallTable = 3584;
#if defined(SPECTRAIN_LARGE_TABLE)  // a test's, for which few rows are many
constexpr size_t kLargeTable = SPECTRAIN_LARGE_TABLE;
#elif CUDART_VERSION >= 12010
constexpr size_t kLargeTable = 32256;
#else
constexpr size_t kLargeTable = kSmallTable;
#endif

// Shared memory of a block.
constexpr size_t kSharedBytes = 48 * 1024;

// A table's rows, with their pointers, and the arguments before them, padded.
inline size_t bytes_of_rows(const TableView& view) {
  return view.n_rows * (sizeof(Row) + view.n_streams * sizeof(void*));
}
inline size_t bytes_before_rows(size_t bytes) {
  return (bytes + alignof(Row) - 1) / alignof(Row) * alignof(Row);
}

// find_cuda_copy, ...: return no launcher if the unit has no such kernel.
#define SPECTRAIN_FIND(unit) CudaKernel find_cuda_##unit(KernelKey);
SPECTRAIN_UNITS(SPECTRAIN_FIND)
#undef SPECTRAIN_FIND

// All of these return null or the CUDA runtime's error name.

// `d` refers to global memory.
const char* enqueue_distances(DType, const Distances& d, void* stream);
const char* enqueue_totals(double* result, int64_t n, uint32_t n_lists, void* stream);

// Arguments of a kernel that depend on numbers in device memory.
struct PrepareRequest {
  KernelKey key;
  Settings settings;
  void* to;
  size_t stride;  // between the arguments of two groups
};

// Both count their launches. `to` is 16-byte aligned and padded to 16 bytes.
const char* enqueue_write(void* to, const void* from, size_t n, void* stream, int* launches);
const char* enqueue_prepare(const PrepareRequest&, void* stream, int* launches);

}  // namespace spectrain
