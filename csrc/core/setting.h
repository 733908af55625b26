// The coefficients of one parameter group, in double. Python computes them from learning rates,
// decay and prediction laws.
//
// Callers pass tuples: the numbers of a Term, or those of a Setting followed by its step, in the
// order of `each_number`, whose names the module exports.
#pragma once

#include "config.h"

namespace spectrain {

// Extra outputs of one kernel; further predictions take further passes.
constexpr int kMaxOuts = 8;
// Terms of all predictions of a call. A term is one predicted update: momentum SGD needs one per
// prediction, Adam's geometric law one per update ahead.
constexpr int kMaxTerms = 64;

// One predicted update: W <- keep*W - (momentum*v + gradient*d) / D, where D is 1 for momentum SGD
// and sqrt(second moment)*root + eps for Adam.
struct Term {
  double keep = 1.0;
  double momentum = 0.0;
  double gradient = 0.0;
  double root = 1.0;
};

// The step is also a term: W' = keep*W - (momentum*v' + gradient*d) / D.
struct Setting {
  double sign = 1.0;          // -1: maximize
  double weight_decay = 0.0;  // L2: d = sign*factor*g + weight_decay*W, see options.h
  double decay = 0.0;         // of the momentum: v' = decay*v + gain*d
  double gain = 1.0;
  double decay2 = 0.0;  // of Adam's second moment: u' = decay2*u + (1 - decay2)*d*d
  double eps = 0.0;
  Term step;
  bool first_step = false;  // v' = d for all tensors; single tensors have kFirstStep in their row
  int n_outs = 0;
  int out_end[kMaxOuts] = {};  // terms of prediction j: [out_end[j-1], out_end[j])
  Term terms[kMaxTerms];

  SPECTRAIN_HD int n_terms() const { return n_outs > 0 ? out_end[n_outs - 1] : 0; }
};

// Calls f(name, number) for every number, in order.
template <class F>
SPECTRAIN_HD void each_number(Term& t, F&& f) {
  f("keep", t.keep);
  f("momentum", t.momentum);
  f("gradient", t.gradient);
  f("root", t.root);
}
template <class F>
SPECTRAIN_HD void each_number(Setting& s, F&& f) {
  f("sign", s.sign);
  f("weight_decay", s.weight_decay);
  f("decay", s.decay);
  f("gain", s.gain);
  f("decay2", s.decay2);
  f("eps", s.eps);
}

}  // namespace spectrain
