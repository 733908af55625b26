// Prediction from the weights alone (weight difference, LWP^w): out = W + T*(W - W_prev).
#pragma once

#include "stream.h"
#include "terms.h"

namespace spectrain {

template <class W>
struct Extrapolate : Defaults {
  using Acc = acc_t<W>;
  using Streams = StreamList<In<Role::params, W>, In<Role::stashed, W>, Out<Role::out, W>>;
  struct Args {
    Acc steps;
  };
  SPECTRAIN_HD static void make(const Setting& s, Args& a) {
    a.steps = static_cast<Acc>(s.terms[0].momentum);
  }
  SPECTRAIN_HD static void apply(const Args& a, Acc (&x)[3]) {
    x[Streams::out] =
        multiply_add(a.steps, x[Streams::params] - x[Streams::stashed], x[Streams::params]);
  }
};

}  // namespace spectrain
