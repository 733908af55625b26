// A build without a CUDA compiler.
#include <stdexcept>

#include "launch.h"

namespace spectrain {
namespace {
const char* const kNoCuda =
    "spectrain_ext was built without CUDA; install a CUDA toolkit (nvcc on PATH or CUDA_HOME set) "
    "and rebuild from the sources: SPECTRAIN_CUDA=1 pip install --force-reinstall --no-deps .";
}

CudaBuild cuda_build() { return {false, "", "", ""}; }

int cuda_device_count(std::string* why) {
  *why = kNoCuda;
  return 0;
}

CudaKernel find_cuda_kernel(KernelKey) { throw std::runtime_error(kNoCuda); }

int launch_cuda(const CudaLaunch&) { throw std::runtime_error(kNoCuda); }
void copy_cuda(void*, const void*, size_t, int, void*) { throw std::runtime_error(kNoCuda); }
bool cuda_is_capturing(int, void*) { throw std::runtime_error(kNoCuda); }
bool fits_parameters(const CudaLaunch&, bool) { throw std::runtime_error(kNoCuda); }
size_t resident_bytes(const CudaLaunch&) { throw std::runtime_error(kNoCuda); }

int launch_cuda_resident(const CudaLaunch&, const Resident&) { throw std::runtime_error(kNoCuda); }

int launch_cuda_distances(DType, Distances, void*, int, void*) {
  throw std::runtime_error(kNoCuda);
}

int total_cuda_distances(double*, int64_t, uint32_t, int, void*) {
  throw std::runtime_error(kNoCuda);
}

}  // namespace spectrain
