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

template <class Acc>
struct SgdDirection {
  Acc sign, weight_decay;
  SPECTRAIN_HD static SgdDirection make(const Setting& s) {
    return {static_cast<Acc>(s.sign), static_cast<Acc>(s.weight_decay)};
  }
  SPECTRAIN_HD SgdDirection scaled(Acc factor) const { return {sign * factor, weight_decay}; }
  SPECTRAIN_HD Acc operator()(Acc g, Acc w) const {
    const Acc d = sign * g;
    return weight_decay != Acc(0) ? multiply_add(weight_decay, w, d) : d;  // 0*inf would be NaN
  }
};

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
  enum { kParam, kGrad, kMomentum };
  static constexpr const char* columns = "pgm";
  static constexpr bool reads_rate = true;
  using Streams = StreamList<InOut<W>, In<G>, InOut<V>>;
  struct Step {
    SgdDirection<Acc> direction;
    Acc decay, gain;
    Coefficients<Acc> move;
    Flag<Acc> first;  // there is no momentum yet
  };
  struct Args {
    Step step;
    Predictions<Acc> predictions;  // one term each
  };
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    a.step = {SgdDirection<Acc>::make(s), static_cast<Acc>(s.decay), static_cast<Acc>(s.gain),
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
    const Acc d = a.direction(x[kGrad], x[kParam]);
    const Acc v = a.first != Flag<Acc>(0) ? d : multiply_add(a.decay, x[kMomentum], a.gain * d);
    x[kMomentum] = v;
    x[kParam] = sgd_step(a.move, x[kParam], v, d);
    x[kGrad] = d;
  }

  static constexpr bool has_outs = true;
  static constexpr unsigned kKept = 1u << kGrad;  // the direction
  using OutType = Out;
  using Move = Coefficients<Acc>;
  SPECTRAIN_HD static Move move(const Args& a, int term) { return a.predictions.term[term]; }
  // The stored W and v, which a later predict would read.
  SPECTRAIN_HD static void known(Acc (&)[3]) {}
  SPECTRAIN_HD static Acc advance(const Move& m, Acc w, const Acc (&x)[3]) {
    return sgd_move(m, w, x[kMomentum], x[kGrad]);
  }
};

template <class W, class G>
struct SgdPlain : Defaults {
  using Acc = acc_t<W>;
  enum { kParam, kGrad };
  static constexpr const char* columns = "pg";
  static constexpr bool reads_rate = true;
  using Streams = StreamList<InOut<W>, In<G>>;
  struct Args {
    SgdDirection<Acc> direction;
    Acc keep, gradient;
  };
  using Step = Args;
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    a = {SgdDirection<Acc>::make(s), static_cast<Acc>(s.step.keep),
         static_cast<Acc>(s.step.gradient)};
  }
  SPECTRAIN_HD static Args step(const Args& a, unsigned /*flags*/, Acc factor) {
    return {a.direction.scaled(factor), a.keep, a.gradient};
  }
  SPECTRAIN_HD static void apply(const Args& a, Acc (&x)[2]) {
    const Acc d = a.direction(x[kGrad], x[kParam]);
    const Acc kept = a.keep == Acc(1) ? x[kParam] : a.keep * x[kParam];
    x[kParam] = multiply_add(-a.gradient, d, kept);
  }
};

// Weight prediction (SpecTrain, arXiv 1809.02839: W_hat = W - lr*s*v). The output may be W itself,
// because every element is read before it is written.
template <class W, class V, class Out_>
struct SgdPredict : Defaults {
  using Acc = acc_t<W>;
  enum { kParam, kMomentum, kOut };
  static constexpr const char* columns = "pmo";
  static constexpr bool reads_rate = true;
  using Streams = StreamList<In<W>, In<V>, Out<Out_>>;
  struct Args {
    Coefficients<Acc> term;
  };
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    a = {Coefficients<Acc>::make(s.terms[0])};
  }
  SPECTRAIN_HD static void apply(const Args& a, Acc (&x)[3]) {
    x[kOut] = sgd_move(a.term, x[kParam], x[kMomentum], Acc(0));
  }
};

// stash <- W and W <- prediction, in one pass: 16 bytes per float32 parameter instead of 20.
template <class W, class V>
struct SgdStashPredict : SgdPredict<W, V, W> {
  using Acc = acc_t<W>;
  enum { kParam, kMomentum, kStash };
  static constexpr const char* columns = "pmk";
  using Streams = StreamList<InOut<W>, In<V>, CopyOf<W, kParam>>;
  using Args = typename SgdPredict<W, V, W>::Args;
  SPECTRAIN_HD static void apply(const Args& a, Acc (&x)[3]) {
    x[kParam] = sgd_move(a.term, x[kParam], x[kMomentum], Acc(0));
  }
};

}  // namespace spectrain
