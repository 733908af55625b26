// Stochastic rounding to bfloat16: up or down with probabilities given by the distance, so that
// changes too small for round-to-nearest survive on average.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/options.h"
#include "core/scalar.h"
#include "stream.h"

namespace spectrain {

// Adds 16 random bits to the 16 truncated bits; a carry rounds away from zero. Values that bfloat16
// represents exactly, including infinities, do not change.
SPECTRAIN_HD BFloat16 round_stochastically(float x, uint16_t random) {
  const uint32_t u = bit_cast<uint32_t>(x);
  return {static_cast<uint16_t>((x != x ? u | 0x400000u : u + random) >> 16)};
}

// Whether a step may round a stream stochastically: bfloat16 weights, and second moments.
template <class Rule, int I>
constexpr bool rounds =
    kGradient<Rule> >= 0 && stream_t<Rule, I>::writes &&
    std::is_same_v<typename stream_t<Rule, I>::type, BFloat16> &&
    (stream_t<Rule, I>::role == Role::params || stream_t<Rule, I>::role == Role::second);

// How it does: weights by the call's option, second moments by their group's decay.
template <class Rule, int I>
SPECTRAIN_HD const Rounding& rounding_of(const typename Rule::Args& args,
                                         const StepOptions& options) {
  if constexpr (stream_t<Rule, I>::role == Role::params) {
    return options.rounding;
  } else {
    return args.second;
  }
}

}  // namespace spectrain
