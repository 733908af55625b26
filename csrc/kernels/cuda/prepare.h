// Computes a kernel's arguments on the device from numbers in its memory. Also compiles for the
// host, where a test compares the results.
#pragma once

#include "core/program.h"
#include "kernels/kernels.h"
#include "rules/adam.h"
#include "rules/extrapolate.h"
#include "rules/sgd.h"

namespace spectrain {

// A rule's Args depend only on its arithmetic type, not on the storage types.
template <class Rule>
SPECTRAIN_HD void place(const Setting& s, void* to) {
  Rule::make(s, *static_cast<typename Rule::Args*>(to));
}

template <class Acc>
SPECTRAIN_HD void place_arguments(Operation operation, const Setting& s, void* to) {
  switch (operation) {
    case Operation::copy:
    case Operation::cast:
    case Operation::swap:
      break;  // without arguments
    case Operation::sgd_plain:
      return place<SgdPlain<Acc, Acc>>(s, to);
    case Operation::sgd_momentum:
      return place<SgdMomentum<Acc, Acc, Acc, Acc>>(s, to);
    case Operation::sgd_predict:
    case Operation::sgd_stash_predict:
      return place<SgdPredict<Acc, Acc, Acc>>(s, to);
    case Operation::adam_step:
      return place<AdamStep<Acc, Acc, Acc, Acc>>(s, to);
    case Operation::adam_predict:
      return place<AdamPredict<Acc, Acc, Acc>>(s, to);
    case Operation::extrapolate:
      return place<Extrapolate<Acc>>(s, to);
  }
}

SPECTRAIN_HD void place_arguments(Operation operation, DType weights, const Setting& s, void* to) {
  if (weights == DType::float64) {
    place_arguments<double>(operation, s, to);
  } else {
    place_arguments<float>(operation, s, to);
  }
}

}  // namespace spectrain
