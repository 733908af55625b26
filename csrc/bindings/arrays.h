// Validates the lists of arrays of a plan against each other before anything is written.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "borrow.h"
#include "watch.h"

namespace spectrain {

using Roles = unsigned;  // one bit for each role
constexpr Roles bit(Role role) { return 1u << static_cast<unsigned>(role); }

inline py::handle item(const py::tuple& of, size_t i) {
  return PyTuple_GET_ITEM(of.ptr(), static_cast<py::ssize_t>(i));
}

// One argument: a sequence of arrays, as long as the parameters.
struct ArrayList {
  Role role;
  std::string name;  // in error messages
  bool writes;       // false: only read; may overlap other lists that are only read
  py::tuple arrays;
};

// Validates all lists against the first, the parameters, and builds a plan. Throws TypeError or
// ValueError with the argument, the index, and the expected and actual value.
class Arrays {
 public:
  // `groups`: the parameter group of every tensor; empty: all in group 0.
  Arrays(std::vector<ArrayList> lists, std::vector<uint16_t> groups, bool single);

  // Replaces the gradients (entries may be None); keeps the old ones on an error.
  void set_gradients(const py::tuple& grads);
  // Releases the gradients, until others are set.
  void forget_gradients();

  // Prepares for several uses. `watch`: keep the arrays' memory alive and check their addresses at
  // every call; otherwise the caller does.
  void keep(bool watch);
  // Checks that no array of the lists has moved; throws a RuntimeError that names the array.
  void check_in_place(Roles roles);

  // Converts the options of a step (StepOptions in calls.py); None means absent.
  StepOptions options(const py::dict& given, Loans& loans);

  // The numbers in memory of every group, or none: a Source of numbers.py; None: not in that group.
  std::vector<Source> sources(py::handle given) const;

  bool has(Role role) const;
  // Describes a combination of types without a kernel, by the arguments' names.
  std::string describe(const UnsupportedTypes& error) const;
  bool has_gradients() const { return gradients_known_; }
  py::handle first() const { return params_.empty() ? py::handle(Py_None) : params_[0]; }

  std::unique_ptr<Plan> plan;

 private:
  // Memory of an array of kept_[list].
  struct Span {
    const char *begin, *end;
    size_t list, index;
  };
  Place place_of(const std::string& name, size_t i, bool writes = false) const {
    return {name, i, single_, writes};
  }
  void check(const Borrowed& b, const Place& place, Role role, size_t i) const;
  Column& column_of(Role role, size_t* outs) const;
  void check_overlap();
  // Borrows an array with one float32, or float64 if allowed, on the plan's device.
  Borrowed borrow_number(py::handle array, const Place& place, bool may_be_double,
                         Loans& loans) const;
  // Returns the address of an array with one float32 on the plan's device; null for None.
  // `zero_grad`: the step also writes the gradients, which have been checked for that.
  const float* scalar(py::handle array, const std::string& name, bool zero_grad,
                      Loans& loans) const;
  // Checks that all parameters are bfloat16, as stochastic rounding requires.
  void check_rounding() const;
  // Checks that each gradient is writable and shares no memory.
  void check_gradients_writable();
  Column borrow_gradients(const py::tuple& grads, Loans& loans) const;
  void check_gradients_in_place();
  bool has_gradients(const py::tuple& grads) const;
  void check_apart(const Borrowed& b, const Place& place, const std::vector<Span>& others) const;
  void check_pinned(const Column& column) const;

  bool single_;
  py::tuple params_;
  std::string params_name_, grads_name_ = "grads";
  std::vector<ArrayList> kept_;  // owns references; for gradients only the name
  Loans loans_, gradient_loans_;
  // What operators write, sorted by address.
  std::vector<Span> written_;
  std::vector<Span> writable_gradients_;  // set by check_gradients_writable
  bool gradients_writable_ = false;
  std::vector<Borrowed> layouts_;              // of the parameters; other arrays have the same
  std::vector<std::vector<int64_t>> extents_;  // their shapes and strides
  Device device_;
  py::tuple grads_;
  bool gradients_known_ = false;
  std::vector<Watch> watches_;  // of kept_; empty for gradients
  Watch gradient_watch_;
  int gradient_uses_ = 0;  // calls since they were set
};

}  // namespace spectrain
