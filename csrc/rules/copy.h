// out <- in, bit for bit: stash, restore_, and every prediction with steps == 0.
#pragma once

#include "../hyper.h"
#include "stream.h"

namespace spectrain {

template <class Bits>
struct Copy : NoOuts {
  using Acc = Bits;
  enum { kSource, kTarget };
  using Streams = StreamList<In<Bits>, CopyOf<Bits, kSource>>;
  struct Args {};
  static Args make(const Hyper&) { return {}; }
  SPECTRAIN_HD static void apply(const Args&, unsigned /*flags*/, Acc (&)[2]) {}
};

}  // namespace spectrain
