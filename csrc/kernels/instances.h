// The element types that operations are compiled for, and the search for a compiled one.
#pragma once

#include <type_traits>

#include "kernels.h"

namespace spectrain {

template <class T>
constexpr DType dtype_of = std::is_same_v<T, double>     ? DType::float64
                           : std::is_same_v<T, Half>     ? DType::float16
                           : std::is_same_v<T, BFloat16> ? DType::bfloat16
                                                         : DType::float32;

// Integers are bits, for copies.
template <class W, class G, class S, class O>
static inline bool match(Types<W, G, S, O>, KernelKey k) {
  if (std::is_integral_v<W>) return size_of(k.w) == sizeof(W);
  return k.w == dtype_of<W> && k.g == dtype_of<G> && k.s == dtype_of<S> && k.o == dtype_of<O>;
}

template <class... T>
struct TypesList {};
template <class... A>
auto concatenate(TypesList<A...>) -> TypesList<A...>;
template <class... A, class... B, class... More>
auto concatenate(TypesList<A...>, TypesList<B...>, More... more)
    -> decltype(concatenate(TypesList<A..., B...>{}, more...));

using Widths = TypesList<Same<uint16_t>, Same<uint32_t>, Same<uint64_t>>;
using WeightTypes = TypesList<Same<float>, Same<double>, Same<Half>, Same<BFloat16>>;
// State has the parameters' type, float32 for 16-bit parameters, or bfloat16 for float32 (master)
// parameters, whose gradients and outputs may have 16 bits. With bfloat16 state, gradients and
// outputs of 16 bits are bfloat16 too. One entry per distinct combination of what an operation
// uses, so that nothing is compiled twice.
using WiderState =
    TypesList<Types<Half, Half, float, Half>, Types<BFloat16, BFloat16, float, BFloat16>>;
using Narrowing = TypesList<Types<float, float, float, BFloat16>, Types<float, float, float, Half>>;
using NarrowGradients =
    TypesList<Types<float, BFloat16, float, float>, Types<float, Half, float, float>>;
using NarrowBoth =
    TypesList<Types<float, BFloat16, float, BFloat16>, Types<float, Half, float, Half>>;
using NarrowState = TypesList<Types<float, float, BFloat16, float>>;
using NarrowStateAndOutput = TypesList<Types<float, float, BFloat16, BFloat16>>;
using AllNarrow =
    TypesList<Types<float, BFloat16, BFloat16, float>, Types<float, BFloat16, BFloat16, BFloat16>>;

template <class... Lists>
using All = decltype(concatenate(Lists{}...));
using Uniform = All<WeightTypes, WiderState, NarrowState>;
using PlainTypes = All<WeightTypes, NarrowGradients>;
using PredictTypes = All<Uniform, Narrowing, NarrowStateAndOutput>;
using AllTypes = All<PredictTypes, NarrowGradients, NarrowBoth, AllNarrow>;

// A unit for nvcc compiles one list of operations.h instead of all operations.
#if defined(SPECTRAIN_UNIT)
#define SPECTRAIN_INSTANCES SPECTRAIN_ROWS(SPECTRAIN_UNIT)
#else
#define SPECTRAIN_INSTANCES SPECTRAIN_OPERATIONS
#endif

template <class Entry, template <class> class Launcher, Operation operation, class... T>
static inline Entry find_in(TypesList<T...>, KernelKey key) {
  Entry found{};
  (void)((match(T{}, key) ? (found = Launcher<rule_of<operation, T>>::kernel(), true) : false) ||
         ...);
  return found;
}

// Returns `Launcher<Rule>::kernel()`; nothing if the unit does not compile the key.
template <class Entry, template <class> class Launcher>
static inline Entry find(KernelKey key) {
#define SPECTRAIN_ROW(name, companion, types, ...) \
  case Operation::name:                            \
    return find_in<Entry, Launcher, Operation::name>(types{}, key);
  switch (key.operation) {
    SPECTRAIN_INSTANCES
    default:
      return {};
  }
#undef SPECTRAIN_ROW
}

}  // namespace spectrain
