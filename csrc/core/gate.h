// Scalars of a step that lie where its tensors do, so that no caller has to wait for the device:
// whether the step is made at all, and what its gradients are multiplied by.
#pragma once

#include "config.h"

namespace spectrain {

// One element each; null: absent.
struct Gate {
  const float* found_inf = nullptr;    // not 0: nothing is written
  const float* grad_scale = nullptr;   // gradients are divided by it
  const float* clip_factor = nullptr;  // and multiplied by it

  SPECTRAIN_HD bool skips() const { return found_inf != nullptr && *global(found_inf) != 0.0f; }
  // In double: of a scale that is a power of two the reciprocal is exact in any arithmetic type.
  SPECTRAIN_HD double factor() const {
    const double factor = clip_factor != nullptr ? *global(clip_factor) : 1.0;
    return grad_scale != nullptr ? factor / *global(grad_scale) : factor;
  }
  // For a later pass of the same step, which has no gradients.
  Gate skip_only() const { return {found_inf, nullptr, nullptr}; }
};

}  // namespace spectrain
