// The coefficients of one parameter group, in double. Python computes them from learning rates,
// decay and prediction laws.
#pragma once

#include "config.h"

namespace spectrain {

// Extra outputs of one kernel; further predictions take further passes.
constexpr int kMaxOuts = 8;
// Terms of all predictions of a call. A term is one predicted update: momentum SGD needs one per
// prediction, Adam's geometric law one per update ahead.
constexpr int kMaxTerms = 64;

// One predicted update: W <- keep*W - (momentum*v + gradient*d) / D, where D is 1 for momentum SGD
// and sqrt(second moment)*root + eps for Adam. With a learning rate in memory every coefficient of
// SGD is a + b*lr: a is in the first numbers, b in the last ones.
struct Term {
  double keep = 1.0;
  double momentum = 0.0;
  double gradient = 0.0;
  double root = 1.0;
  double keep_per_lr = 0.0;
  double momentum_per_lr = 0.0;
  double gradient_per_lr = 0.0;

  // Leaves the coefficients at a learning rate. Adds nothing where b is 0, because 0*inf is NaN.
  SPECTRAIN_HD void set_rate(double lr) {
    if (keep_per_lr != 0.0) keep += keep_per_lr * lr;
    if (momentum_per_lr != 0.0) momentum += momentum_per_lr * lr;
    if (gradient_per_lr != 0.0) gradient += gradient_per_lr * lr;
  }
  bool keeps_weights() const { return keep == 1.0 && keep_per_lr == 0.0; }
  bool has_momentum() const { return momentum != 0.0 || momentum_per_lr != 0.0; }
  bool has_gradient() const { return gradient != 0.0 || gradient_per_lr != 0.0; }
};

// A learning rate in the memory of the weights' device, read when the kernel runs; null: none.
struct Rate {
  const void* at = nullptr;
  bool is_double = false;

  SPECTRAIN_HD double value() const {
    return is_double ? *global(static_cast<const double*>(at))
                     : *global(static_cast<const float*>(at));
  }
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
  Rate rate;
  Term terms[kMaxTerms];

  SPECTRAIN_HD int n_terms() const { return n_outs > 0 ? out_end[n_outs - 1] : 0; }

  // Replaces coefficients a + b*lr by their values.
  SPECTRAIN_HD void read_rate() {
    if (rate.at == nullptr) return;
    const double lr = rate.value();
    step.set_rate(lr);
    for (int i = 0; i < n_terms(); ++i) terms[i].set_rate(lr);
  }
};

}  // namespace spectrain
