// Selects, once, the CPU kernels for the widest instruction set of this machine.
#include "kernels/kernels.h"

namespace spectrain {

CpuKernel find_kernel_baseline(KernelKey);
CpuDistances find_distances_baseline(DType);
#if defined(__x86_64__)
CpuKernel find_kernel_v3(KernelKey);
CpuKernel find_kernel_v4(KernelKey);
CpuDistances find_distances_v3(DType);
CpuDistances find_distances_v4(DType);
#endif

namespace {

struct InstructionSet {
  const char* name;
  FindCpuKernel find;
  CpuDistances (*find_distances)(DType);
};

InstructionSet choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("f16c");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) return {"x86-64-v4", find_kernel_v4, find_distances_v4};
  if (v3) return {"x86-64-v3", find_kernel_v3, find_distances_v3};
  return {"x86-64", find_kernel_baseline, find_distances_baseline};
#else
  return {"baseline", find_kernel_baseline, find_distances_baseline};
#endif
}

const InstructionSet& chosen() {
  static const InstructionSet set = choose();
  return set;
}

}  // namespace

CpuKernel find_cpu_kernel(KernelKey key) { return chosen().find(key); }
CpuDistances find_cpu_distances(DType t) { return chosen().find_distances(t); }
const char* cpu_instruction_set() { return chosen().name; }

}  // namespace spectrain
