// Lists which rules are compiled for which element types. `Launcher<Rule>::kernel()` is a
// launcher's entry point.
#pragma once

#include "kernels.h"
#include "rules/adam.h"
#include "rules/copy.h"
#include "rules/extrapolate.h"
#include "rules/sgd.h"

namespace spectrain {

template <class T>
constexpr DType dtype_of = DType::float32;
template <>
constexpr DType dtype_of<double> = DType::float64;
template <>
constexpr DType dtype_of<Half> = DType::float16;
template <>
constexpr DType dtype_of<BFloat16> = DType::bfloat16;

template <class W_, class G_, class S_, class O_>
struct Types {
  using W = W_;
  using G = G_;
  using S = S_;
  using O = O_;
  static bool match(KernelKey k) {
    return k.w == dtype_of<W> && k.g == dtype_of<G> && k.s == dtype_of<S> && k.o == dtype_of<O>;
  }
};
template <class... T>
struct TypesList {};

// State has the parameters' type, or float32 for 16-bit parameters. For float32 (master)
// parameters, gradients and outputs may have 16 bits.
using Uniform = TypesList<Types<float, float, float, float>, Types<double, double, double, double>,
                          Types<Half, Half, Half, Half>, Types<Half, Half, float, Half>,
                          Types<BFloat16, BFloat16, BFloat16, BFloat16>,
                          Types<BFloat16, BFloat16, float, BFloat16>>;
using Mixed = TypesList<Types<float, BFloat16, float, BFloat16>, Types<float, Half, float, Half>,
                        Types<float, float, float, BFloat16>, Types<float, float, float, Half>,
                        Types<float, BFloat16, float, float>, Types<float, Half, float, float>>;

// The entry of the rule for a key's types; empty if it is not compiled for them.
template <class Entry, template <class> class Launcher, template <class> class RuleFor, class... T>
static inline Entry find_in(TypesList<T...>, KernelKey k) {
  Entry found{};
  (void)((T::match(k) ? (found = Launcher<RuleFor<T>>::kernel(), true) : false) || ...);
  return found;
}

template <class T>
using CastFor = Cast<typename T::W, typename T::O>;
template <class T>
using ExtrapolateFor = Extrapolate<typename T::W>;
template <class T>
using SgdPlainFor = SgdPlain<typename T::W, typename T::G>;
template <class T>
using SgdMomentumFor = SgdMomentum<typename T::W, typename T::G, typename T::S, typename T::O>;
template <class T>
using SgdPredictFor = SgdPredict<typename T::W, typename T::S, typename T::O>;
template <class T>
using SgdStashPredictFor = SgdStashPredict<typename T::W, typename T::S>;
template <class T>
using AdamStepFor = AdamStep<typename T::W, typename T::G, typename T::S, typename T::O>;
template <class T>
using AdamPredictFor = AdamPredict<typename T::W, typename T::S, typename T::O>;

template <class... A, class... B>
auto concatenate(TypesList<A...>, TypesList<B...>) -> TypesList<A..., B...>;
using AllTypes = decltype(concatenate(Uniform{}, Mixed{}));
// One entry per distinct pair, so that nothing is compiled twice.
using Narrowing = TypesList<Types<float, float, float, BFloat16>, Types<float, float, float, Half>>;
using PredictTypes = decltype(concatenate(Uniform{}, Narrowing{}));
using WeightTypes =
    TypesList<Types<float, float, float, float>, Types<double, double, double, double>,
              Types<Half, Half, Half, Half>, Types<BFloat16, BFloat16, BFloat16, BFloat16>>;
using NarrowGradients =
    TypesList<Types<float, BFloat16, float, float>, Types<float, Half, float, float>>;
using PlainTypes = decltype(concatenate(WeightTypes{}, NarrowGradients{}));

template <class Entry, template <class> class Launcher, template <class> class Rule>
static inline Entry by_width(DType t) {
  return size_of(t) == 2   ? Launcher<Rule<uint16_t>>::kernel()
         : size_of(t) == 4 ? Launcher<Rule<uint32_t>>::kernel()
                           : Launcher<Rule<uint64_t>>::kernel();
}

template <class Entry, template <class> class Launcher>
static inline Entry find_copy_family(KernelKey k) {
  if (k.operation == Operation::copy) return by_width<Entry, Launcher, Copy>(k.w);
  if (k.operation == Operation::swap) return by_width<Entry, Launcher, Swap>(k.w);
  if (k.operation == Operation::cast) return find_in<Entry, Launcher, CastFor>(Narrowing{}, k);
  if (k.operation == Operation::extrapolate) {
    return find_in<Entry, Launcher, ExtrapolateFor>(WeightTypes{}, k);
  }
  return {};
}

template <class Entry, template <class> class Launcher>
static inline Entry find_sgd_family(KernelKey k) {
  switch (k.operation) {
    case Operation::sgd_plain:
      return find_in<Entry, Launcher, SgdPlainFor>(PlainTypes{}, k);
    case Operation::sgd_momentum:
      return find_in<Entry, Launcher, SgdMomentumFor>(AllTypes{}, k);
    case Operation::sgd_predict:
      return find_in<Entry, Launcher, SgdPredictFor>(PredictTypes{}, k);
    case Operation::sgd_stash_predict:
      return find_in<Entry, Launcher, SgdStashPredictFor>(Uniform{}, k);
    default:
      return {};
  }
}

template <class Entry, template <class> class Launcher>
static inline Entry find_adam_family(KernelKey k) {
  if (k.operation == Operation::adam_step) {
    return find_in<Entry, Launcher, AdamStepFor>(AllTypes{}, k);
  }
  if (k.operation == Operation::adam_predict) {
    return find_in<Entry, Launcher, AdamPredictFor>(PredictTypes{}, k);
  }
  return {};
}

}  // namespace spectrain
