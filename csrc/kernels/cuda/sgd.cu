#define SPECTRAIN_UNIT SPECTRAIN_SGD
#include "driver.cuh"

namespace spectrain {
CudaKernel find_cuda_sgd(KernelKey key) { return find<CudaKernel, Cuda>(key); }
}  // namespace spectrain
