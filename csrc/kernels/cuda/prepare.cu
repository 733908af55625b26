// Small kernels that write tables to the device through their parameters, and compute arguments
// from numbers there. A CUDA graph copies kernel parameters, but would read host memory at every
// replay.
#include "prepare.h"

#include <cuda_runtime.h>

#include <cstddef>

#include "body.h"
#include "capacity.h"
#include "enqueue.cuh"
#include "units.h"

namespace spectrain {
namespace {

constexpr int kThreads = 256;

template <size_t Bytes>
struct Piece {
  unsigned char* to;
  uint32_t n_quads;
  alignas(16) unsigned char storage[Bytes];
};

template <size_t Bytes>
__global__ void __launch_bounds__(kThreads)
    write_piece(const __grid_constant__ Piece<Bytes> piece) {
  auto* to = reinterpret_cast<Quad*>(global(piece.to));
  const auto* from = reinterpret_cast<const Quad*>(piece.storage);
  for (uint32_t i = threadIdx.x; i < piece.n_quads; i += kThreads) to[i] = from[i];
}

template <size_t Bytes>
cudaError_t write_with(char* to, const char* from, size_t n, void* stream) {
  Piece<Bytes> piece;
  piece.to = reinterpret_cast<unsigned char*>(to);
  piece.n_quads = static_cast<uint32_t>((n + sizeof(Quad) - 1) / sizeof(Quad));
  memcpy(piece.storage, from, n);
  return enqueue(write_piece<Bytes>, 1, kThreads, piece, stream);
}

// Settings without unused terms, inputs, constants, code.
template <size_t Bytes>
struct Preparation {
  unsigned char* to;
  uint32_t stride;  // between the arguments of two groups
  Operation operation;
  DType weights;
  uint16_t n_settings, n_inputs, n_constants, n_code;
  uint32_t setting_bytes, inputs_at, constants_at, code_at;
  alignas(16) unsigned char storage[Bytes];

  __device__ __forceinline__ ProgramView program() const {
    return {reinterpret_cast<const Input*>(storage + inputs_at),
            reinterpret_cast<const double*>(storage + constants_at),
            reinterpret_cast<const Instruction*>(storage + code_at),
            n_inputs,
            n_constants,
            n_code};
  }
};

template <size_t Bytes>
__global__ void prepare(const __grid_constant__ Preparation<Bytes> given) {
  auto* registers = reinterpret_cast<double*>(shared_memory);
  __shared__ Setting setting;
  evaluate(given.program(), registers);
  for (int i = 0; i < given.n_settings; ++i) {
    memcpy(&setting, given.storage + i * given.setting_bytes, given.setting_bytes);
    fill_in(setting, registers);
    place_arguments(given.operation, given.weights, setting, global(given.to) + i * given.stride);
  }
}

size_t align8(size_t n) { return (n + 7) / 8 * 8; }

template <size_t Bytes>
cudaError_t prepare_with(const PrepareRequest& r, const ProgramView& p, int begin, int end,
                         size_t setting_bytes, void* stream) {
  Preparation<Bytes> given;
  given.to = static_cast<unsigned char*>(r.to) + begin * r.stride;
  given.stride = static_cast<uint32_t>(r.stride);
  given.operation = r.operation;
  given.weights = r.weights;
  given.n_settings = static_cast<uint16_t>(end - begin);
  given.n_inputs = p.n_inputs;
  given.n_constants = p.n_constants;
  given.n_code = p.n_code;
  given.setting_bytes = static_cast<uint32_t>(setting_bytes);
  given.inputs_at = static_cast<uint32_t>((end - begin) * setting_bytes);
  given.constants_at = given.inputs_at + static_cast<uint32_t>(p.n_inputs * sizeof(Input));
  given.code_at = given.constants_at + static_cast<uint32_t>(p.n_constants * sizeof(double));
  for (int i = begin; i < end; ++i) {
    memcpy(given.storage + (i - begin) * setting_bytes, &r.settings.data[i], setting_bytes);
  }
  const auto put = [&given](uint32_t at, const void* from, size_t bytes) {
    if (bytes > 0)
      memcpy(given.storage + at, from, bytes);  // copying from null is undefined even for 0 bytes
  };
  put(given.inputs_at, p.inputs, p.n_inputs * sizeof(Input));
  put(given.constants_at, p.constants, p.n_constants * sizeof(double));
  put(given.code_at, p.code, p.n_code * sizeof(Instruction));
  return enqueue(prepare<Bytes>, 1, 1, given, stream, p.n_registers() * sizeof(double));
}

}  // namespace

const char* enqueue_write(void* to, const void* from, size_t n, void* stream, int* launches) {
  cudaError_t error = cudaSuccess;
  for (size_t at = 0; at < n && error == cudaSuccess; ++*launches) {
    char* target = static_cast<char*>(to) + at;
    const char* source = static_cast<const char*>(from) + at;
    const size_t rest = n - at;
    if (rest <= kSmallTable) {
      error = write_with<kSmallTable>(target, source, rest, stream);
      at = n;
    } else {
      const size_t piece = rest < kLargeTable ? rest : kLargeTable;
      error = write_with<kLargeTable>(target, source, piece, stream);
      at += piece;
    }
  }
  return words(error);
}

const char* enqueue_prepare(const PrepareRequest& r, void* stream, int* launches) {
  const ProgramView& p = r.program;
  int terms = 1;
  for (int i = 0; i < r.settings.size; ++i) {
    const int n = used_terms(r.settings.data[i]);
    terms = n > terms ? n : terms;
  }
  const size_t setting_bytes = align8(offsetof(Setting, terms) + terms * sizeof(Term));
  const size_t program_bytes = p.n_inputs * sizeof(Input) + p.n_constants * sizeof(double) +
                               align8(p.n_code * sizeof(Instruction));
  if (program_bytes + setting_bytes > kLargeTable ||
      p.n_registers() * sizeof(double) + sizeof(Setting) > kSharedBytes) {
    return "the formulas of the numbers on the device do not fit one launch; predict fewer updates "
           "ahead";
  }
  const auto capacity = static_cast<int>((kLargeTable - program_bytes) / setting_bytes);
  for (int begin = 0; begin < r.settings.size; begin += capacity) {
    const int rest = r.settings.size - begin;
    const int end = begin + (rest < capacity ? rest : capacity);
    const bool small = program_bytes + (end - begin) * setting_bytes <= kSmallTable;
    const cudaError_t error =
        small ? prepare_with<kSmallTable>(r, p, begin, end, setting_bytes, stream)
              : prepare_with<kLargeTable>(r, p, begin, end, setting_bytes, stream);
    if (error != cudaSuccess) return words(error);
    ++*launches;
  }
  return nullptr;
}

}  // namespace spectrain
