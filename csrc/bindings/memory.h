// Allocates device memory for a plan's tables from torch's allocator.
#pragma once

#include <functional>
#include <memory>

#include "plan/plan.h"

namespace spectrain {

// Returns an allocator of memory on a CUDA device, which may be called without the GIL.
std::function<std::unique_ptr<DeviceMemory>(size_t bytes, void* stream)> allocator(int device);

}  // namespace spectrain
