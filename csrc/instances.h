// Which rule is compiled for which element types. `F<Rule>::kernel` is the launcher's function.
#pragma once

#include "kernels.h"
#include "rules/copy.h"
#include "rules/predict.h"
#include "rules/sgd.h"
#include "rules/stash_predict.h"
#include "rules/swap.h"

namespace spectrain {

template <template <class> class Launcher, template <class> class Rule>
static inline auto by_width(DType t) -> decltype(&Launcher<Rule<uint32_t>>::kernel) {
  switch (size_of(t)) {
    case 2:
      return &Launcher<Rule<uint16_t>>::kernel;
    case 4:
      return &Launcher<Rule<uint32_t>>::kernel;
    default:
      return &Launcher<Rule<uint64_t>>::kernel;
  }
}

// The momentum buffer has the parameter's type, or is float32 beside a 16-bit parameter.
template <template <class> class Launcher, template <class, class> class Rule>
static inline auto by_types(DType w, DType v) -> decltype(&Launcher<Rule<float, float>>::kernel) {
  switch (w) {
    case DType::float64:
      return v == DType::float64 ? &Launcher<Rule<double, double>>::kernel : nullptr;
    case DType::float32:
      return v == DType::float32 ? &Launcher<Rule<float, float>>::kernel : nullptr;
    case DType::float16:
      return v == DType::float16   ? &Launcher<Rule<Half, Half>>::kernel
             : v == DType::float32 ? &Launcher<Rule<Half, float>>::kernel
                                   : nullptr;
    case DType::bfloat16:
      return v == DType::bfloat16  ? &Launcher<Rule<BFloat16, BFloat16>>::kernel
             : v == DType::float32 ? &Launcher<Rule<BFloat16, float>>::kernel
                                   : nullptr;
  }
  return nullptr;
}

template <template <class> class Launcher, template <class> class Rule>
static inline auto by_type(DType w) -> decltype(&Launcher<Rule<float>>::kernel) {
  switch (w) {
    case DType::float64:
      return &Launcher<Rule<double>>::kernel;
    case DType::float32:
      return &Launcher<Rule<float>>::kernel;
    case DType::float16:
      return &Launcher<Rule<Half>>::kernel;
    case DType::bfloat16:
      return &Launcher<Rule<BFloat16>>::kernel;
  }
  return nullptr;
}

}  // namespace spectrain
