// Limits of a table in the parameters of a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace spectrain {

// Kernel parameters have 32,764 bytes from CUDA 12.1 on, 4,096 before. Most calls have few rows,
// for which a smaller table avoids copying 32 KB at every launch.
constexpr size_t kSmallTable = 3584;
#if defined(SPECTRAIN_LARGE_TABLE)  // a test's, for which few rows are many
constexpr size_t kLargeTable = SPECTRAIN_LARGE_TABLE;
#elif CUDART_VERSION >= 12010
constexpr size_t kLargeTable = 32256;
#else
constexpr size_t kLargeTable = kSmallTable;
#endif

// Shared memory of a block.
constexpr size_t kSharedBytes = 48 * 1024;

}  // namespace spectrain
