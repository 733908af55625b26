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

inline double number(py::handle value) {
  const double x = PyFloat_AsDouble(value.ptr());
  if (x == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return x;
}

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
    return number(py::reinterpret_borrow<py::object>(given));
  }

 private:
  PyObject* take() {
    if (!more()) throw py::type_error("the sequence became shorter");
    return PySequence_Fast_GET_ITEM(items_.ptr(), at_++);
  }

  py::object items_;
  Py_ssize_t at_ = 0;
};

// The names that each_number() in setting.h gives.
template <class T>
std::vector<std::string> names_of_numbers() {
  std::vector<std::string> names;
  T numbers;
  each_number(numbers, [&](const char* name, double&) { names.push_back(name); });
  return names;
}
template <class T>
size_t count_of_numbers() {
  static const size_t count = names_of_numbers<T>().size();
  return count;
}

inline std::vector<double> numbers(py::handle sequence) {
  std::vector<double> result;
  for (Items items(sequence); items.more();) result.push_back(items.next_number());
  return result;
}

template <class T>
T numbers_of(py::handle given) {
  T result;
  Items items(given, count_of_numbers<T>());
  each_number(result, [&](const char*, double& x) { x = items.next_number(); });
  return result;
}
inline Term term(py::handle given) { return numbers_of<Term>(given); }

// Terms of every group.
inline Plan::Terms terms(py::handle groups) {
  Plan::Terms result;
  for (Items group(groups); group.more();) {
    std::vector<Term>& of_group = result.emplace_back();
    for (Items items(group.next()); items.more();) of_group.push_back(term(items.next()));
  }
  return result;
}

// Settings of every group, each followed by its step.
inline std::vector<Setting> settings(py::handle groups) {
  std::vector<Setting> result;
  for (Items group(groups); group.more();) {
    Setting& s = result.emplace_back();
    Items items(group.next(), count_of_numbers<Setting>() + 1);
    each_number(s, [&](const char*, double& x) { x = items.next_number(); });
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
