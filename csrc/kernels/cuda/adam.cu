#include "driver.cuh"

namespace spectrain {
CudaKernel find_cuda_adam_family(KernelKey key) { return find_adam_family<CudaKernel, Cuda>(key); }
}  // namespace spectrain
