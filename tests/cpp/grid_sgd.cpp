#include "grids.h"

namespace spectrain {

CpuKernel find_sgd_grid(KernelKey key, bool resident) {
  return resident ? find_sgd_family<CpuKernel, ResidentGrid>(key)
                  : find_sgd_family<CpuKernel, HostGrid>(key);
}

}  // namespace spectrain
