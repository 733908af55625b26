// Small kernels that write tables to the device through their parameters, and compute arguments
// from learning rates and step counts there. A CUDA graph copies kernel parameters, but would read
// host memory at every replay.
#include <cuda_runtime.h>

#include <cstddef>

#include "body.h"
#include "enqueue.cuh"
#include "kernels/operations.h"
#include "units.h"

namespace spectrain {
namespace {

constexpr int kThreads = 256;

struct Piece {
  unsigned char* to;
  uint32_t n_quads;
  alignas(16) unsigned char storage[kLargeTable];
};

__global__ void __launch_bounds__(kThreads) write_piece(const __grid_constant__ Piece piece) {
  auto* to = reinterpret_cast<Quad*>(global(piece.to));
  const auto* from = reinterpret_cast<const Quad*>(piece.storage);
  for (uint32_t i = threadIdx.x; i < piece.n_quads; i += kThreads) to[i] = from[i];
}

constexpr int kPreparers = 32;

// Settings without unused terms.
struct Preparation {
  unsigned char* to;
  uint32_t stride;  // between the arguments of two groups
  uint32_t n_settings, setting_bytes;
  KernelKey key;
  alignas(16) unsigned char storage[kSmallTable];
};

// A rule's Args depend only on its arithmetic type, not on the storage types.
template <class Rule>
__device__ __forceinline__ void place(const Setting& s, void* to) {
  if constexpr (Rule::reads_memory) Rule::make(s, *static_cast<typename Rule::Args*>(to));
}

template <class Acc>
__device__ __forceinline__ void place_arguments(Operation operation, const Setting& s, void* to) {
#define SPECTRAIN_ROW(name, ...) \
  if (operation == Operation::name) place<rule_of<Operation::name, Same<Acc>>>(s, to);
  SPECTRAIN_OPERATIONS
#undef SPECTRAIN_ROW
}

// A thread for each setting, which changes in shared memory.
__global__ void __launch_bounds__(kPreparers) prepare(const __grid_constant__ Preparation given) {
  __shared__ Quad settings[kSmallTable / sizeof(Quad)];
  const uint32_t bytes = given.n_settings * given.setting_bytes;
  for (uint32_t i = threadIdx.x; i * sizeof(Quad) < bytes; i += kPreparers) {
    settings[i] = reinterpret_cast<const Quad*>(given.storage)[i];
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < given.n_settings; i += kPreparers) {
    void* at = reinterpret_cast<unsigned char*>(settings) + i * given.setting_bytes;
    Setting& setting = *static_cast<Setting*>(at);
    if (setting.source.in_memory()) setting.read_memory();
    unsigned char* to = global(given.to) + i * given.stride;
    if (given.key.w == DType::float64) {
      place_arguments<double>(given.key.operation, setting, to);
    } else {
      place_arguments<float>(given.key.operation, setting, to);
    }
  }
}

}  // namespace

const char* enqueue_write(void* to, const void* from, size_t n, void* stream, int* launches) {
  Piece piece;
  for (size_t at = 0; at < n; at += kLargeTable, ++*launches) {
    const size_t bytes = n - at < kLargeTable ? n - at : kLargeTable;
    piece.to = static_cast<unsigned char*>(to) + at;
    piece.n_quads = static_cast<uint32_t>((bytes + sizeof(Quad) - 1) / sizeof(Quad));
    memcpy(piece.storage, static_cast<const char*>(from) + at, bytes);
    const cudaError_t error = enqueue(write_piece, 1, kThreads, piece, stream);
    if (error != cudaSuccess) return words(error);
  }
  return nullptr;
}

const char* enqueue_prepare(const PrepareRequest& r, void* stream, int* launches) {
  const size_t setting_bytes = offsetof(Setting, terms) + r.settings.terms() * sizeof(Term);
  static_assert(offsetof(Setting, terms) + kMaxTermsFromMemory * sizeof(Term) <= kSmallTable,
                "a setting fits one launch");
  const auto capacity = static_cast<int>(kSmallTable / setting_bytes);
  for (int begin = 0; begin < r.settings.size; begin += capacity) {
    Preparation given;
    const int rest = r.settings.size - begin;
    given.n_settings = static_cast<uint32_t>(rest < capacity ? rest : capacity);
    given.setting_bytes = static_cast<uint32_t>(setting_bytes);
    given.stride = static_cast<uint32_t>(r.stride);
    given.to = static_cast<unsigned char*>(r.to) + begin * r.stride;
    given.key = r.key;
    for (uint32_t i = 0; i < given.n_settings; ++i) {
      memcpy(given.storage + i * setting_bytes, &r.settings.data[begin + i], setting_bytes);
    }
    const cudaError_t error = enqueue(prepare, 1, kPreparers, given, stream);
    if (error != cudaSuccess) return words(error);
    ++*launches;
  }
  return nullptr;
}

}  // namespace spectrain
