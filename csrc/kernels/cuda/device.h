// Selects a device for a scope and restores the caller's context.
#pragma once

#include <stdexcept>
#include <string>

namespace spectrain {

inline std::runtime_error cuda_error(const std::string& what, int device) {
  return std::runtime_error("CUDA: " + what + " (cuda:" + std::to_string(device) + ")");
}

// Makes a device current. It restores the driver's context, which the framework's runtime shares
// with the runtime in this module, instead of the device's number: since CUDA 12,
// cudaSetDevice(previous) would create a context of some hundred MB on GPU 0 for a thread without
// one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void* previous_ = nullptr;
  bool changed_ = false;
};

}  // namespace spectrain
