// SGD with momentum with torch.optim's arithmetic: the step, which also writes predictions, and
// predictions alone.
//
//   d  = sign*factor*g + weight_decay*W
//   v' = decay*v + gain*d
//   W' = keep*W - momentum*v' - gradient*d
//
// Every prediction has the last form, from W'.
#pragma once

#include "stream.h"
#include "terms.h"

namespace spectrain {

// The step. Non-finite values in v reach W even if lr is 0, as in torch.
template <class Acc>
SPECTRAIN_HD Acc sgd_step(const Coefficients<Acc>& c, Acc w, Acc v, Acc d) {
  const Acc kept = c.keep == Acc(1) ? w : c.keep * w;
  return multiply_add(-c.momentum, v, minus(c.gradient, d, kept));
}

// A predicted step.
template <class Acc>
SPECTRAIN_HD Acc sgd_move(const Coefficients<Acc>& c, Acc w, Acc v, Acc d) {
  const Acc kept = c.keep == Acc(1) ? w : c.keep * w;
  return minus(c.momentum, v, minus(c.gradient, d, kept));
}

template <class W, class G, class V, class Out>
struct SgdStep : Defaults {
  using Acc = acc_t<W>;
  static constexpr bool reads_memory = true;
  using Streams = StreamList<InOut<Role::params, W>, In<Role::grads, G>, InOut<Role::momentum, V>>;
  struct Step {
    Direction<Acc> direction;
    Acc decay, gain;
    Coefficients<Acc> move;
    Flag<Acc> first;  // there is no momentum yet
  };
  struct Args {
    Step step;
    Predictions<Acc> predictions;  // one term each
  };
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    a.step = {Direction<Acc>::make(s), static_cast<Acc>(s.decay), static_cast<Acc>(s.gain),
              Coefficients<Acc>::make(s.step), static_cast<Flag<Acc>>(s.first_step)};
    Predictions<Acc>::make(s, a.predictions);
  }
  SPECTRAIN_HD static Step step(const Args& a, unsigned flags, Acc factor) {
    Step step = a.step;
    step.direction = step.direction.scaled(factor);
    if ((flags & kFirstStep) != 0) step.first = Flag<Acc>(1);
    return step;
  }
  SPECTRAIN_HD static void apply(const Step& a, Acc (&x)[3]) {
    const Acc d = a.direction(x[Streams::grads], x[Streams::params]);
    const Acc v =
        a.first != Flag<Acc>(0) ? d : multiply_add(a.decay, x[Streams::momentum], a.gain * d);
    x[Streams::momentum] = v;
    x[Streams::params] = sgd_step(a.move, x[Streams::params], v, d);
    x[Streams::grads] = d;
  }

  static constexpr bool has_outs = true;
  static constexpr unsigned kKept = 1u << Streams::grads;  // the direction
  using OutType = Out;
  using Move = Coefficients<Acc>;
  SPECTRAIN_HD static Move move(const Args& a, int term) { return a.predictions.term[term]; }
  // The stored W and v, which a later predict would read.
  SPECTRAIN_HD static void known(Acc (&)[3]) {}
  SPECTRAIN_HD static Acc advance(const Move& m, Acc w, const Acc (&x)[3]) {
    return sgd_move(m, w, x[Streams::momentum], x[Streams::grads]);
  }
};

template <class W, class G>
struct SgdPlain : Defaults {
  using Acc = acc_t<W>;
  static constexpr bool reads_memory = true;
  using Streams = StreamList<InOut<Role::params, W>, In<Role::grads, G>>;
  struct Args {
    Direction<Acc> direction;
    Acc keep, gradient;
  };
  using Step = Args;
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    a = {Direction<Acc>::make(s), static_cast<Acc>(s.step.keep), static_cast<Acc>(s.step.gradient)};
  }
  SPECTRAIN_HD static Args step(const Args& a, unsigned /*flags*/, Acc factor) {
    return {a.direction.scaled(factor), a.keep, a.gradient};
  }
  SPECTRAIN_HD static void apply(const Args& a, Acc (&x)[2]) {
    const Acc d = a.direction(x[Streams::grads], x[Streams::params]);
    const Acc kept = a.keep == Acc(1) ? x[Streams::params] : a.keep * x[Streams::params];
    x[Streams::params] = multiply_add(-a.gradient, d, kept);
  }
};

// Weight prediction (SpecTrain, arXiv 1809.02839: W_hat = W - lr*s*v). The output may be W itself,
// because every element is read before it is written.
template <class W, class V, class Out_>
struct SgdPredict : Defaults {
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
    x[Streams::out] = sgd_move(a.term, x[Streams::params], x[Streams::momentum], Acc(0));
  }
};

// stash <- W and W <- prediction, in one pass: 16 bytes per float32 parameter instead of 20.
template <class W, class V>
struct SgdStashPredict : SgdPredict<W, V, W> {
  using Acc = acc_t<W>;
  using Streams =
      StreamList<InOut<Role::params, W>, In<Role::momentum, V>, CopyOf<Role::stashed, W, 0>>;
  using Args = typename SgdPredict<W, V, W>::Args;
  SPECTRAIN_HD static void apply(const Args& a, Acc (&x)[3]) {
    x[Streams::params] = sgd_move(a.term, x[Streams::params], x[Streams::momentum], Acc(0));
  }
};

}  // namespace spectrain
