#define SPECTRAIN_UNIT SPECTRAIN_ADAM
#include "driver.cuh"

namespace spectrain {
CudaKernel find_cuda_adam(KernelKey key) { return find<CudaKernel, Cuda>(key); }
}  // namespace spectrain
