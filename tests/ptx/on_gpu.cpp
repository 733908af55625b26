// Runs the cases on a GPU, as compute-sanitizer needs them: on_gpu [FIRST SEED] [NUMBER OF SEEDS]
// [SECONDS]. After these seconds it begins no further case.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cases.h"

int main(int argc, char** argv) {
  const uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const uint64_t seeds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const double seconds = argc > 3 ? std::strtod(argv[3], nullptr) : 1e9;
  const auto begin = std::chrono::steady_clock::now();
  const auto passed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  size_t done = 0, failed = 0;
  const std::vector<cases::Case> all = cases::all(first, seeds);
  for (const cases::Case& c : all) {
    if (passed() > seconds) break;
    ++done;
    try {
      cases::run(c);
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s\n", error.what());
    }
  }
  std::printf("%zu of %zu cases, %zu failed, %.1f s\n", done, all.size(), failed, passed());
  return failed == 0 && done > 0 ? 0 : 1;
}
