// The numbers of a call, which come as lists and tuples of floats. pybind11's own casters ask of
// every sequence what it is, and took 1.3 us for one group of a step with one prediction.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace spectrain {

namespace py = pybind11;

// Calls `take` with every item of a sequence, which lives as long as that takes.
template <class F>
void each(py::handle sequence, F&& take) {
  const auto items = py::reinterpret_steal<py::object>(
      PySequence_Fast(sequence.ptr(), "expected a sequence of numbers"));
  if (!items) throw py::error_already_set();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    take(py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(items.ptr(), i)));
  }
}

// The same of a tuple of a known length; `take` gets the index as well.
template <class F>
void each_of(size_t n, py::handle sequence, F&& take) {
  size_t found = 0;
  each(sequence, [&](const py::object& item) {
    if (found < n) take(found, item);
    ++found;
  });
  if (found != n) {
    throw py::type_error("expected " + std::to_string(n) + " entries, got " +
                         std::to_string(found));
  }
}

inline double number(py::handle value) {
  const double x = PyFloat_AsDouble(value.ptr());
  if (x == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return x;
}

inline std::vector<double> numbers(py::handle sequence) {
  std::vector<double> result;
  each(sequence, [&](py::handle value) { result.push_back(number(value)); });
  return result;
}

inline Term term(py::handle given) {
  Term t;
  double* const fields[] = {&t.keep, &t.momentum, &t.gradient, &t.root};
  each_of(4, given, [&](size_t i, py::handle value) { *fields[i] = number(value); });
  return t;
}

// Of every group.
inline Plan::Terms terms(py::handle groups) {
  Plan::Terms result;
  each(groups, [&](py::handle group) {
    result.emplace_back();
    each(group, [&](py::handle t) { result.back().push_back(term(t)); });
  });
  return result;
}

// Of every group: sign, weight_decay, decay, gain, decay2, eps, step.
inline std::vector<Setting> settings(py::handle groups) {
  std::vector<Setting> result;
  each(groups, [&](py::handle group) {
    Setting& s = result.emplace_back();
    double* const fields[] = {&s.sign, &s.weight_decay, &s.decay, &s.gain, &s.decay2, &s.eps};
    each_of(7, group, [&](size_t i, py::handle value) {
      if (i < 6) {
        *fields[i] = number(value);
      } else {
        s.step = term(value);
      }
    });
  });
  return result;
}

// Pairs: the index of the output, and the terms.
inline std::vector<Plan::Prediction> predictions(py::handle given) {
  std::vector<Plan::Prediction> result;
  each(given, [&](py::handle pair) {
    Plan::Prediction& prediction = result.emplace_back();
    each_of(2, pair, [&](size_t i, py::handle part) {
      if (i == 0) {
        prediction.out = part.cast<size_t>();
      } else {
        prediction.terms = terms(part);
      }
    });
  });
  return result;
}

}  // namespace spectrain
