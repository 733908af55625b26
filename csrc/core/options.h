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
  // In the arithmetic type. A float quotient x/y has the bits of a double one rounded to float: let
  // m be a midpoint of two floats (25 bits). x - m*y is 0, and then m is exact in double, or at
  // least a unit of x (24 bits) or of m*y (49 bits): x/y is 2^-49 of its value away from m, and
  // rounding to double, which moves it by 2^-53, does not take it to m or past it.
  template <class Acc>
  SPECTRAIN_HD Acc factor() const {
    const Acc factor = clip_factor != nullptr ? *global(clip_factor) : Acc(1);
    return grad_scale != nullptr ? factor / *global(grad_scale) : factor;
  }
};

// Stochastic rounding to bfloat16, of new weights or of second moments; see rules/rounding.h.
//
// The random bits of an element depend only on the seed and its position in the call, so they are
// the same on every machine and for every division into rows, chunks and threads. The generator is
// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014),
// advanced from a start given by the seed. A number of 64 bits serves four elements, because its
// multiplications of 64 bits are slow on a CPU and several instructions on a GPU.
struct Rounding {
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;
  static constexpr int kShared = 4;  // elements of a number

  bool stochastic = false;
  uint64_t start = 0;

  SPECTRAIN_HD static Rounding seeded(uint64_t seed) { return {true, mix(seed + kStep)}; }
  // The random bits of four elements, of which the first one's position is a multiple of four: the
  // lowest 16 bits are its own.
  SPECTRAIN_HD uint64_t bits(uint64_t position) const {
    return mix(start + position / kShared * kStep);
  }

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
