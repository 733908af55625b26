#include "driver.cuh"

namespace spectrain {
CudaKernel find_sgd_momentum(DType w, DType v) { return by_types<Cuda, SgdMomentum>(w, v); }
CudaKernel find_sgd_plain(DType w) { return by_type<Cuda, SgdPlain>(w); }
}  // namespace spectrain
