// Distances on the GPU: a partial sum per chunk, then one block per row adds its chunks.
#include "enqueue.cuh"
#include "units.h"

namespace spectrain {
namespace {

// The threads of a block are the lanes of rules/distance.h.
__device__ double sum_lanes(double mine) {
  __shared__ double lane[kLanes];
  lane[threadIdx.x] = mine;
  __syncthreads();
  for (uint32_t half = kLanes / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) lane[threadIdx.x] += lane[threadIdx.x + half];
    __syncthreads();
  }
  const double sum = lane[0];
  __syncthreads();
  return sum;
}

// The table (rows and pointers) is in global memory.
template <class T>
__global__ void __launch_bounds__(kLanes) partial_sums(Distances d) {
  for (uint32_t chunk = blockIdx.x; chunk < d.table.chunk_end; chunk += gridDim.x) {
    const uint32_t r = d.table.find_row(chunk);
    const Range range = d.table.range(d.table.rows[r], chunk);
    const T* w = global(static_cast<const T*>(d.table.pointer(r, 0)));
    for (uint32_t j = 0; j < d.n_lists; ++j) {
      const T* other = global(static_cast<const T*>(d.table.pointer(r, 1 + j)));
      double sum = 0.0;
      for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kLanes) {
        sum = add_square(other[i], w[i], sum);
      }
      sum = sum_lanes(sum);
      if (threadIdx.x == 0) d.partial[static_cast<int64_t>(chunk) * d.n_lists + j] = sum;
    }
  }
}

__global__ void __launch_bounds__(kLanes) row_sums(Distances d) {
  const uint32_t r = blockIdx.x;
  const uint32_t begin = d.table.rows[r].first_chunk;
  const uint32_t end = r + 1 < d.table.n_rows ? d.table.rows[r + 1].first_chunk : d.table.chunk_end;
  for (uint32_t j = 0; j < d.n_lists; ++j) {
    double sum = 0.0;
    for (uint32_t chunk = begin + threadIdx.x; chunk < end; chunk += kLanes) {
      sum += d.partial[static_cast<int64_t>(chunk) * d.n_lists + j];
    }
    sum = sum_lanes(sum);
    if (threadIdx.x == 0) {
      static_cast<double*>(d.table.pointer(r, 1 + d.n_lists))[j * d.stride] = sum;
    }
  }
}

struct Totals {
  double* result;
  int64_t n;
  uint32_t n_lists;
};

__global__ void __launch_bounds__(kLanes) totals(Totals t) {
  const uint32_t j = blockIdx.x * kLanes + threadIdx.x;
  if (j < t.n_lists) total_distance(t.result + j * (t.n + 1), t.n);
}

template <class T>
cudaError_t launch(const Distances& d, void* stream) {
  constexpr uint32_t kMaxBlocks = 4096;
  const uint32_t blocks = d.table.chunk_end < kMaxBlocks ? d.table.chunk_end : kMaxBlocks;
  const cudaError_t error = enqueue(partial_sums<T>, blocks, kLanes, d, stream);
  return error != cudaSuccess ? error : enqueue(row_sums, d.table.n_rows, kLanes, d, stream);
}

}  // namespace

const char* enqueue_distances(DType t, const Distances& d, void* stream) {
  return words(t == DType::float64    ? launch<double>(d, stream)
               : t == DType::float32  ? launch<float>(d, stream)
               : t == DType::bfloat16 ? launch<BFloat16>(d, stream)
                                      : launch<Half>(d, stream));
}

const char* enqueue_totals(double* result, int64_t n, uint32_t n_lists, void* stream) {
  const Totals given{result, n, n_lists};
  return words(enqueue(totals, (n_lists + kLanes - 1) / kLanes, kLanes, given, stream));
}

}  // namespace spectrain
