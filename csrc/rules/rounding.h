// Stochastic rounding of new weights to bfloat16: up or down, with a probability proportional to
// the distance, so that updates too small for round to nearest are kept on average.
//
// The random bits of an element are a function of the seed and of its position in the call alone:
// the same on every machine, however the call is cut into rows, chunks and threads. The generator
// is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
// 2014): the position counts its steps from a start that the seed gives.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/scalar.h"
#include "stream.h"

namespace spectrain {

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

// Adds 16 random bits to the 16 that are cut off: what they carry rounds away from zero. A value
// that bfloat16 holds, an infinity among them, has none to cut off and stays.
SPECTRAIN_HD uint16_t round_stochastically(float x, uint64_t state) {
  const uint32_t u = bit_cast<uint32_t>(x);
  const auto random = static_cast<uint32_t>(Rounding::mix(state) >> 48);
  const uint32_t nan = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : (u + random) >> 16);
}

// Whether a rule has weights to round: it makes a step, and they are bfloat16.
template <class Rule>
SPECTRAIN_HD constexpr bool rounds_weights() {
  return Rule::kGradient >= 0 && std::is_same_v<typename stream_t<Rule, 0>::type, BFloat16>;
}

}  // namespace spectrain
