#include "arrays.h"

#include <algorithm>

namespace spectrain {
namespace {

// Whether the array is contiguous in some order of dimensions, without gaps or overlap.
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

}  // namespace

Arrays::Arrays(std::vector<ArrayList> lists, std::vector<uint16_t> groups, bool single)
    : single_(single), params_(lists.at(0).arrays), params_name_(lists.at(0).name) {
  const size_t n = params_.size();
  std::vector<int64_t> sizes(n);
  loans_.consumer = first();
  Column params{std::vector<void*>(n), std::vector<DType>(n)};
  for (size_t i = 0; i < n; ++i) {
    const Place place = place_of(params_name_, i, lists[0].writes);
    const Borrowed b = borrow(params_[i], place, loans_);
    if (i == 0) device_ = b.device;
    if (!(b.device == device_)) {
      throw py::value_error(place.text() + ": expected all tensors on " + device_.text() +
                            ", the device of " + params_name_ + "[0], got " + b.device.text());
    }
    if (!is_dense(b)) {
      throw py::value_error(place.text() + ": expected a dense layout without gaps, got shape " +
                            b.shape_text() + " with strides " + b.strides_text() +
                            (has_internal_overlap(b) ? " (an expanded view overlaps itself)" : ""));
    }
    std::vector<int64_t>& extents = extents_.emplace_back(b.shape, b.shape + b.ndim);
    extents.insert(extents.end(), b.strides, b.strides + b.ndim);
    layouts_.push_back(b);
    layouts_.back().shape = extents.data();
    layouts_.back().strides = extents.data() + b.ndim;
    sizes[i] = b.size;
    params.at[i] = b.data;
    params.dtype[i] = b.dtype;
  }
  if (groups.empty()) groups.resize(n, 0);
  plan = std::make_unique<Plan>(device_, std::move(sizes), std::move(groups));
  plan->params = std::move(params);
  // Reserve the outputs first: columns must not move afterwards.
  for (const ArrayList& list : lists) {
    if (list.role == Role::out) plan->outs.emplace_back();
  }

  size_t outs = 0;
  std::string momentum_name;
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
    Column& column = column_of(list.role, &outs);
    for (size_t i = 0; i < n; ++i) {
      const Place place = place_of(list.name, i, list.writes);
      const Borrowed b = borrow(list.arrays[i], place, loans_);
      check(b, place, list.role, i);
      // Kernels read all state in one dtype.
      if (list.role == Role::second && plan->momentum.present() &&
          b.dtype != plan->momentum.dtype[i]) {
        throw py::value_error(place.text() + ": expected " + name_of(plan->momentum.dtype[i]) +
                              ", the dtype of " + place_of(momentum_name, i).text() + ", got " +
                              name_of(b.dtype));
      }
      column.at.push_back(b.data);
      column.dtype.push_back(b.dtype);
    }
    if (list.role == Role::momentum) momentum_name = list.name;
  }
  plan->grads = {std::vector<void*>(n, nullptr), plan->params.dtype};
  kept_ = std::move(lists);
  check_overlap();
  for (ArrayList& list : kept_) {
    if (list.role != Role::grads) continue;
    set_gradients(list.arrays);
    list.arrays = py::tuple();  // grads_ holds them now
  }
}

Column& Arrays::column_of(Role role, size_t* outs) const {
  return role == Role::out ? plan->outs[(*outs)++] : (*plan).*Plan::column(role);
}

std::string Arrays::describe(const UnsupportedTypes& error) const {
  const Place place = place_of(params_name_, error.item);
  return place.text() + ": no kernel takes " + name_of(error.key.w) + " weights with " +
         name_of(error.key.g) + " gradients, " + name_of(error.key.s) + " state and " +
         name_of(error.key.o) + " outputs together";
}

bool Arrays::has(Role role) const {
  return std::any_of(kept_.begin(), kept_.end(),
                     [&](const ArrayList& list) { return list.role == role; });
}

void Arrays::check(const Borrowed& b, const Place& place, Role role, size_t i) const {
  const Place param = place_of(params_name_, place.index);
  const Borrowed& expected = layouts_[i];
  // State may be wider than 16-bit parameters, and bfloat16 under float32; gradients and outputs
  // may be narrower than float32.
  const bool state = role == Role::momentum || role == Role::second;
  const bool wider = state && size_of(expected.dtype) == 2;
  const bool short_state = state && expected.dtype == DType::float32;
  // Outputs that are only read are compared with the parameters.
  const bool narrower = (role == Role::grads || (role == Role::out && place.writes)) &&
                        expected.dtype == DType::float32;
  if (b.dtype != expected.dtype && !(wider && b.dtype == DType::float32) &&
      !(short_state && b.dtype == DType::bfloat16) && !(narrower && size_of(b.dtype) == 2)) {
    throw py::value_error(place.text() + ": expected " + name_of(expected.dtype) +
                          (wider         ? " or float32"
                           : short_state ? " or bfloat16"
                           : narrower    ? ", bfloat16 or float16"
                                         : "") +
                          ", the dtype of " + param.text() + ", got " + name_of(b.dtype));
  }
  if (!(b.device == device_)) {
    throw py::value_error(place.text() + ": expected a tensor on " + device_.text() + ", like " +
                          param.text() + ", got " + b.device.text());
  }
  if (b.ndim != expected.ndim || !std::equal(b.shape, b.shape + b.ndim, expected.shape)) {
    throw py::value_error(place.text() + ": expected shape " + expected.shape_text() +
                          ", the shape of " + param.text() + ", got " + b.shape_text());
  }
  for (int d = 0; d < b.ndim; ++d) {
    if (b.size > 0 && b.shape[d] > 1 && b.strides[d] != expected.strides[d]) {
      throw py::value_error(place.text() + ": expected strides " + expected.strides_text() +
                            ", the strides of " + param.text() + ", got " + b.strides_text() +
                            (has_internal_overlap(b) ? " (an expanded view overlaps itself)" : ""));
    }
  }
}

// Two arrays may share memory only if both are only read. Gradients are checked later.
void Arrays::check_overlap() {
  std::vector<Span> spans;
  size_t outs = 0;
  for (size_t l = 0; l < kept_.size(); ++l) {
    const Role role = kept_[l].role;
    if (role == Role::grads) continue;
    const Column& column = column_of(role, &outs);
    for (size_t i = 0; i < column.at.size(); ++i) {
      const int64_t bytes = plan->size_of_item(i) * size_of(column.dtype[i]);
      const auto* begin = static_cast<const char*>(column.at[i]);
      if (bytes > 0) spans.push_back({begin, begin + bytes, l, i});
    }
  }
  const auto before = [](const Span& a, const Span& b) { return a.begin < b.begin; };
  if (!std::is_sorted(spans.begin(), spans.end(), before)) {
    std::stable_sort(spans.begin(), spans.end(), before);
  }
  const Span* reaches = nullptr;          // the span so far that ends last
  const Span* written_reaches = nullptr;  // the written one that ends last
  for (const Span& now : spans) {
    const bool writes = kept_[now.list].writes;
    const Span* other = writes ? reaches : written_reaches;
    if (other != nullptr && now.begin < other->end) {
      // Name the later argument in the error; params come first.
      const bool later =
          std::make_pair(now.list, now.index) > std::make_pair(other->list, other->index);
      const Span& first = later ? *other : now;
      const Span& second = later ? now : *other;
      throw py::value_error(place_of(kept_[second.list].name, second.index).text() +
                            ": expected memory of its own, got an overlap with " +
                            place_of(kept_[first.list].name, first.index).text());
    }
    if (reaches == nullptr || now.end > reaches->end) reaches = &now;
    if (!writes) continue;
    if (written_reaches == nullptr || now.end > written_reaches->end) written_reaches = &now;
    written_.push_back(now);
  }
}

// Checks that no written array of `others` overlaps an array that is only read.
void Arrays::check_apart(const Borrowed& b, const Place& place,
                         const std::vector<Span>& others) const {
  const char *begin = b.begin(), *end = b.end();
  auto next = std::upper_bound(others.begin(), others.end(), begin,
                               [](const char* at, const Span& s) { return at < s.begin; });
  if (next != others.begin() && std::prev(next)->end > begin) --next;
  if (next == others.end() || next->begin >= end || begin == end) return;
  const std::string& name = &others == &writable_gradients_ ? grads_name_ : kept_[next->list].name;
  throw py::value_error(place.text() +
                        ": expected memory that the step does not write, got an overlap with " +
                        place_of(name, next->index).text());
}

void Arrays::keep(bool watch) {
  plan->keep_tables = true;
  if (!watch) return;
  size_t outs = 0;
  for (const ArrayList& list : kept_) {
    Watch& watch_list = watches_.emplace_back();
    if (list.role == Role::grads) continue;
    const Column& column = column_of(list.role, &outs);
    for (size_t i = 0; i < column.at.size(); ++i) {
      if (plan->size_of_item(i) > 0) watch_list.add(list.arrays[i], column.at[i], i);
    }
  }
}

void Arrays::check_in_place(Roles roles) {
  for (size_t l = 0; l < watches_.size(); ++l) {
    if ((roles & bit(kept_[l].role)) == 0) continue;
    const std::optional<size_t> i = watches_[l].moved();
    if (!i) continue;
    throw std::runtime_error(
        place_of(kept_[l].name, *i).text() +
        ": its memory is not where it was when the plan was made (p.data = ..., .to(), .double(), "
        "set_(), resize_() or share_memory() since); make a new Plan");
  }
  if (!watches_.empty() && (roles & bit(Role::grads)) != 0) check_gradients_in_place();
}

}  // namespace spectrain
