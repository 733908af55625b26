// Coefficients of a step or a prediction in the arithmetic type of a rule, and a step's direction.
#pragma once

#include "core/scalar.h"
#include "core/setting.h"

namespace spectrain {

template <class Acc>
struct Coefficients {
  Acc keep, momentum, gradient, root;
  SPECTRAIN_HD static Coefficients make(const Term& t) {
    return {static_cast<Acc>(t.keep), static_cast<Acc>(t.momentum), static_cast<Acc>(t.gradient),
            static_cast<Acc>(t.root)};
  }
};

// d = sign*factor*g + weight_decay*W, the gradient that steps use.
template <class Acc>
struct Direction {
  Acc sign, weight_decay;
  SPECTRAIN_HD static Direction make(const Setting& s) {
    return {static_cast<Acc>(s.sign), static_cast<Acc>(s.weight_decay)};
  }
  SPECTRAIN_HD Direction scaled(Acc factor) const { return {sign * factor, weight_decay}; }
  SPECTRAIN_HD Acc operator()(Acc g, Acc w) const {
    const Acc d = sign * g;
    return weight_decay != Acc(0) ? multiply_add(weight_decay, w, d) : d;  // 0*inf would be NaN
  }
};

// The terms of all predictions of a call. The last member of a rule's Args: on a GPU memory ends
// behind the terms in use.
template <class Acc>
struct Predictions {
  int n_outs;
  int end[kMaxOuts];
  Coefficients<Acc> term[kMaxTerms];

  SPECTRAIN_HD int begin(int j) const { return j == 0 ? 0 : end[j - 1]; }

  // In place: a copy would use local memory on a GPU.
  SPECTRAIN_HD static void make(const Setting& s, Predictions& p) {
    p.n_outs = s.n_outs;
    for (int j = 0; j < kMaxOuts; ++j) p.end[j] = s.out_end[j];
    const int n = s.n_terms();
    SPECTRAIN_NO_UNROLL
    for (int i = 0; i < n; ++i) p.term[i] = Coefficients<Acc>::make(s.terms[i]);
  }
};

// W - c*x. A coefficient of 0 (also by underflow of lr*s) keeps W, because 0*inf would be NaN.
template <class Acc>
SPECTRAIN_HD Acc minus(Acc c, Acc x, Acc w) {
  return c == Acc(0) ? w : multiply_add(-c, x, w);
}

}  // namespace spectrain
