// Hyper-parameters as the caller gave them, in double; each rule forms its own products from them.
#pragma once

namespace spectrain {

// Extra outputs one kernel can write; more predictions than this take further passes.
constexpr int kMaxOuts = 8;

struct Hyper {
  double lr = 0.0;
  double steps = 0.0;  // the horizon s of predict and stash_predict
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;
  bool first_step = false;  // of every tensor; single tensors carry kFirstStep in their row
  int n_outs = 0;
  double out_steps[kMaxOuts] = {};  // the horizon of every extra output
};

}  // namespace spectrain
