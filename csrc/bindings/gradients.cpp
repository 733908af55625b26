// Sets, releases and checks the gradients of a plan; the other lists are fixed.
#include "arrays.h"

namespace spectrain {
Column Arrays::borrow_gradients(const py::tuple& grads, Loans& loans) const {
  if (grads.size() != params_.size()) {
    throw py::value_error(grads_name_ + ": expected as many tensors as " + params_name_ + ", " +
                          std::to_string(params_.size()) + ", got " + std::to_string(grads.size()));
  }
  Column column{std::vector<void*>(grads.size(), nullptr), plan->params.dtype};
  static char empty;  // non-null address for an empty gradient, which is not None
  for (size_t i = 0; i < grads.size(); ++i) {
    const py::handle grad = item(grads, i);
    if (grad.is_none()) continue;
    const Place place = place_of(grads_name_, i);
    // The check for a negative view takes two thirds of the time: make it once per array.
    const bool known = i < grads_.size() && item(grads_, i).is(grad);
    Borrowed b = borrow(grad, place, loans, !known);
    if (known && b.data != plan->grads.at[i]) b = borrow(grad, place, loans);
    check(b, place, Role::grads, i);
    column.at[i] = b.data != nullptr ? b.data : &empty;
    column.dtype[i] = b.dtype;
    if (column.at[i] != plan->grads.at[i] || column.dtype[i] != plan->grads.dtype[i]) {
      check_apart(b, place, written_);
    }
  }
  return column;
}

void Arrays::check_pinned(const Column& column) const {
  for (size_t i = 0; i < column.at.size(); ++i) {
    if (column.at[i] == plan->grads.at[i]) continue;
    throw std::runtime_error(
        place_of(grads_name_, i).text() +
        ": this plan's step was captured in a CUDA graph, which reads the gradient at its old "
        "address; keep gradients in place (zero_grad(set_to_none=False)), or make a new Plan");
  }
}

// Whether these are the objects that the plan has, as after zero_grad(set_to_none=False).
bool Arrays::has_gradients(const py::tuple& grads) const {
  if (!gradients_known_ || grads.size() != grads_.size()) return false;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!item(grads, i).is(item(grads_, i))) return false;
  }
  return true;
}

void Arrays::set_gradients(const py::tuple& grads) {
  bool same = has_gradients(grads);
  // Asking torch whether they are in place takes 0.4 of the time of borrowing them again.
  if (same && gradient_watch_.unchanged()) return;
  Loans loans{first(), {}};
  Column column = borrow_gradients(grads, loans);
  if (plan->gradients_pinned()) check_pinned(column);
  same = same && column.at == plan->grads.at && column.dtype == plan->grads.dtype;
  grads_ = grads;
  gradient_loans_ = std::move(loans);
  gradients_known_ = true;
  gradients_writable_ = false;
  if (same) return;
  gradient_watch_ = Watch();
  gradient_uses_ = 0;
  if (column.at != plan->grads.at || column.dtype != plan->grads.dtype) {
    plan->grads = std::move(column);
    plan->gradients_changed();
  }
}

// Keeps the addresses and their tables, which are reused by gradients at the same addresses.
void Arrays::forget_gradients() {
  if (plan->gradients_pinned()) check_pinned({std::vector<void*>(params_.size()), {}});
  grads_ = py::tuple();
  gradient_loans_ = {first(), {}};
  gradients_known_ = false;
  gradients_writable_ = false;
  gradient_watch_ = Watch();
}

// Gradients are short-lived: a watch (0.6 us each to create) pays off from their second use on.
void Arrays::check_gradients_in_place() {
  std::optional<size_t> moved;
  if (++gradient_uses_ > 2) {
    moved = gradient_watch_.moved();
  } else {
    Loans none{first(), {}};
    for (size_t i = 0; i < grads_.size() && !moved; ++i) {
      const py::handle grad = item(grads_, i);
      if (grad.is_none() || plan->size_of_item(i) == 0 || !may_move(grad)) continue;
      const Place place = place_of(grads_name_, i);
      const Borrowed b = borrow(grad, place, none, false);
      if (b.data != plan->grads.at[i] || b.dtype != plan->grads.dtype[i]) moved = i;
    }
  }
  if (moved) {
    throw std::runtime_error(place_of(grads_name_, *moved).text() +
                             ": its memory is not where it was when the plan was given it; call "
                             "refresh() after what moved it");
  }
  if (gradient_uses_ != 2) return;
  Watch watch;
  bool all = true;
  for (size_t i = 0; i < grads_.size(); ++i) {
    if (!grads_[i].is_none()) {
      all &= watch.add(grads_[i], plan->size_of_item(i) > 0 ? plan->grads.at[i] : nullptr, i);
    }
  }
  if (all) watch.remember_layouts();
  gradient_watch_ = std::move(watch);
}

}  // namespace spectrain
