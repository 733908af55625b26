// Checks the options of a step against its arrays.
#include <algorithm>

#include "arrays.h"
#include "numbers.h"

namespace spectrain {
namespace {

bool is(py::handle key, const char* name) {
  return PyUnicode_Check(key.ptr()) && PyUnicode_CompareWithASCIIString(key.ptr(), name) == 0;
}

bool flag(py::handle given, const char* name) {
  try {
    return given.cast<bool>();
  } catch (const py::cast_error&) {
    throw py::type_error(std::string(name) + ": expected a bool, got " +
                         py::repr(given).cast<std::string>());
  }
}

// Returns the 64 bits of a signed or unsigned int.
uint64_t seed_of(py::handle given) {
  if (PyBool_Check(given.ptr()) || !PyIndex_Check(given.ptr())) {
    throw py::type_error("rounding_seed: expected an int or None, got " +
                         py::repr(given).cast<std::string>());
  }
  const auto number = py::reinterpret_steal<py::int_>(PyNumber_Index(given.ptr()));
  if (!number) throw py::error_already_set();
  try {
    return number < py::int_(0) ? static_cast<uint64_t>(number.cast<int64_t>())
                                : number.cast<uint64_t>();
  } catch (const py::cast_error&) {
    throw py::value_error("rounding_seed: expected an int of 64 bits, got " +
                          py::str(number).cast<std::string>());
  }
}

}  // namespace

StepOptions Arrays::options(const py::dict& given, Loans& loans) {
  StepOptions result;
  if (given.empty()) return result;
  py::handle grad_scale = Py_None, found_inf = Py_None, clip_factor = Py_None;
  for (const auto& [key, value] : given) {
    if (is(key, "grad_scale")) {
      grad_scale = value;
    } else if (is(key, "found_inf")) {
      found_inf = value;
    } else if (is(key, "clip_factor")) {
      clip_factor = value;
    } else if (is(key, "zero_grad")) {
      result.zero_grad = flag(value, "zero_grad");
    } else if (!is(key, "rounding_seed")) {
      throw py::type_error("a step got an unexpected keyword argument " +
                           py::repr(key).cast<std::string>());
    } else if (!value.is_none()) {
      result.rounding = Rounding::seeded(seed_of(value));
    }
  }
  if (result.rounding.stochastic) check_rounding();
  if (result.zero_grad) check_gradients_writable();
  result.gate = {scalar(found_inf, "found_inf", result.zero_grad, loans),
                 scalar(grad_scale, "grad_scale", result.zero_grad, loans),
                 scalar(clip_factor, "clip_factor", result.zero_grad, loans)};
  return result;
}

void Arrays::check_rounding() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    const DType dtype = plan->params.dtype[i];
    if (dtype == DType::bfloat16) continue;
    throw py::value_error(
        "rounding_seed: expected bfloat16 weights, which are rounded stochastically, got " +
        std::string(name_of(dtype)) + " in " + place_of(params_name_, i).text());
  }
}

void Arrays::check_gradients_writable() {
  if (gradients_writable_) return;
  std::vector<Span> spans;
  Loans loans{first(), {}};
  for (size_t i = 0; i < grads_.size(); ++i) {
    const py::handle grad = item(grads_, i);
    if (grad.is_none()) continue;
    const Borrowed b = borrow(grad, place_of(grads_name_, i, true), loans);
    if (b.size > 0) spans.push_back({b.begin(), b.end(), 0, i});
  }
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t k = 1; k < spans.size(); ++k) {
    if (spans[k].begin >= spans[k - 1].end) continue;
    const auto [first, second] = std::minmax(spans[k - 1].index, spans[k].index);
    throw py::value_error(place_of(grads_name_, second).text() +
                          ": is set to zero, expected memory of its own, got an overlap with " +
                          place_of(grads_name_, first).text());
  }
  writable_gradients_ = std::move(spans);
  gradients_writable_ = true;
}

Borrowed Arrays::borrow_number(py::handle array, const Place& place, bool may_be_double,
                               Loans& loans) const {
  const std::string types = may_be_double ? "float32 or float64" : "float32";
  const Borrowed b = [&] {
    try {
      return borrow(array, place, loans);
    } catch (const py::type_error& error) {
      throw py::type_error(error.what() +
                           ("; it is read when the step runs, from one element of " + types +
                            " on " + device_.text() + ": torch.tensor(1.0), say"));
    }
  }();
  const bool fits = b.dtype == DType::float32 || (may_be_double && b.dtype == DType::float64);
  if (!fits || b.size != 1) {
    throw py::value_error(place.text() + ": expected one element of " + types + ", got " +
                          name_of(b.dtype) + " of shape " + b.shape_text());
  }
  if (!(b.device == device_)) {
    throw py::value_error(place.text() + ": expected an array on " + device_.text() +
                          ", the device of " + params_name_ + ", got " + b.device.text());
  }
  return b;
}

std::vector<Source> Arrays::sources(py::handle given) const {
  std::vector<Source> sources;
  if (given.is_none()) return sources;
  Loans loans{first(), {}};
  const auto read = [&](const py::object& number, const char* name) -> Number {
    if (PyFloat_Check(number.ptr())) return {nullptr, false, number.cast<double>()};
    const Borrowed b = borrow_number(number, {name, 0, true}, true, loans);
    return {b.data, b.dtype == DType::float64};
  };
  for (Items groups(given); groups.more();) {
    Source& source = sources.emplace_back();
    const py::object group = groups.next();
    if (group.is_none()) continue;
    Items items(group, 5);
    source.lr = read(items.next(), "lr");
    source.factor = items.next_number();
    source.count = read(items.next(), "step");
    source.beta1 = items.next_number();
    source.beta2 = items.next_number();
  }
  return sources;
}

const float* Arrays::scalar(py::handle array, const std::string& name, bool zero_grad,
                            Loans& loans) const {
  if (array.is_none() || params_.empty()) return nullptr;
  const Place place{name, 0, true};
  const Borrowed b = borrow_number(array, place, false, loans);
  check_apart(b, place, written_);
  if (zero_grad) check_apart(b, place, writable_gradients_);
  return static_cast<const float*>(b.data);
}

}  // namespace spectrain
