#include "driver.cuh"

namespace spectrain {
CudaKernel find_cuda_copy_family(KernelKey key) { return find_copy_family<CudaKernel, Cuda>(key); }
}  // namespace spectrain
