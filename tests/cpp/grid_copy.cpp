#include "grids.h"

namespace spectrain {

CpuKernel find_copy_grid(KernelKey key, bool resident) {
  return resident ? find_copy_family<CpuKernel, ResidentGrid>(key)
                  : find_copy_family<CpuKernel, HostGrid>(key);
}

}  // namespace spectrain
