// a <-> b, bit for bit.
#pragma once

#include "core/setting.h"
#include "stream.h"

namespace spectrain {

template <class Bits>
struct Swap : NoOuts {
  using Acc = Bits;
  using Streams = StreamList<InOut<Bits>, InOut<Bits>>;
  struct Args {};
  SPECTRAIN_HD static void make(const Setting&, Args&) {}
  SPECTRAIN_HD static const Args& step(const Args& a, unsigned /*flags*/, factor_t<Acc>) {
    return a;
  }
  SPECTRAIN_HD static void apply(const Args&, Acc (&x)[2]) {
    const Acc a = x[0];
    x[0] = x[1];
    x[1] = a;
  }
};

}  // namespace spectrain
