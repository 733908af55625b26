#include "device.h"

#include <cuda_runtime.h>

namespace spectrain {
namespace {

// The driver is loaded at run time, because machines without a GPU do not have it.
template <class F>
F driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status);
#elif CUDART_VERSION >= 12000
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &status);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault);
#endif
  if (error != cudaSuccess || found == nullptr) {
    throw std::runtime_error(std::string("CUDA: the driver has no ") + name + ": " +
                             cudaGetErrorString(error));
  }
  return reinterpret_cast<F>(found);
}

// From cuda.h, whose types are int and opaque pointers.
struct Driver {
  using Result = int;
  Result (*get_current)(void** context);
  Result (*set_current)(void* context);
  Result (*get_device)(int* device);  // of the current context

  static const Driver& loaded() {
    static const Driver driver{driver_function<Result (*)(void**)>("cuCtxGetCurrent"),
                               driver_function<Result (*)(void*)>("cuCtxSetCurrent"),
                               driver_function<Result (*)(int*)>("cuCtxGetDevice")};
    return driver;
  }
};

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  const Driver& driver = Driver::loaded();
  int current = -1;
  if (driver.get_current(&previous_) == 0 && previous_ != nullptr &&
      driver.get_device(&current) == 0 && current == device) {
    return;
  }
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) {
    driver.set_current(previous_);
    throw cuda_error(cudaGetErrorString(error), device);
  }
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) Driver::loaded().set_current(previous_);
}

}  // namespace spectrain
