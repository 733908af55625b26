#include "grids.h"

namespace spectrain {

CpuKernel find_adam_grid(KernelKey key, bool resident) {
  return resident ? find_adam_family<CpuKernel, ResidentGrid>(key)
                  : find_adam_family<CpuKernel, HostGrid>(key);
}

}  // namespace spectrain
