// What a step is told beside its numbers. An option is a field here, which plans, tables and
// launches hand on as it is, down to the kernel that asks for it.
#pragma once

#include <cstdint>

#include "config.h"

namespace spectrain {

// Scalars of a step that lie where its tensors do, so that no caller has to wait for the device:
// whether the step is made at all, and what its gradients are multiplied by. One element each;
// null: absent.
struct Gate {
  const float* found_inf = nullptr;    // not 0: nothing is written
  const float* grad_scale = nullptr;   // gradients are divided by it
  const float* clip_factor = nullptr;  // and multiplied by it

  SPECTRAIN_HD bool skips() const { return found_inf != nullptr && *global(found_inf) != 0.0f; }
  // In double: of a scale that is a power of two the reciprocal is exact in any arithmetic type.
  SPECTRAIN_HD double factor() const {
    const double factor = clip_factor != nullptr ? *global(clip_factor) : 1.0;
    return grad_scale != nullptr ? factor / *global(grad_scale) : factor;
  }
};

// Stochastic rounding of new weights, which have to be bfloat16; see rules/rounding.h.
//
// The random bits of an element are a function of the seed and of its position in the call alone:
// the same on every machine, however the call is cut into rows, chunks and threads. The generator
// is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
// 2014): the position counts its steps from a start that the seed gives.
struct Rounding {
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;

  bool stochastic = false;
  uint64_t start = 0;

  static Rounding seeded(uint64_t seed) { return {true, mix(seed + kStep)}; }
  // The generator's state at an element; that of the next one is kStep behind it.
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
  bool zero_grad = false;  // gradients are set to zero after they were read, or the step skipped

  // Of a later pass of the same step, which has no gradients.
  StepOptions of_later_pass() const {
    StepOptions options;
    options.gate.found_inf = gate.found_inf;
    return options;
  }
};

}  // namespace spectrain
