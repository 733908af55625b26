// out <- in: bit for bit (stash, restore_, predictions with steps == 0), or rounded to a narrower
// type.
#pragma once

#include "core/setting.h"
#include "stream.h"

namespace spectrain {

template <class Bits>
struct Copy : NoOuts {
  using Acc = Bits;
  enum { kSource, kTarget };
  using Streams = StreamList<In<Bits>, CopyOf<Bits, kSource>>;
  struct Args {};
  SPECTRAIN_HD static void make(const Setting&, Args&) {}
  SPECTRAIN_HD static const Args& step(const Args& a, unsigned /*flags*/, factor_t<Acc>) {
    return a;
  }
  SPECTRAIN_HD static void apply(const Args&, Acc (&)[2]) {}
};

template <class W, class Out_>
struct Cast : NoOuts {
  using Acc = acc_t<W>;
  enum { kSource, kTarget };
  using Streams = StreamList<In<W>, Out<Out_>>;
  struct Args {};
  SPECTRAIN_HD static void make(const Setting&, Args&) {}
  SPECTRAIN_HD static const Args& step(const Args& a, unsigned /*flags*/, factor_t<Acc>) {
    return a;
  }
  SPECTRAIN_HD static void apply(const Args&, Acc (&x)[2]) { x[kTarget] = x[kSource]; }
};

}  // namespace spectrain
