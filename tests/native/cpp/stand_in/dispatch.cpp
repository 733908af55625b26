// Chooses the CPU kernels of the baseline, which are then the only ones to compile.
#include "kernels/kernels.h"

namespace spectrain {

CpuKernel find_kernel_baseline(KernelKey);
CpuDistances find_distances_baseline(DType);

CpuKernel find_cpu_kernel(KernelKey key) { return find_kernel_baseline(key); }
CpuDistances find_cpu_distances(DType t) { return find_distances_baseline(t); }
const char* cpu_instruction_set() { return "baseline"; }

}  // namespace spectrain
