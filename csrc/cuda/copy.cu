#include "driver.cuh"

namespace spectrain {
CudaKernel find_copy(DType t) { return by_width<Cuda, Copy>(t); }
CudaKernel find_swap(DType t) { return by_width<Cuda, Swap>(t); }
}  // namespace spectrain
