// Calls of plans, drawn from numbers: every rule with every combination of types, on lists of many
// shapes. Each is made on the device through the CUDA runtime, interpreted or real, and on the CPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace cases {

struct Case {
  const char* name;  // of the operation; "distances" has none
  spectrain::KernelKey key;
  uint64_t seed;
  std::string text() const;
};

// Every operation and combination of types that has a kernel, with `seeds` seeds from `first` on.
// Successive seeds choose the shapes of the lists in turn; the rest is drawn.
std::vector<Case> all(uint64_t first, uint64_t seeds);

// Throws std::runtime_error with the case's text, and the first element that is not the CPU's to
// the bit. NaN equals NaN, except in copies. `clear_tables`: tables have zeros before they are
// written. Padding of arguments is copied without a value, which compute-sanitizer reports.
void run(const Case&, bool clear_tables = false);

}  // namespace cases
