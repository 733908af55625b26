// Options of a step. Plans, tables and launches pass them unchanged to the kernel.
#pragma once

#include <cstdint>

#include "config.h"

namespace spectrain {

// Scalars of a step in device memory, so that the host does not wait for them: whether to skip the
// step, and the gradients' factor. One element each; null: absent.
struct Gate {
  const float* found_inf = nullptr;    // not 0: nothing is written
  const float* grad_scale = nullptr;   // divides gradients
  const float* clip_factor = nullptr;  // multiplies gradients

  SPECTRAIN_HD bool skips() const { return found_inf != nullptr && *global(found_inf) != 0.0f; }
  // In double. The reciprocal of a power of two is exact in any arithmetic type.
  SPECTRAIN_HD double factor() const {
    const double factor = clip_factor != nullptr ? *global(clip_factor) : 1.0;
    return grad_scale != nullptr ? factor / *global(grad_scale) : factor;
  }
};

// Stochastic rounding of new bfloat16 weights; see rules/rounding.h.
//
// The random bits of an element depend only on the seed and its position in the call, so they are
// the same on every machine and for every division into rows, chunks and threads. The generator is
// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014),
// advanced by the position from a start given by the seed.
struct Rounding {
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;

  bool stochastic = false;
  uint64_t start = 0;

  static Rounding seeded(uint64_t seed) { return {true, mix(seed + kStep)}; }
  // The generator's state at an element; the next element's is larger by kStep.
  SPECTRAIN_HD uint64_t state(uint64_t position) const { return start + position * kStep; }

  SPECTRAIN_HD static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
};

struct StepOptions {
  Gate gate = {};
  Rounding rounding = {};
  bool zero_grad = false;  // set gradients to zero after reading them, also in a skipped step

  // The options of a later pass of the same step, which has no gradients.
  StepOptions of_later_pass() const {
    StepOptions options;
    options.gate.found_inf = gate.found_inf;
    return options;
  }
};

}  // namespace spectrain
