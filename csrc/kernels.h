// Every kernel there is, found by operation and element types: the seam between plans and
// launchers.
#pragma once

#include <cstdint>

#include "hyper.h"
#include "table.h"

namespace spectrain {

enum class DType : uint8_t { float16, bfloat16, float32, float64 };

inline int size_of(DType t) { return t == DType::float64 ? 8 : t == DType::float32 ? 4 : 2; }

enum class Operation : uint8_t { copy, swap, predict, stash_predict, sgd_momentum, sgd_plain };

// `momentum` is the element type of the momentum buffer; operations without one ignore it.
struct KernelKey {
  Operation operation;
  DType param;
  DType momentum;
};

struct CpuOptions {
  bool parallel;        // use the OpenMP threads the caller would have
  bool stream_outputs;  // write pure outputs past the cache
};
using CpuKernel = void (*)(const TableView&, const Hyper&, const CpuOptions&);
using FindCpuKernel = CpuKernel (*)(KernelKey);

// Null where there is no such kernel.
CpuKernel find_cpu_kernel(KernelKey);
const char* cpu_instruction_set();

// Returns null, or the CUDA runtime's name of the error.
using CudaKernel = const char* (*)(const TableView&, const Hyper&, void* stream);

}  // namespace spectrain
