#include "arrays.h"

#include <algorithm>

namespace spectrain {
namespace {

// Whether some order of the dimensions makes the array contiguous: every address once, no gaps.
bool is_dense(const Borrowed& b) {
  if (b.size <= 1) return true;
  int64_t expected = 1;
  int d = b.ndim - 1;
  for (; d >= 0; --d) {
    if (b.shape[d] == 1) continue;
    if (b.strides[d] != expected) break;
    expected *= b.shape[d];
  }
  if (d < 0) return true;
  std::vector<int> order;
  for (int i = 0; i < b.ndim; ++i) {
    if (b.shape[i] != 1) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](int i, int j) { return b.strides[i] < b.strides[j]; });
  expected = 1;
  for (const int i : order) {
    if (b.strides[i] != expected) return false;
    expected *= b.shape[i];
  }
  return true;
}

bool has_internal_overlap(const Borrowed& b) {
  for (int d = 0; d < b.ndim; ++d) {
    if (b.shape[d] > 1 && b.strides[d] == 0) return true;
  }
  return false;
}

py::object gradient_of(py::handle param) {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  PyObject* grad = PyObject_GetAttr(param.ptr(), name);
  if (grad == nullptr) {
    PyErr_Clear();
    return py::none();
  }
  return py::reinterpret_steal<py::object>(grad);
}

}  // namespace

Arrays::Arrays(std::vector<ArrayList> lists, bool single)
    : single_(single), params_(lists.at(0).arrays), params_name_(lists.at(0).name) {
  const size_t n = params_.size();
  std::vector<Item> items(n);
  Column params(n);
  for (size_t i = 0; i < n; ++i) {
    const Place place{params_name_, static_cast<py::ssize_t>(i), single_};
    const Borrowed b = borrow(params_[i], place);
    if (i == 0) {
      device_ = b.device;
      device_text_ = b.device_text();
    }
    if (!(b.device == device_)) {
      throw py::value_error(place.text() + ": expected all tensors on " + device_text_ +
                            ", the device of " + params_name_ + "[0], got " + b.device_text());
    }
    if (!is_dense(b)) {
      throw py::value_error(place.text() + ": expected a dense layout without gaps, got shape " +
                            b.shape_text() + " with strides " + b.strides_text() +
                            (has_internal_overlap(b) ? " (an expanded view overlaps itself)" : ""));
    }
    layouts_.push_back({b.dtype, b.ndim, extents_.size()});
    extents_.insert(extents_.end(), b.shape, b.shape + b.ndim);
    extents_.insert(extents_.end(), b.strides, b.strides + b.ndim);
    items[i] = {b.size, b.dtype, b.dtype};
    params[i] = b.data;
  }

  std::vector<std::pair<Role, Column>> columns;
  for (size_t l = 1; l < lists.size(); ++l) {
    const ArrayList& list = lists[l];
    if (list.arrays.size() != n) {
      throw py::value_error(list.name + ": expected as many tensors as " + params_name_ + ", " +
                            std::to_string(n) + ", got " + std::to_string(list.arrays.size()));
    }
    if (list.role == Role::grads) {
      grads_name_ = list.name;
      continue;
    }
    Column column(n);
    for (size_t i = 0; i < n; ++i) {
      const Place place{list.name, static_cast<py::ssize_t>(i), single_};
      const Borrowed b = borrow(list.arrays[i], place);
      column[i] = check(b, place, list.role, i);
      if (list.role == Role::momentum) items[i].momentum = b.dtype;
    }
    columns.emplace_back(list.role, std::move(column));
  }

  plan = std::make_unique<Plan>(device_, std::move(items));
  plan->params = std::move(params);
  for (auto& [role, column] : columns) {
    if (role == Role::momentum) plan->momentum = std::move(column);
    if (role == Role::stashed) plan->stashed = std::move(column);
    if (role == Role::out) plan->outs.push_back(std::move(column));
  }
  plan->grads.assign(n, nullptr);
  from_parameter_.assign(n, true);
  kept_ = std::move(lists);
  check_overlap();
  for (ArrayList& list : kept_) {
    if (list.role != Role::grads) continue;
    set_gradients(list.arrays);
    list.arrays = py::tuple();  // from here on grads_ holds them, until others come
  }
}

bool Arrays::has(Role role) const {
  return std::any_of(kept_.begin(), kept_.end(),
                     [&](const ArrayList& list) { return list.role == role; });
}

void* Arrays::check(const Borrowed& b, const Place& place, Role role, size_t i) const {
  const Place param{params_name_, place.index, single_};
  const Layout& layout = layouts_[i];
  const bool sixteen_bit = size_of(layout.dtype) == 2;
  if (b.dtype != layout.dtype &&
      !(role == Role::momentum && sixteen_bit && b.dtype == DType::float32)) {
    throw py::value_error(place.text() + ": expected " + name_of(layout.dtype) +
                          (role == Role::momentum && sixteen_bit ? " or float32" : "") +
                          ", the dtype of " + param.text() + ", got " + name_of(b.dtype));
  }
  if (!(b.device == device_)) {
    throw py::value_error(place.text() + ": expected a tensor on " + device_text_ + ", like " +
                          param.text() + ", got " + b.device_text());
  }
  const int64_t* shape = extents_.data() + layout.at;
  const int64_t* strides = shape + layout.ndim;
  if (b.ndim != layout.ndim || !std::equal(shape, shape + b.ndim, b.shape)) {
    Borrowed expected = b;
    expected.ndim = layout.ndim;
    expected.shape = shape;
    throw py::value_error(place.text() + ": expected shape " + expected.shape_text() +
                          ", the shape of " + param.text() + ", got " + b.shape_text());
  }
  for (int d = 0; d < b.ndim; ++d) {
    if (b.size > 0 && b.shape[d] > 1 && b.strides[d] != strides[d]) {
      Borrowed expected = b;
      expected.strides = strides;
      throw py::value_error(place.text() + ": expected strides " + expected.strides_text() +
                            ", the strides of " + param.text() + ", got " + b.strides_text() +
                            (has_internal_overlap(b) ? " (an expanded view overlaps itself)" : ""));
    }
  }
  return b.data;
}

// Two arrays may share memory only where both are read and never written. Gradients come later.
void Arrays::check_overlap() {
  struct Interval {
    const char *begin, *end;
    size_t list, index;
    bool writes;
  };
  std::vector<Interval> intervals;
  size_t outs = 0;
  for (size_t l = 0; l < kept_.size(); ++l) {
    const Role role = kept_[l].role;
    if (role == Role::grads) continue;
    const Column& column = role == Role::params     ? plan->params
                           : role == Role::momentum ? plan->momentum
                           : role == Role::stashed  ? plan->stashed
                                                    : plan->outs[outs++];
    for (size_t i = 0; i < column.size(); ++i) {
      const Item& item = plan->item(i);
      const int64_t bytes =
          item.size * size_of(role == Role::momentum ? item.momentum : item.param);
      const auto* begin = static_cast<const char*>(column[i]);
      if (bytes > 0) intervals.push_back({begin, begin + bytes, l, i, kept_[l].writes});
    }
  }
  const auto before = [](const Interval& a, const Interval& b) { return a.begin < b.begin; };
  if (!std::is_sorted(intervals.begin(), intervals.end(), before)) {
    std::stable_sort(intervals.begin(), intervals.end(), before);
  }
  const Interval* reaches = nullptr;          // of all so far, the one that ends last
  const Interval* written_reaches = nullptr;  // of those written
  for (const Interval& now : intervals) {
    const Interval* other = now.writes ? reaches : written_reaches;
    if (other != nullptr && now.begin < other->end) {
      // Speak of the later argument: params come first, and are what the others are measured by.
      const bool later =
          std::make_pair(now.list, now.index) > std::make_pair(other->list, other->index);
      const Interval& first = later ? *other : now;
      const Interval& second = later ? now : *other;
      throw overlap(second.list, second.index, first.list, first.index);
    }
    if (reaches == nullptr || now.end > reaches->end) reaches = &now;
    if (now.writes && (written_reaches == nullptr || now.end > written_reaches->end)) {
      written_reaches = &now;
    }
    if (now.writes) written_.push_back({now.begin, now.end, now.list, now.index});
  }
}

py::value_error Arrays::overlap(size_t list, size_t i, size_t other_list, size_t j) const {
  return py::value_error(
      Place{kept_[list].name, static_cast<py::ssize_t>(i), single_}.text() +
      ": expected memory of its own, got an overlap with " +
      Place{kept_[other_list].name, static_cast<py::ssize_t>(j), single_}.text());
}

void Arrays::check_gradient_overlap(const char* begin, size_t i) const {
  const char* end = begin + plan->item(i).size * size_of(plan->item(i).param);
  auto next = std::upper_bound(written_.begin(), written_.end(), begin,
                               [](const char* at, const Written& w) { return at < w.begin; });
  if (next != written_.begin() && std::prev(next)->end > begin) --next;
  if (next == written_.end() || next->begin >= end || begin == end) return;
  throw py::value_error(
      Place{grads_name_, static_cast<py::ssize_t>(i), single_}.text() +
      ": expected memory that the step does not write, got an overlap with " +
      Place{kept_[next->list].name, static_cast<py::ssize_t>(next->index), single_}.text());
}

Column Arrays::borrow_gradients(const py::tuple& grads) const {
  if (grads.size() != params_.size()) {
    throw py::value_error(grads_name_ + ": expected as many tensors as " + params_name_ + ", " +
                          std::to_string(params_.size()) + ", got " + std::to_string(grads.size()));
  }
  Column column(grads.size(), nullptr);
  static char empty;  // stands for the address of an empty gradient, which is null, but not None
  for (size_t i = 0; i < grads.size(); ++i) {
    const py::handle grad = PyTuple_GET_ITEM(grads.ptr(), static_cast<py::ssize_t>(i));
    if (grad.is_none()) continue;
    const Place place{grads_name_, static_cast<py::ssize_t>(i), single_};
    void* data = check(borrow(grad, place), place, Role::grads, i);
    column[i] = data != nullptr ? data : &empty;
    if (column[i] != plan->grads[i]) check_gradient_overlap(static_cast<const char*>(data), i);
  }
  return column;
}

py::tuple Arrays::parameter_gradients() const {
  py::tuple grads(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    grads[i] = from_parameter_[i] ? gradient_of(params_[i]) : py::object(grads_[i]);
  }
  return grads;
}

void Arrays::take_gradients(const py::tuple& grads) {
  Column column = borrow_gradients(grads);
  grads_ = grads;
  gradients_known_ = true;
  if (column != plan->grads) {
    plan->grads = std::move(column);
    plan->gradients_changed();
  }
}

void Arrays::set_gradients(const py::tuple& grads) {
  take_gradients(grads);
  for (size_t i = 0; i < params_.size(); ++i) {
    from_parameter_[i] = grads[i].is_none() || gradient_of(params_[i]).is(grads[i]);
  }
}

void Arrays::refresh() { take_gradients(parameter_gradients()); }

}  // namespace spectrain
