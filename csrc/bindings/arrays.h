// The lists of arrays of one plan: validated against each other before anything is written.
#pragma once

#include <pybind11/pybind11.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "borrow.h"
#include "watch.h"

namespace spectrain {

// What a list is to the plan.
enum class Role { params, momentum, grads, stashed, out, second, average, stale };

// Which lists a call reads or writes.
class Roles {
 public:
  Roles(std::initializer_list<Role> roles) {
    for (const Role role : roles) add(role);
  }
  Roles& add(Role role) {
    bits_ |= 1u << static_cast<int>(role);
    return *this;
  }
  bool has(Role role) const { return (bits_ >> static_cast<int>(role) & 1u) != 0; }

 private:
  unsigned bits_ = 0;
};

inline py::handle item(const py::tuple& of, size_t i) {
  return PyTuple_GET_ITEM(of.ptr(), static_cast<py::ssize_t>(i));
}

// One argument: a sequence of arrays, as long as the parameters.
struct ArrayList {
  Role role;
  std::string name;  // as errors call it
  bool writes;       // false: only read, and may overlap what else is only read
  py::tuple arrays;
};

// Validates all lists against the first, the parameters, and builds the plan they make. Throws
// TypeError or ValueError that names argument, index, what was expected and what came.
class Arrays {
 public:
  // `groups`: the parameter group of every tensor; empty: all in group 0.
  Arrays(std::vector<ArrayList> lists, std::vector<uint16_t> groups, bool single);

  // Replaces the gradients (entries may be None). On an error the old ones stay. `follow`: see
  // refresh(), which else reads these again.
  void set_gradients(const py::tuple& grads, bool follow);
  // Lets go of the gradients. None are known until others come.
  void forget_gradients();
  // Reads every gradient's address again: params[i].grad where the gradient was that when it was
  // given, or none were given; else the same array's.
  void refresh();

  // From here on the plan is used more than once. `watch`: keeps the arrays' memory, and makes sure
  // at every call that they are still there; else the caller does.
  void keep(bool watch);
  // That the lists are where they were found; throws the RuntimeError that names the array.
  void check_in_place(Roles roles);

  // The options of a step, by name: those of StepOptions in calls.py. None is an absent one.
  StepOptions options(const py::dict& given, Loans& loans);

  bool has(Role role) const;
  // What an operation that no kernel exists for was asked to do, in the arguments' names.
  std::string describe(const UnsupportedTypes& error) const;
  bool has_gradients() const { return gradients_known_; }
  size_t n_outs() const { return plan->outs.size(); }
  py::handle first() const { return params_.empty() ? py::handle(Py_None) : params_[0]; }

  std::unique_ptr<Plan> plan;

 private:
  // The layout params[i] has, which everything that belongs to it must share.
  struct Layout {
    DType dtype;
    int ndim;
    size_t at;  // into extents_: ndim sizes, then ndim strides
  };
  // Memory that operators write: an array of kept_[list].
  struct Written {
    const char *begin, *end;
    size_t list, index;
  };
  Place place_of(const std::string& name, size_t i, bool writes = false) const {
    return {name, i, single_, writes};
  }
  void check(const Borrowed& b, const Place& place, Role role, size_t i) const;
  Column* column_of(Role role, size_t* outs) const;
  void check_overlap();
  py::value_error overlap(size_t list, size_t i, size_t other_list, size_t j) const;
  // The element of an array of one float32 on the plan's device that a step reads; null for None.
  // `zero_grad`: the step writes the gradients, too, which have been checked for that.
  const float* scalar(py::handle array, const std::string& name, bool zero_grad,
                      Loans& loans) const;
  // That all parameters are bfloat16, which stochastic rounding is for.
  void check_rounding() const;
  // That a call may write the gradients: each is writable and has memory of its own.
  void check_gradients_writable();
  Column borrow_gradients(const py::tuple& grads, Loans& loans) const;
  void check_gradients_in_place();
  void check_apart(const Borrowed& b, const Place& place, const std::vector<Written>& others) const;
  void check_pinned(const Column& column) const;
  void take_gradients(const py::tuple& grads);
  py::tuple parameter_gradients() const;

  bool single_;
  py::tuple params_;
  std::string params_name_, grads_name_ = "grads";
  std::vector<ArrayList> kept_;  // owns references; of the gradients only the name
  Loans loans_, gradient_loans_;
  // In order of addresses.
  std::vector<Written> written_;
  std::vector<Written> writable_gradients_;  // as check_gradients_writable found them
  bool gradients_writable_ = false;
  std::vector<Layout> layouts_;
  std::vector<int64_t> extents_;
  Device device_;
  py::tuple grads_;
  std::vector<bool> from_parameter_;  // gradient i is params[i].grad
  bool gradients_known_ = false;
  bool watching_ = false;
  std::vector<std::pair<size_t, Watch>> watches_;  // the list in kept_; without the gradients
  Watch gradient_watch_;
  int gradient_uses_ = 0;  // calls since they were given
};

}  // namespace spectrain
