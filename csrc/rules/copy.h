// out <- in: bit for bit (stash, restore_, predictions with steps == 0), or rounded to a narrower
// type.
#pragma once

#include "stream.h"

namespace spectrain {

template <class Bits>
struct Copy : NoArgs {
  using Acc = Bits;
  using Streams = StreamList<In<Role::params, Bits>, CopyOf<Role::stashed, Bits, 0>>;
  SPECTRAIN_HD static void apply(const Args&, Acc (&)[2]) {}
};

template <class W, class Out_>
struct Cast : NoArgs {
  using Acc = acc_t<W>;
  using Streams = StreamList<In<Role::params, W>, Out<Role::out, Out_>>;
  SPECTRAIN_HD static void apply(const Args&, Acc (&x)[2]) { x[Streams::out] = x[Streams::params]; }
};

// a <-> b, bit for bit.
template <class Bits>
struct Swap : NoArgs {
  using Acc = Bits;
  using Streams = StreamList<InOut<Role::params, Bits>, InOut<Role::stashed, Bits>>;
  SPECTRAIN_HD static void apply(const Args&, Acc (&x)[2]) {
    const Acc a = x[0];
    x[0] = x[1];
    x[1] = a;
  }
};

}  // namespace spectrain
