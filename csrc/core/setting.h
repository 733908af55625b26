// The coefficients of one parameter group, in double. Python computes them from learning rates,
// decay and prediction laws.
#pragma once

#include "config.h"
#include "scalar.h"

namespace spectrain {

// Extra outputs of one kernel; further predictions take further passes.
constexpr int kMaxOuts = 8;
// Terms of all predictions of a call. A term is one predicted update: momentum SGD needs one per
// prediction, Adam's geometric law one per update ahead.
constexpr int kMaxTerms = 64;
// The same where they are computed from numbers in memory: as many settings as fit a kernel's
// parameters are.
constexpr int kMaxTermsFromMemory = 48;

// One predicted update: W <- keep*W - (momentum*v + gradient*d) / D, where D is 1 for momentum SGD
// and sqrt(second moment)*root + eps for Adam; for Lion W <- keep*W - momentum*sign(v +
// gradient*d). With a learning rate or a step count in memory every coefficient is a + b*lr: a is
// in the first numbers, b in the last ones. If `ahead` is not negative, the term has the bias
// corrections of Adam's update so many updates ahead: its momentum and gradient are b*(lr/(1 -
// beta1^t)).
struct Term {
  double keep = 1.0;
  double momentum = 0.0;
  double gradient = 0.0;
  double root = 1.0;
  double keep_per_lr = 0.0;
  double momentum_per_lr = 0.0;
  double gradient_per_lr = 0.0;
  double ahead = -1.0;

  bool keeps_weights() const { return keep == 1.0 && keep_per_lr == 0.0; }
  bool has_momentum() const { return momentum != 0.0 || momentum_per_lr != 0.0; }
  bool has_gradient() const { return gradient != 0.0 || gradient_per_lr != 0.0; }
};

// A number on the host, or in the memory of the weights' device, read when the kernel runs.
struct Number {
  const void* at = nullptr;  // null: on the host
  bool is_double = false;
  double on_host = 0.0;

  SPECTRAIN_HD double value() const {
    return at == nullptr ? on_host
           : is_double   ? *global(static_cast<const double*>(at))
                         : *global(static_cast<const float*>(at));
  }
};

// What the terms of a parameter group are computed from when the kernel runs.
struct Source {
  Number lr;
  double factor = 1.0;  // of the learning rate
  Number count;         // of Adam's steps, with this one
  double beta1 = 0.0, beta2 = 0.0;

  SPECTRAIN_HD bool in_memory() const { return lr.at != nullptr || count.at != nullptr; }

  // Replaces coefficients a + b*lr by their values, in the order of operations of numbers.py. Adds
  // nothing where b is 0, because 0*inf is NaN.
  SPECTRAIN_HD void complete(Term& t, double rate, double steps) const {
    if (t.keep_per_lr != 0.0) t.keep += t.keep_per_lr * rate;
    double along = rate;
    if (t.ahead >= 0.0) {
      if (steps < 1.0) {  // before the first step there is nothing to continue
        t = Term{};
        return;
      }
      along = rate / (1.0 - power(beta1, steps + t.ahead));
      t.root = 1.0 / square_root(1.0 - power(beta2, steps + t.ahead));
    }
    if (t.momentum_per_lr != 0.0) t.momentum += t.momentum_per_lr * along;
    if (t.gradient_per_lr != 0.0) t.gradient += t.gradient_per_lr * along;
  }
};

// A bfloat16 has 8 bits: a step can move a moment by less than half of its last one if the moment's
// decay is above this.
constexpr double kRoundedDecay = 1.0 - 1.0 / 256.0;

// The step is also a term: W' = keep*W - (momentum*v' + gradient*d) / D.
struct Setting {
  double sign = 1.0;          // -1: maximize
  double weight_decay = 0.0;  // L2: d = sign*factor*g + weight_decay*W, see options.h
  double decay = 0.0;         // of the momentum: v' = decay*v + gain*d
  double gain = 1.0;
  double decay2 = 0.0;  // of Adam's second moment: u' = decay2*u + (1 - decay2)*d*d
  double eps = 0.0;
  double count = 0.0;  // of Adam's steps: seeds the rounding of bfloat16 second moments
  Term step;
  bool first_step = false;  // v' = d for all tensors; single tensors have kFirstStep in their row
  int n_outs = 0;
  int out_end[kMaxOuts] = {};  // terms of prediction j: [out_end[j-1], out_end[j])
  Source source;
  Term terms[kMaxTerms];

  SPECTRAIN_HD int n_terms() const { return n_outs > 0 ? out_end[n_outs - 1] : 0; }
  // Whether the second moment, if it is bfloat16, is rounded stochastically.
  SPECTRAIN_HD bool rounds_second() const { return decay2 > kRoundedDecay; }

  // Reads the numbers in memory, and replaces the coefficients that depend on them by their values.
  SPECTRAIN_HD void read_memory() {
    const double lr = source.lr.value() * source.factor, steps = source.count.value();
    source.complete(step, lr, steps);
    for (int i = 0; i < n_terms(); ++i) source.complete(terms[i], lr, steps);
    count = steps;
  }
};

}  // namespace spectrain
