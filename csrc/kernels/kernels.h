// Every kernel there is, found by operation and element types: the seam between plans and
// launchers.
#pragma once

#include <cstdint>

#include "core/setting.h"
#include "core/table.h"

namespace spectrain {

enum class DType : uint8_t { float16, bfloat16, float32, float64 };

inline int size_of(DType t) { return t == DType::float64 ? 8 : t == DType::float32 ? 4 : 2; }

enum class Operation : uint8_t {
  copy,
  cast,
  swap,
  sgd_plain,
  sgd_momentum,
  sgd_predict,
  sgd_stash_predict,
  adam_step,
  adam_predict,
  extrapolate,
  // Steps with their gradients corrected (rules/correct.h), in the order of the plain ones.
  sgd_plain_delay,
  sgd_momentum_delay,
  adam_step_delay,
  sgd_plain_gap,
  sgd_momentum_gap,
  adam_step_gap,
};
constexpr int kOperations = 16;

// What the streams of an operation are: w parameters (and what is like them), g gradients, s state
// (momentum, second moment, an average), o output, and the stale weights, which are like one.
// Streams beyond these are further outputs.
inline const char* roles(Operation operation) {
  constexpr const char* names[kOperations] = {"ww",    "wo",   "ww",    "wg",    "wgs", "wso",
                                              "wsw",   "wgss", "wsso",  "wwo",   "wgo", "wgso",
                                              "wgsso", "wgso", "wgsso", "wgssso"};
  return names[static_cast<int>(operation)];
}

// The element type of every role; a role that an operation does not have repeats the parameters'.
struct KernelKey {
  Operation operation;
  DType w, g, s, o;
  bool operator==(const KernelKey& other) const {
    return operation == other.operation && w == other.w && g == other.g && s == other.s &&
           o == other.o;
  }
};

// One setting for every parameter group; rows name theirs.
struct Settings {
  const Setting* data;
  int size;
};

struct CpuOptions {
  bool parallel;        // use the OpenMP threads the caller would have
  bool stream_outputs;  // write pure outputs past the cache
};
using CpuKernel = void (*)(const TableView&, Settings, const CpuOptions&);
using FindCpuKernel = CpuKernel (*)(KernelKey);

// Null where there is no such kernel.
CpuKernel find_cpu_kernel(KernelKey);
const char* cpu_instruction_set();

// See rules/distance.h.
struct Distances;
using CpuDistances = void (*)(const Distances&, bool parallel);
CpuDistances find_cpu_distances(DType);

// Enqueues a part of a table that fits a kernel's parameters, or a table that is in device memory,
// where the arguments may be as well. The device is the current one. Returns null, or the CUDA
// runtime's name of the error.
struct CudaKernel {
  const char* (*launch)(const TableView&, Settings, int device, void* stream) = nullptr;
  const char* (*launch_resident)(const TableView&, Settings, const void* arguments, int device,
                                 void* stream) = nullptr;
  int setting_bytes = 0;  // of one setting as the kernel takes it
  int vector = 1;         // elements of a row that are accessed at once, where they are aligned
};

}  // namespace spectrain
