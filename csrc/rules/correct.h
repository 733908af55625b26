// Steps that correct gradients by the weights they were computed with, in the same pass. They read
// one more stream, and update one more if the correction has an average.
#pragma once

#include <type_traits>

#include "core/scalar.h"
#include "core/setting.h"
#include "stream.h"

namespace spectrain {

// DC-ASGD (arXiv 1609.08326): g + strength*g*g*(W - W_stale), then the L2 penalty. With strength 0
// or no gap the gradient is unchanged, because 0*inf would be NaN.
template <class Acc>
struct DelayCompensation {
  static constexpr bool averages = false;
  static constexpr bool divides = false;
  Acc strength;

  SPECTRAIN_HD static DelayCompensation make(const Correcting& c) {
    return {static_cast<Acc>(c.strength)};
  }
  template <class Direction>
  SPECTRAIN_HD Acc direction(const Direction& by, Acc g, Acc w, Acc stale, Acc /*average*/) const {
    const Acc given = by.sign * g;
    const Acc compensated = multiply_add(strength * given * given, w - stale, given);
    return by.decayed(strength == Acc(0) || w == stale ? given : compensated, w);
  }
};

// Gap-Aware (arXiv 1909.10802): d / (1 + strength*|W - W_stale| / (sqrt(A)*root + eps)), where A is
// the average of the squares of previous steps.
template <class Acc>
struct GapAware {
  static constexpr bool averages = true;
  static constexpr bool divides = true;
  Acc strength, decay, gain, root, eps;

  SPECTRAIN_HD static GapAware make(const Correcting& c) {
    return {static_cast<Acc>(c.strength), static_cast<Acc>(c.decay),
            static_cast<Acc>(1.0 - c.decay), static_cast<Acc>(c.root), static_cast<Acc>(c.eps)};
  }
  template <class Direction>
  SPECTRAIN_HD Acc direction(const Direction& by, Acc g, Acc w, Acc stale, Acc average) const {
    const Acc d = by(g, w);
    const Acc gap = w < stale ? stale - w : w - stale;
    const Acc usual = multiply_add(square_root(average), root, eps);
    const Acc penalized = d / (Acc(1) + strength * gap / usual);
    return strength == Acc(0) || w == stale ? d : penalized;
  }
  SPECTRAIN_HD Acc averaged(Acc average, Acc step) const {
    return multiply_add(decay, average, gain * step * step);
  }
};

// The streams of a step, then the average, then the stale weights. An output may overwrite the
// stale weights, which are read first.
template <class Base, template <class> class By, class S, class Stale>
struct Corrected : Base {
  using Acc = typename Base::Acc;
  using Correction = By<Acc>;
  static constexpr int kStale = Base::Streams::size + (Correction::averages ? 1 : 0);
  static constexpr int kAverage = Base::Streams::size;  // without an average: the stale weights
  using Streams = typename std::conditional_t<Correction::averages,
                                              Appended<typename Base::Streams, InOut<S>, In<Stale>>,
                                              Appended<typename Base::Streams, In<Stale>>>::type;
  static constexpr bool divides = Base::divides || Correction::divides;

  struct Step : Base::Step {
    Correction by;
  };
  struct Args : Base::Args {
    Correction by;
  };
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    Base::make(s, a);
    a.by = Correction::make(s.correcting);
  }
  SPECTRAIN_HD static Step step(const Args& a, unsigned flags, Acc factor) {
    return {{Base::step(a, flags, factor)}, a.by};
  }
  template <int N>
  SPECTRAIN_HD static void apply(const Step& a, Acc (&x)[N]) {
    const Acc d =
        a.by.direction(a.direction, x[Base::kGrad], x[Base::kParam], x[kStale], x[kAverage]);
    const Acc step = Base::moved(a, x, d);
    if constexpr (Correction::averages) x[kAverage] = a.by.averaged(x[kAverage], step);
  }
};

template <class Rule>
constexpr bool is_corrected = false;
template <class Base, template <class> class By, class S, class Stale>
constexpr bool is_corrected<Corrected<Base, By, S, Stale>> = true;

}  // namespace spectrain
