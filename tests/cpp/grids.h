// The CUDA kernels' body on the host: a grid of blocks, one lane after the other. One file per
// family of rules compiles it; in one piece it would take longer than everything else.
#pragma once

#include <memory>
#include <type_traits>
#include <vector>

#include "cuda/body.h"
#include "instances.h"
#include "kernels.h"

namespace spectrain {

constexpr uint32_t kThreads = 32;
extern uint32_t grid_blocks;
extern Operation operation;  // of the kernel that is looked for

// A table as it is on the device: rows, pointers and arguments in one piece of memory of the size
// that the layout says, and the arguments made there, from settings whose every number is read by a
// program.
class Resident {
 public:
  Resident(const TableView& table, Settings settings, size_t argument_bytes, DType arithmetic);
  const TableView& view() const { return view_; }
  const void* arguments() const { return arguments_; }

 private:
  struct alignas(16) Piece {
    char bytes[16];
  };
  std::unique_ptr<Piece[]> memory_;
  TableView view_;
  const void* arguments_;
};

// Not inlined: both grids below share one copy, which halves the time it takes to compile them.
template <class Rule>
__attribute__((noinline)) void walk(const typename Rule::Args* args, const TableView& table) {
  for (uint32_t block = 0; block < grid_blocks; ++block) {
    for (uint32_t thread = 0; thread < kThreads; ++thread) {
      Body<Rule>::run(args, table, {block, thread, grid_blocks, kThreads});
    }
  }
}

template <class Rule>
struct HostGrid {
  static CpuKernel kernel() { return &run; }
  static void run(const TableView& table, Settings settings, const CpuOptions&) {
    std::vector<typename Rule::Args> args(settings.size);
    for (int i = 0; i < settings.size; ++i) Rule::make(settings.data[i], args[i]);
    walk<Rule>(args.data(), table);
  }
};

template <class Rule>
struct ResidentGrid {
  static CpuKernel kernel() { return &run; }
  static void run(const TableView& table, Settings settings, const CpuOptions&) {
    using Args = typename Rule::Args;
    const bool wide = std::is_same_v<typename Rule::Acc, double>;
    const Resident resident(table, settings, sizeof(Args), wide ? DType::float64 : DType::float32);
    walk<Rule>(static_cast<const Args*>(resident.arguments()), resident.view());
  }
};

CpuKernel find_copy_grid(KernelKey key, bool resident);
CpuKernel find_sgd_grid(KernelKey key, bool resident);
CpuKernel find_adam_grid(KernelKey key, bool resident);

}  // namespace spectrain
