#define SPECTRAIN_UNIT SPECTRAIN_COPIES
#include "driver.cuh"

namespace spectrain {
CudaKernel find_cuda_copy(KernelKey key) { return find<CudaKernel, Cuda>(key); }
}  // namespace spectrain
