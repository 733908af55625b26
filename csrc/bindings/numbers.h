// Converts the coefficients of a call from lists and tuples of floats. pybind11's casters check
// every sequence and took 1.3 us for one group of a step with one prediction.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "shared.h"

namespace spectrain {

namespace py = pybind11;

// Iterates over a sequence and keeps the current item alive.
class Items {
 public:
  explicit Items(py::handle sequence) : items_(items_of(sequence.ptr())) {}
  // Expects n items.
  Items(py::handle sequence, size_t n) : Items(sequence) {
    const auto found = static_cast<size_t>(PySequence_Fast_GET_SIZE(items_.ptr()));
    if (found == n) return;
    throw py::type_error("expected " + std::to_string(n) + " entries, got " +
                         std::to_string(found));
  }
  // A list may shrink while an item is read.
  bool more() const { return at_ < PySequence_Fast_GET_SIZE(items_.ptr()); }
  py::object next() { return py::reinterpret_borrow<py::object>(take()); }
  double next_number() {
    PyObject* given = take();
    if (PyFloat_CheckExact(given)) return PyFloat_AS_DOUBLE(given);
    const auto kept = py::reinterpret_borrow<py::object>(given);
    const double x = PyFloat_AsDouble(given);
    if (x == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return x;
  }

 private:
  PyObject* take() {
    if (!more()) throw py::type_error("the sequence became shorter");
    return PySequence_Fast_GET_ITEM(items_.ptr(), at_++);
  }

  py::object items_;
  Py_ssize_t at_ = 0;
};

inline std::vector<double> numbers(py::handle sequence) {
  std::vector<double> result;
  for (Items items(sequence); items.more();) result.push_back(items.next_number());
  return result;
}

// A Term of numbers.py.
inline Term term(py::handle given) {
  Items items(given, 8);
  Term t;
  for (double* x : {&t.keep, &t.momentum, &t.gradient, &t.root, &t.keep_per_lr, &t.momentum_per_lr,
                    &t.gradient_per_lr, &t.ahead}) {
    *x = items.next_number();
  }
  return t;
}

// Terms of every group.
inline Plan::Terms terms(py::handle groups) {
  Plan::Terms result;
  for (Items group(groups); group.more();) {
    std::vector<Term>& of_group = result.emplace_back();
    for (Items items(group.next()); items.more();) of_group.push_back(term(items.next()));
  }
  return result;
}

// A Setting of numbers.py for every group.
inline std::vector<Setting> settings(py::handle groups) {
  std::vector<Setting> result;
  for (Items group(groups); group.more();) {
    Setting& s = result.emplace_back();
    Items items(group.next(), 8);
    for (double* x : {&s.sign, &s.weight_decay, &s.decay, &s.gain, &s.decay2, &s.eps, &s.count}) {
      *x = items.next_number();
    }
    s.step = term(items.next());
  }
  return result;
}

// Pairs of an output index and terms.
inline std::vector<Plan::Prediction> predictions(py::handle given) {
  std::vector<Plan::Prediction> result;
  for (Items pairs(given); pairs.more();) {
    Items pair(pairs.next(), 2);
    const auto out = pair.next().cast<size_t>();
    result.push_back({out, terms(pair.next())});
  }
  return result;
}

}  // namespace spectrain
