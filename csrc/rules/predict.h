// Weight prediction (SpecTrain, arXiv 1809.02839): W_hat = W - lr*s*v.
#pragma once

#include "../hyper.h"
#include "prediction.h"
#include "stream.h"

namespace spectrain {

// The output may be W itself: every element is read before it is written.
template <class W, class V>
struct Predict : NoOuts {
  using Acc = acc_t<W>;
  enum { kParam, kMomentum, kOut };
  using Streams = StreamList<In<W>, In<V>, Out<W>>;
  struct Args {
    Acc distance;  // lr * s
  };
  static Args make(const Hyper& h) { return {static_cast<Acc>(h.lr * h.steps)}; }
  SPECTRAIN_HD static void apply(const Args& a, unsigned /*flags*/, Acc (&x)[3]) {
    x[kOut] = advance(a.distance, x[kMomentum], x[kParam]);
  }
};

}  // namespace spectrain
