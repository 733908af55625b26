// a <-> b, bit for bit.
#pragma once

#include "stream.h"

namespace spectrain {

template <class Bits>
struct Swap : NoArgs {
  using Acc = Bits;
  using Streams = StreamList<InOut<Bits>, InOut<Bits>>;
  SPECTRAIN_HD static void apply(const Args&, Acc (&x)[2]) {
    const Acc a = x[0];
    x[0] = x[1];
    x[1] = a;
  }
};

}  // namespace spectrain
