#include "driver.cuh"

namespace spectrain {
CudaKernel find_predict(DType w, DType v) { return by_types<Cuda, Predict>(w, v); }
CudaKernel find_stash_predict(DType w, DType v) { return by_types<Cuda, StashPredict>(w, v); }
}  // namespace spectrain
