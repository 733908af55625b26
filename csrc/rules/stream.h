// Describes the streams of a rule: their roles and element types, and whether they are read or
// written.
#pragma once

#include <cstdint>
#include <tuple>
#include <type_traits>

#include "core/config.h"
#include "core/options.h"
#include "core/role.h"
#include "core/scalar.h"
#include "core/setting.h"

namespace spectrain {

template <Role R, class T, bool Reads, bool Writes, int Source = -1>
struct Stream {
  using type = T;
  static constexpr Role role = R;
  static constexpr bool reads = Reads;
  static constexpr bool writes = Writes;
  static constexpr int source = Source;  // >= 0: receives the bits loaded from that stream
};
template <Role R, class T>
using In = Stream<R, T, true, false>;
template <Role R, class T>
using Out = Stream<R, T, false, true>;
template <Role R, class T>
using InOut = Stream<R, T, true, true>;
template <Role R, class T, int Source>
using CopyOf = Stream<R, T, false, true, Source>;

// Returns the index of a role; -1 if there is none.
constexpr int find_role(const Role* roles, int n, Role role) {
  for (int s = 0; s < n; ++s) {
    if (roles[s] == role) return s;
  }
  return -1;
}

// A rule reads and writes the element of a stream as x[Streams::momentum].
template <class... S>
struct StreamList {
  static constexpr int size = sizeof...(S);
  static constexpr Role roles[] = {S::role...};
  static constexpr int params = find_role(roles, size, Role::params);
  static constexpr int grads = find_role(roles, size, Role::grads);
  static constexpr int momentum = find_role(roles, size, Role::momentum);
  static constexpr int second = find_role(roles, size, Role::second);
  static constexpr int stashed = find_role(roles, size, Role::stashed);
  static constexpr int out = find_role(roles, size, Role::out);
  template <int I>
  using at = std::tuple_element_t<I, std::tuple<S...>>;
};

template <class Rule, int I>
using stream_t = typename Rule::Streams::template at<I>;

template <int I>
struct Index {
  SPECTRAIN_HD constexpr operator int() const { return I; }
};

// Calls f with Index<0>, Index<1>, ...: a loop with a constant index.
template <int N, int I = 0, class F>
SPECTRAIN_HD void unroll(F&& f) {
  if constexpr (I < N) {
    f(Index<I>{});
    unroll<N, I + 1>(f);
  }
}

// The interface of a rule, which inherits the defaults below:
// - Streams, with the role and the element type of each;
// - Args, which `make` computes from a Setting;
// - Step, the part of Args that `apply` needs for a row, small enough for registers, returned by
//   `step(args, flags, factor)` from the row's flags and the gradients' factor;
// - `apply(step, x)`, the update of one element of every stream;
// - reads_memory: its coefficients may depend on a learning rate or a step count in memory.
//
// A rule without extra outputs uses its Args as Step. With outputs (has_outs = true) it also has:
// - `predictions` in its Args; OutType; and Move, the coefficients of one term;
// - advance(move, w, x), one term of a prediction;
// - known(x), which converts the stored values of an element into the input of `advance`, the same
//   for all terms of all outputs;
// - kKept, a bit for every stream whose place in that input holds another value than the stored one
//   (a direction left by `apply`, or a root).
struct Defaults {
  static constexpr bool has_outs = false;
  static constexpr unsigned kKept = 0;
  static constexpr bool divides = false;
  static constexpr bool reads_memory = false;
  template <class Args, class Factor>
  SPECTRAIN_HD static const Args& step(const Args& a, unsigned /*flags*/, Factor) {
    return a;
  }
};
struct NoArgs : Defaults {
  struct Args {};
  SPECTRAIN_HD static void make(const Setting&, Args&) {}
};

// The gradients' stream; negative: there is none.
template <class Rule>
constexpr int kGradient = Rule::Streams::grads;

// The type of the gradients' factor: the arithmetic type, unless Acc is bits.
template <class Acc>
using factor_t = std::conditional_t<sizeof(Acc) == sizeof(double), double, float>;

template <class Rule>
SPECTRAIN_HD factor_t<typename Rule::Acc> gradient_factor(const Gate& gate) {
  if constexpr (kGradient<Rule> >= 0) {
    return gate.factor<factor_t<typename Rule::Acc>>();
  } else {
    return 1;
  }
}

template <class Rule, int I>
constexpr bool keeps = (Rule::kKept >> I & 1u) != 0;

}  // namespace spectrain
