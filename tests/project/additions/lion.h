// Lion: the step, which also writes predictions, and predictions alone.
//
//   d  = sign*factor*g
//   W' = keep*W - gradient*sign(decay2*v + (1 - decay2)*d)
//   v' = decay*v + gain*d
//
// Predictions: keep*W - momentum*sign(v).
#pragma once

#include "sgd.h"
#include "stream.h"
#include "terms.h"

namespace spectrain {

template <class Acc>
SPECTRAIN_HD Acc sign_of(Acc x) {
  return x > Acc(0) ? Acc(1) : x < Acc(0) ? Acc(-1) : x;
}

template <class Acc>
SPECTRAIN_HD Acc lion_move(const Coefficients<Acc>& c, Acc w, Acc v) {
  return minus(c.momentum, sign_of(v), c.keep * w);
}

template <class W, class G, class V, class Out>
struct LionStep : Defaults {
  using Acc = acc_t<W>;
  using Streams = StreamList<InOut<Role::params, W>, In<Role::grads, G>, InOut<Role::momentum, V>>;
  struct Step {
    Direction<Acc> direction;
    Acc decay, gain, decay2, gain2, keep, gradient;
  };
  struct Args {
    Step step;
    Predictions<Acc> predictions;
  };
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    a.step = {Direction<Acc>::make(s),          static_cast<Acc>(s.decay),
              static_cast<Acc>(s.gain),         static_cast<Acc>(s.decay2),
              static_cast<Acc>(1.0 - s.decay2), static_cast<Acc>(s.step.keep),
              static_cast<Acc>(s.step.gradient)};
    Predictions<Acc>::make(s, a.predictions);
  }
  SPECTRAIN_HD static Step step(const Args& a, unsigned /*flags*/, Acc factor) {
    Step step = a.step;
    step.direction = step.direction.scaled(factor);
    return step;
  }
  SPECTRAIN_HD static void apply(const Step& a, Acc (&x)[3]) {
    const Acc d = a.direction(x[Streams::grads], x[Streams::params]);
    const Acc way = sign_of(multiply_add(a.decay2, x[Streams::momentum], a.gain2 * d));
    x[Streams::params] = multiply_add(-a.gradient, way, a.keep * x[Streams::params]);
    x[Streams::momentum] = multiply_add(a.decay, x[Streams::momentum], a.gain * d);
  }

  static constexpr bool has_outs = true;
  using OutType = Out;
  using Move = Coefficients<Acc>;
  SPECTRAIN_HD static Move move(const Args& a, int term) { return a.predictions.term[term]; }
  SPECTRAIN_HD static void known(Acc (&)[3]) {}
  SPECTRAIN_HD static Acc advance(const Move& m, Acc w, const Acc (&x)[3]) {
    return lion_move(m, w, x[Streams::momentum]);
  }
};

template <class W, class V, class Out_>
struct LionPredict : SgdPredict<W, V, Out_> {
  using Acc = acc_t<W>;
  using Args = typename SgdPredict<W, V, Out_>::Args;
  static constexpr bool reads_rate = false;
  SPECTRAIN_HD static void apply(const Args& a, Acc (&x)[3]) {
    x[2] = lion_move(a.term, x[0], x[1]);
  }
};

}  // namespace spectrain
