// out <- in: bit for bit (stash, restore_, predictions with steps == 0), or rounded to a narrower
// type.
#pragma once

#include "stream.h"

namespace spectrain {

template <class Bits>
struct Copy : NoArgs {
  using Acc = Bits;
  enum { kSource, kTarget };
  static constexpr const char* columns = "pk";
  using Streams = StreamList<In<Bits>, CopyOf<Bits, kSource>>;
  SPECTRAIN_HD static void apply(const Args&, Acc (&)[2]) {}
};

template <class W, class Out_>
struct Cast : NoArgs {
  using Acc = acc_t<W>;
  enum { kSource, kTarget };
  static constexpr const char* columns = "po";
  using Streams = StreamList<In<W>, Out<Out_>>;
  SPECTRAIN_HD static void apply(const Args&, Acc (&x)[2]) { x[kTarget] = x[kSource]; }
};

// a <-> b, bit for bit.
template <class Bits>
struct Swap : NoArgs {
  using Acc = Bits;
  static constexpr const char* columns = "pk";
  using Streams = StreamList<InOut<Bits>, InOut<Bits>>;
  SPECTRAIN_HD static void apply(const Args&, Acc (&x)[2]) {
    const Acc a = x[0];
    x[0] = x[1];
    x[1] = a;
  }
};

}  // namespace spectrain
