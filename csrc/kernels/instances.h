// Lists which rules are compiled for which element types. `Launcher<Rule>::kernel()` is a
// launcher's entry point.
#pragma once

#include "kernels.h"
#include "rules/adam.h"
#include "rules/copy.h"
#include "rules/extrapolate.h"
#include "rules/sgd.h"
#include "rules/swap.h"

namespace spectrain {

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<Half> {
  static constexpr DType value = DType::float16;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::bfloat16;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::float32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::float64;
};

template <class W_, class G_, class S_, class O_>
struct Types {
  using W = W_;
  using G = G_;
  using S = S_;
  using O = O_;
  static bool match(KernelKey k, bool g, bool s, bool o) {
    return k.w == DTypeOf<W>::value && (!g || k.g == DTypeOf<G>::value) &&
           (!s || k.s == DTypeOf<S>::value) && (!o || k.o == DTypeOf<O>::value);
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

// The first match in a list for which `Make` has a launcher.
template <class Entry, template <class> class Launcher, class Make, class... T>
static inline Entry find_in(TypesList<T...>, KernelKey k, bool g, bool s, bool o) {
  Entry found{};
  (void)((T::match(k, g, s, o) ? (found = Launcher<typename Make::template Rule<T>>::kernel(), true)
                               : false) ||
         ...);
  return found;
}

struct MakeCast {
  template <class T>
  using Rule = Cast<typename T::W, typename T::O>;
};
struct MakeSgdPlain {
  template <class T>
  using Rule = SgdPlain<typename T::W, typename T::G>;
};
struct MakeSgdMomentum {
  template <class T>
  using Rule = SgdMomentum<typename T::W, typename T::G, typename T::S, typename T::O>;
};
struct MakeSgdPredict {
  template <class T>
  using Rule = SgdPredict<typename T::W, typename T::S, typename T::O>;
};
struct MakeSgdStashPredict {
  template <class T>
  using Rule = SgdStashPredict<typename T::W, typename T::S>;
};
struct MakeAdamStep {
  template <class T>
  using Rule = AdamStep<typename T::W, typename T::G, typename T::S, typename T::O>;
};
struct MakeAdamPredict {
  template <class T>
  using Rule = AdamPredict<typename T::W, typename T::S, typename T::O>;
};
struct MakeExtrapolate {
  template <class T>
  using Rule = Extrapolate<typename T::W>;
};

template <class... A, class... B>
auto concatenate(TypesList<A...>, TypesList<B...>) -> TypesList<A..., B...>;
using AllTypes = decltype(concatenate(Uniform{}, Mixed{}));
// One entry per distinct pair, so that nothing is compiled twice.
using Narrowing = TypesList<Types<float, float, float, BFloat16>, Types<float, float, float, Half>>;
using PredictTypes = decltype(concatenate(Uniform{}, Narrowing{}));
using PlainTypes =
    TypesList<Types<float, float, float, float>, Types<double, double, double, double>,
              Types<Half, Half, Half, Half>, Types<BFloat16, BFloat16, BFloat16, BFloat16>,
              Types<float, BFloat16, float, float>, Types<float, Half, float, float>>;
using WeightTypes =
    TypesList<Types<float, float, float, float>, Types<double, double, double, double>,
              Types<Half, Half, Half, Half>, Types<BFloat16, BFloat16, BFloat16, BFloat16>>;

template <class Entry, template <class> class Launcher, template <class> class Rule>
static inline Entry by_width(DType t) {
  switch (size_of(t)) {
    case 2:
      return Launcher<Rule<uint16_t>>::kernel();
    case 4:
      return Launcher<Rule<uint32_t>>::kernel();
    default:
      return Launcher<Rule<uint64_t>>::kernel();
  }
}

template <class Entry, template <class> class Launcher>
static inline Entry find_copy_family(KernelKey k) {
  switch (k.operation) {
    case Operation::copy:
      return by_width<Entry, Launcher, Copy>(k.w);
    case Operation::swap:
      return by_width<Entry, Launcher, Swap>(k.w);
    case Operation::cast:
      return find_in<Entry, Launcher, MakeCast>(Narrowing{}, k, false, false, true);
    case Operation::extrapolate:
      return find_in<Entry, Launcher, MakeExtrapolate>(WeightTypes{}, k, false, false, true);
    default:
      return {};
  }
}

template <class Entry, template <class> class Launcher>
static inline Entry find_sgd_family(KernelKey k) {
  switch (k.operation) {
    case Operation::sgd_plain:
      return find_in<Entry, Launcher, MakeSgdPlain>(PlainTypes{}, k, true, false, false);
    case Operation::sgd_momentum:
      return find_in<Entry, Launcher, MakeSgdMomentum>(AllTypes{}, k, true, true, true);
    case Operation::sgd_predict:
      return find_in<Entry, Launcher, MakeSgdPredict>(PredictTypes{}, k, false, true, true);
    case Operation::sgd_stash_predict:
      return find_in<Entry, Launcher, MakeSgdStashPredict>(Uniform{}, k, false, true, false);
    default:
      return {};
  }
}

template <class Entry, template <class> class Launcher>
static inline Entry find_adam_family(KernelKey k) {
  switch (k.operation) {
    case Operation::adam_step:
      return find_in<Entry, Launcher, MakeAdamStep>(AllTypes{}, k, true, true, true);
    case Operation::adam_predict:
      return find_in<Entry, Launcher, MakeAdamPredict>(PredictTypes{}, k, false, true, true);
    default:
      return {};
  }
}

}  // namespace spectrain
