// Lion (Chen et al., arXiv 2302.06675): the step, which also writes predictions, and predictions
// alone.
//
//   d  = sign*factor*g
//   W' = keep*W - gradient*sign(decay2*v + (1 - decay2)*d)
//   v' = decay*v + gain*d
//
// The next update's direction needs the next gradient. A prediction takes the sign of the momentum
// instead, or of v + gradient*d, and has the form keep*W - momentum*sign(v + gradient*d).
#pragma once

#include "stream.h"
#include "terms.h"

namespace spectrain {

// 0 of both zeros, and NaN of NaN; with one comparison.
template <class Acc>
SPECTRAIN_HD Acc sign_of(Acc x) {
  return magnitude(x) > Acc(0) ? with_sign(Acc(1), x) : x * x;
}

template <class Acc>
SPECTRAIN_HD Acc lion_move(const Coefficients<Acc>& c, Acc w, Acc v, Acc d) {
  const Acc kept = c.keep == Acc(1) ? w : c.keep * w;
  return minus(c.momentum, sign_of(c.gradient == Acc(0) ? v : multiply_add(c.gradient, d, v)),
               kept);
}

template <class W, class G, class V, class Out>
struct LionStep : Defaults {
  using Acc = acc_t<W>;
  static constexpr bool reads_memory = true;
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
    x[Streams::params] =
        minus(a.gradient, way, a.keep == Acc(1) ? x[Streams::params] : a.keep * x[Streams::params]);
    x[Streams::momentum] = multiply_add(a.decay, x[Streams::momentum], a.gain * d);
    x[Streams::grads] = d;
  }

  static constexpr bool has_outs = true;
  static constexpr bool divides = sizeof(Acc) == sizeof(double);  // as many registers are needed
  static constexpr unsigned kKept = 1u << Streams::grads;         // the direction
  using OutType = Out;
  using Move = Coefficients<Acc>;
  SPECTRAIN_HD static Move move(const Args& a, int term) { return a.predictions.term[term]; }
  SPECTRAIN_HD static void known(Acc (&)[3]) {}
  SPECTRAIN_HD static Acc advance(const Move& m, Acc w, const Acc (&x)[3]) {
    return lion_move(m, w, x[Streams::momentum], x[Streams::grads]);
  }
};

// The output may be W itself, because every element is read before it is written.
template <class W, class V, class Out_>
struct LionPredict : Defaults {
  using Acc = acc_t<W>;
  static constexpr bool reads_memory = true;
  using Streams = StreamList<In<Role::params, W>, In<Role::momentum, V>, Out<Role::out, Out_>>;
  struct Args {
    Coefficients<Acc> term;
  };
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    a = {Coefficients<Acc>::make(s.terms[0])};
  }
  SPECTRAIN_HD static void apply(const Args& a, Acc (&x)[3]) {
    x[Streams::out] = lion_move(a.term, x[Streams::params], x[Streams::momentum], Acc(0));
  }
};

}  // namespace spectrain
