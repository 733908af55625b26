// Calls on one device, which leave the caller's thread as it was.
#pragma once

#include <stdexcept>
#include <string>

namespace spectrain {

inline std::runtime_error cuda_error(const std::string& what, int device) {
  return std::runtime_error("CUDA: " + what + " (cuda:" + std::to_string(device) + ")");
}

// Makes a device the current one. Put back is not its number but the driver's context, which the
// framework's runtime shares with the one that is linked into this module: since CUDA 12
// cudaSetDevice(previous) would give a thread that had no context one on GPU 0, some hundred MB.
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
