// The operations, a row each. To add one: write its rule in rules/, include it here, and add a row
// to a unit. Plans, launchers, the Python module and CMake read everything else from here.
#pragma once

#include <cstdint>

#include "rules/adam.h"
#include "rules/copy.h"
#include "rules/extrapolate.h"
#include "rules/lion.h"
#include "rules/sgd.h"

// X(name, companion, types, rule)
//
// name: a rule of hyperparameters in operators/numbers.py, called "sgd", say, has sgd_step and, for
//   predictions, sgd_predict; and sgd_plain, if it has steps without momentum.
// companion: of a step, what writes predictions in a pass of their own; of a prediction, what also
//   stashes in the same pass; none: nothing does.
// types: a list of instances.h, the types that the operation is compiled for.
// rule: by the types of weights W, gradients G, state S and outputs O.
#define SPECTRAIN_ROWS_copy(X)         \
  X(copy, none, Widths, Copy<W>)       \
  X(cast, none, Narrowing, Cast<W, O>) \
  X(swap, none, Widths, Swap<W>)       \
  X(extrapolate, none, WeightTypes, Extrapolate<W>)

#define SPECTRAIN_ROWS_sgd(X)                                          \
  X(sgd_plain, none, PlainTypes, SgdPlain<W, G>)                       \
  X(sgd_step, sgd_predict, AllTypes, SgdStep<W, G, S, O>)              \
  X(sgd_predict, sgd_stash_predict, PredictTypes, SgdPredict<W, S, O>) \
  X(sgd_stash_predict, none, Uniform, SgdStashPredict<W, S>)

#define SPECTRAIN_ROWS_adam(X)                               \
  X(adam_step, adam_predict, AllTypes, AdamStep<W, G, S, O>) \
  X(adam_predict, none, PredictTypes, AdamPredict<W, S, O>)

#define SPECTRAIN_ROWS_lion(X)                               \
  X(lion_step, lion_predict, AllTypes, LionStep<W, G, S, O>) \
  X(lion_predict, none, PredictTypes, LionPredict<W, S, O>)

// These lists: nvcc compiles each as a unit of its own.
#define SPECTRAIN_UNITS(X) X(copy) X(sgd) X(adam) X(lion)

// Expands SPECTRAIN_ROW, which is defined anew for each use, with each row of a unit.
#define SPECTRAIN_ROWS(unit) SPECTRAIN_CONCAT(SPECTRAIN_ROWS_, unit)(SPECTRAIN_ROW)
#define SPECTRAIN_OPERATIONS SPECTRAIN_UNITS(SPECTRAIN_ROWS)

namespace spectrain {

#define SPECTRAIN_ROW(name, ...) name,
enum class Operation : uint8_t { SPECTRAIN_OPERATIONS none };
#undef SPECTRAIN_ROW

// The types of weights, gradients, state and outputs.
template <class W, class G, class S, class O>
struct Types {};
template <class T>
using Same = Types<T, T, T, T>;

template <Operation, class T>
struct RuleOf;
#define SPECTRAIN_ROW(name, companion, types, ...)    \
  template <class W, class G, class S, class O>       \
  struct RuleOf<Operation::name, Types<W, G, S, O>> { \
    using type = __VA_ARGS__;                         \
  };
SPECTRAIN_OPERATIONS
#undef SPECTRAIN_ROW
template <Operation operation, class T>
using rule_of = typename RuleOf<operation, T>::type;

struct OperationRow {
  const char* name;
  Operation companion;
  const Role* roles;  // of its rule's streams
  int n_streams;
  bool reads_memory, has_outs;  // of its rule

  bool has(Role role) const { return find_role(roles, n_streams, role) >= 0; }
};

template <class Rule>
constexpr OperationRow row(const char* name, Operation companion) {
  return {name,          companion, Rule::Streams::roles, Rule::Streams::size, Rule::reads_memory,
          Rule::has_outs};
}

inline const OperationRow& row_of(Operation operation) {
#define SPECTRAIN_ROW(name, companion, types, ...) \
  row<rule_of<Operation::name, Same<float>>>(#name, Operation::companion),
  static constexpr OperationRow rows[] = {SPECTRAIN_OPERATIONS};
#undef SPECTRAIN_ROW
  return rows[static_cast<int>(operation)];
}

}  // namespace spectrain
