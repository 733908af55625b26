// Finds the CPU kernels of the instruction set that a test chooses, of those that are compiled.
#include <vector>

#include "control.h"
#include "kernels/kernels.h"

namespace spectrain {

CpuKernel find_kernel_baseline(KernelKey);
CpuDistances find_distances_baseline(DType);
#if SPECTRAIN_COMPILED_TYPES > 1 && defined(__x86_64__)
CpuKernel find_kernel_v3(KernelKey);
CpuKernel find_kernel_v4(KernelKey);
#endif

namespace {

std::vector<FindCpuKernel> known() {
  std::vector<FindCpuKernel> sets = {find_kernel_baseline};
#if SPECTRAIN_COMPILED_TYPES > 1 && defined(__x86_64__)
  if (__builtin_cpu_supports("x86-64-v3")) sets.push_back(find_kernel_v3);
  if (__builtin_cpu_supports("x86-64-v4")) sets.push_back(find_kernel_v4);
#endif
  return sets;
}

const std::vector<FindCpuKernel> sets = known();
int chosen = 0;

}  // namespace

CpuKernel find_cpu_kernel(KernelKey key) { return sets[chosen](key); }
CpuDistances find_cpu_distances(DType t) { return find_distances_baseline(t); }
const char* cpu_instruction_set() { return "chosen"; }

}  // namespace spectrain

int stand_in::instruction_sets() { return static_cast<int>(spectrain::sets.size()); }
void stand_in::choose_instruction_set(int number) { spectrain::chosen = number; }
