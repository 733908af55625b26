// W_hat = W - (lr*s)*v, the one expression behind every prediction.
#pragma once

#include "../scalar.h"

namespace spectrain {

// A distance of 0 (also by underflow of lr*s) keeps W: 0*inf would make it NaN.
template <class Acc>
SPECTRAIN_HD Acc advance(Acc distance, Acc v, Acc w) {
  return distance == Acc(0) ? w : multiply_add(-distance, v, w);
}

}  // namespace spectrain
