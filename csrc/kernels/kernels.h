// Finds kernels by operation and element types; the interface between plans and launchers.
#pragma once

#include <cstdint>

#include "core/setting.h"
#include "core/table.h"
#include "operations.h"

namespace spectrain {

enum class DType : uint8_t { float16, bfloat16, float32, float64 };

inline int size_of(DType t) { return t == DType::float64 ? 8 : t == DType::float32 ? 4 : 2; }

// The element types of parameters (and weights like them), gradients, state and outputs; what an
// operation does not use repeats the parameters' type.
struct KernelKey {
  Operation operation;
  DType w, g, s, o;

  DType& of(Role role) {
    return role == Role::grads                              ? g
           : role == Role::momentum || role == Role::second ? s
           : role == Role::out                              ? o
                                                            : w;
  }
  bool operator==(const KernelKey& other) const {
    return operation == other.operation && w == other.w && g == other.g && s == other.s &&
           o == other.o;
  }
};

// One setting for every parameter group; rows store an index.
struct Settings {
  const Setting* data;
  int size;

  // The terms of the one that has the most.
  int terms() const {
    int most = 0;
    for (int i = 0; i < size; ++i) most = data[i].n_terms() > most ? data[i].n_terms() : most;
    return most;
  }
};

struct CpuOptions {
  bool parallel;        // use the caller's number of OpenMP threads
  bool stream_outputs;  // write pure outputs with non-temporal stores
};
using CpuKernel = void (*)(const TableView&, Settings, const CpuOptions&);
using FindCpuKernel = CpuKernel (*)(KernelKey);

// Returns null if there is no such kernel.
CpuKernel find_cpu_kernel(KernelKey);
const char* cpu_instruction_set();

// See rules/distance.h.
struct Distances;
using CpuDistances = void (*)(const Distances&, bool parallel);
CpuDistances find_cpu_distances(DType);

// The arguments of a kernel for all groups, on the host or in device memory.
struct CudaArguments {
  const void* on_host;
  const void* on_device;  // null: on the host
  size_t bytes, stride;   // of all groups, and of one
};

// Launches on a part of a table that fits a kernel's parameters, or on a table in device memory.
// Uses the current device. Returns null or the CUDA runtime's error name.
struct CudaKernel {
  const char* (*launch)(const TableView&, Settings, size_t stride, void* stream) = nullptr;
  const char* (*launch_resident)(const TableView&, const CudaArguments&, void* stream) = nullptr;
  void (*make_arguments)(Settings, size_t stride, void* to) = nullptr;
  size_t setting_bytes = 0, term_bytes = 0;  // of a group's arguments without terms, and of a term
  int vector = 1;                            // elements per access of an aligned row

  // Bytes of a group's arguments: only terms in use take memory. Those of the next group are
  // aligned too.
  size_t stride(int terms) const {
    return (setting_bytes + terms * term_bytes + sizeof(double) - 1) / sizeof(double) *
           sizeof(double);
  }
};

}  // namespace spectrain
