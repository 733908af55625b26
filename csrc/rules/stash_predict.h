// stash <- W and W <- W - lr*s*v, in one pass: 16 bytes a float32 parameter instead of 20.
#pragma once

#include "../hyper.h"
#include "prediction.h"
#include "stream.h"

namespace spectrain {

template <class W, class V>
struct StashPredict : NoOuts {
  using Acc = acc_t<W>;
  enum { kParam, kMomentum, kStash };
  using Streams = StreamList<InOut<W>, In<V>, CopyOf<W, kParam>>;
  struct Args {
    Acc distance;  // lr * s
  };
  static Args make(const Hyper& h) { return {static_cast<Acc>(h.lr * h.steps)}; }
  SPECTRAIN_HD static void apply(const Args& a, unsigned /*flags*/, Acc (&x)[3]) {
    x[kParam] = advance(a.distance, x[kMomentum], x[kParam]);
  }
};

}  // namespace spectrain
