// One step of SGD, torch.optim.SGD's arithmetic, that also writes any number of predictions of the
// new weights: W_hat = W' - lr*s*v' (SpecTrain, arXiv 1809.02839), in the same pass over memory.
#pragma once

#include "../hyper.h"
#include "prediction.h"
#include "stream.h"

namespace spectrain {

// A row flag: this tensor has no momentum yet, its buffer becomes the gradient.
constexpr unsigned kFirstStep = 1;

template <class Acc>
struct SgdGradient {
  Acc sign, weight_decay;
  static SgdGradient make(const Hyper& h) {
    return {static_cast<Acc>(h.maximize ? -1 : 1), static_cast<Acc>(h.weight_decay)};
  }
  SPECTRAIN_HD Acc operator()(Acc g, Acc w) const {
    const Acc d = sign * g;
    return weight_decay != Acc(0) ? multiply_add(weight_decay, w, d) : d;  // 0*inf would be NaN
  }
};

template <class W, class V>
struct SgdMomentum {
  using Acc = acc_t<W>;
  enum { kParam, kGrad, kMomentum };
  using Streams = StreamList<InOut<W>, In<W>, InOut<V>>;
  struct Args {
    SgdGradient<Acc> gradient;
    Acc lr, momentum, undamped;  // undamped: 1 - dampening
    bool nesterov, first_step;
    int n_outs;
    Acc distance[kMaxOuts];  // lr * s of every extra output
  };
  static Args make(const Hyper& h) {
    Args a{SgdGradient<Acc>::make(h),
           static_cast<Acc>(h.lr),
           static_cast<Acc>(h.momentum),
           static_cast<Acc>(1.0 - h.dampening),
           h.nesterov,
           h.first_step,
           h.n_outs,
           {}};
    for (int j = 0; j < h.n_outs; ++j) a.distance[j] = static_cast<Acc>(h.lr * h.out_steps[j]);
    return a;
  }
  SPECTRAIN_HD static void apply(const Args& a, unsigned flags, Acc (&x)[3]) {
    const bool first = a.first_step || (flags & kFirstStep) != 0;
    const Acc d = a.gradient(x[kGrad], x[kParam]);
    const Acc v = first ? d : multiply_add(a.momentum, x[kMomentum], a.undamped * d);
    x[kMomentum] = v;
    x[kParam] = multiply_add(-a.lr, a.nesterov ? multiply_add(a.momentum, v, d) : v, x[kParam]);
  }

  static constexpr bool has_outs = true;
  using OutType = W;
  // Computed from the values as they were stored, so that it is what a later predict would give.
  SPECTRAIN_HD static Acc out(const Args& a, int j, const Acc (&x)[3]) {
    return advance(a.distance[j], x[kMomentum], x[kParam]);
  }
};

template <class W>
struct SgdPlain : NoOuts {
  using Acc = acc_t<W>;
  enum { kParam, kGrad };
  using Streams = StreamList<InOut<W>, In<W>>;
  struct Args {
    SgdGradient<Acc> gradient;
    Acc lr;
  };
  static Args make(const Hyper& h) { return {SgdGradient<Acc>::make(h), static_cast<Acc>(h.lr)}; }
  SPECTRAIN_HD static void apply(const Args& a, unsigned /*flags*/, Acc (&x)[2]) {
    x[kParam] = multiply_add(-a.lr, a.gradient(x[kGrad], x[kParam]), x[kParam]);
  }
};

}  // namespace spectrain
