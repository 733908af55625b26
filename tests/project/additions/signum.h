// Signum: the step, which also writes predictions, and predictions alone.
//
//   v' = decay*v + gain*d
//   W' = W - momentum*sign(v')
//
// Predictions: W - momentum*sign(v).
#pragma once

#include "lion.h"
#include "stream.h"
#include "terms.h"

namespace spectrain {

template <class W, class G, class V, class Out>
struct SignumStep : Defaults {
  using Acc = acc_t<W>;
  using Streams = StreamList<InOut<Role::params, W>, In<Role::grads, G>, InOut<Role::momentum, V>>;
  struct Step {
    Direction<Acc> direction;
    Acc decay, gain;
    Coefficients<Acc> move;
  };
  struct Args {
    Step step;
    Predictions<Acc> predictions;
  };
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    a.step = {Direction<Acc>::make(s), static_cast<Acc>(s.decay), static_cast<Acc>(s.gain),
              Coefficients<Acc>::make(s.step)};
    Predictions<Acc>::make(s, a.predictions);
  }
  SPECTRAIN_HD static Step step(const Args& a, unsigned /*flags*/, Acc factor) {
    Step step = a.step;
    step.direction = step.direction.scaled(factor);
    return step;
  }
  SPECTRAIN_HD static void apply(const Step& a, Acc (&x)[3]) {
    const Acc d = a.direction(x[Streams::grads], x[Streams::params]);
    x[Streams::momentum] = multiply_add(a.decay, x[Streams::momentum], a.gain * d);
    x[Streams::params] = lion_move(a.move, x[Streams::params], x[Streams::momentum], Acc(0));
  }

  static constexpr bool has_outs = true;
  using OutType = Out;
  using Move = Coefficients<Acc>;
  SPECTRAIN_HD static Move move(const Args& a, int term) { return a.predictions.term[term]; }
  SPECTRAIN_HD static void known(Acc (&)[3]) {}
  SPECTRAIN_HD static Acc advance(const Move& m, Acc w, const Acc (&x)[3]) {
    return lion_move(m, w, x[Streams::momentum], Acc(0));
  }
};

template <class W, class V, class Out_>
struct SignumPredict : LionPredict<W, V, Out_> {
  static constexpr bool reads_memory = false;
};

}  // namespace spectrain
