// Runs the cases on a GPU, also for compute-sanitizer: on_gpu [FIRST SEED] [NUMBER OF SEEDS]
// [UNIX TIME]. After that time it begins no further case.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cases.h"

int main(int argc, char** argv) {
  const uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const uint64_t seeds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const double until = argc > 3 ? std::strtod(argv[3], nullptr) : 1e18;
  const auto now = [] {
    const auto passed = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration<double>(passed).count();
  };
  const double begin = now();
  size_t done = 0, failed = 0;
  const std::vector<cases::Case> all = cases::all(first, seeds);
  for (const cases::Case& c : all) {
    if (now() > until) break;
    ++done;
    try {
      cases::run(c, true);
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s\n", error.what());
    }
  }
  std::printf("%zu of %zu cases, %zu failed, %.1f s\n", done, all.size(), failed, now() - begin);
  return failed == 0 && done > 0 ? 0 : 1;
}
