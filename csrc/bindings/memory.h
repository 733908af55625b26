// Device memory from torch's allocator, for the tables of a plan.
#pragma once

#include <functional>
#include <memory>

#include "plan/plan.h"

namespace spectrain {

// Lends memory of a CUDA device for work on a stream. May be called without the GIL.
std::function<std::unique_ptr<DeviceMemory>(size_t bytes, void* stream)> allocator(int device);

}  // namespace spectrain
