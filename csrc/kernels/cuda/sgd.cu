#include "driver.cuh"

namespace spectrain {
CudaKernel find_cuda_sgd_family(KernelKey key) { return find_sgd_family<CudaKernel, Cuda>(key); }
}  // namespace spectrain
