// Defines the Python module: plans and build information. Python checks hyperparameters and
// computes coefficients (plan.py, numbers.py, laws.py); arrays are checked here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "arrays.h"
#include "exchange.h"
#include "kernels/cuda/launch.h"
#include "memory.h"
#include "numbers.h"
#include "turn.h"

namespace spectrain {
namespace {

// Role, name in error messages, whether the call writes it, arrays.
using PyList = std::tuple<Role, std::string, bool, py::tuple>;

class PyPlan {
 public:
  PyPlan(const std::vector<PyList>& lists, std::vector<uint16_t> groups, bool single)
      : arrays_(array_lists(lists), std::move(groups), single) {
    const Device device = arrays_.plan->device();
    if (device.cuda) arrays_.plan->allocate = allocator(device.index);
  }

  void predict_(py::handle given, py::handle eps, py::handle stream, py::handle rates) {
    const Turn turn(turns_);
    const Plan::Family by = family(eps);
    const Plan::Terms t = checked(terms(given));
    run(state(by.adam), stream, rates,
        [&](Plan& plan, void* s) { plan.predict(by, t, plan.params, s); });
  }
  void predict(py::handle given, py::handle eps, size_t out, py::handle stream, py::handle rates) {
    const Turn turn(turns_);
    const Plan::Family by = family(eps);
    need_out(out);
    const Plan::Terms t = checked(terms(given));
    run(state(by.adam).add(Role::out), stream, rates,
        [&](Plan& plan, void* s) { plan.predict(by, t, plan.outs[out], s); });
  }
  void stash_predict_(py::handle given, py::handle eps, py::handle stream, py::handle rates) {
    const Turn turn(turns_);
    const Plan::Family by = family(eps);
    need(Role::stashed, "stashed", "needed to stash");
    const Plan::Terms t = checked(terms(given));
    run(state(by.adam).add(Role::stashed), stream, rates,
        [&](Plan& plan, void* s) { plan.stash_predict_(by, t, s); });
  }
  void extrapolate(double steps, size_t out, py::handle stream) {
    const Turn turn(turns_);
    need(Role::stashed, "previous", "needed to extrapolate");
    need_out(out);
    run({Role::params, Role::stashed, Role::out}, stream, py::none(),
        [&](Plan& plan, void* s) { plan.extrapolate(steps, plan.outs[out], s); });
  }
  void stash(py::handle stream) {
    const Turn turn(turns_);
    need(Role::stashed, "stashed", "needed to stash");
    run({Role::params, Role::stashed}, stream, py::none(),
        [](Plan& plan, void* s) { plan.copy(plan.params, plan.stashed, s); });
  }
  void restore_(py::handle stream) {
    const Turn turn(turns_);
    need(Role::stashed, "stashed", "needed to restore");
    run({Role::params, Role::stashed}, stream, py::none(),
        [](Plan& plan, void* s) { plan.copy(plan.stashed, plan.params, s); });
  }
  void swap_(py::handle stream) {
    const Turn turn(turns_);
    need(Role::stashed, "stashed", "needed to swap");
    run({Role::params, Role::stashed}, stream, py::none(),
        [](Plan& plan, void* s) { plan.swap_(s); });
  }
  void write_out(size_t out, py::handle stream) {
    const Turn turn(turns_);
    need_out(out);
    run({Role::params, Role::out}, stream, py::none(),
        [&](Plan& plan, void* s) { plan.copy(plan.params, plan.outs[out], s); });
  }

  size_t distance_scratch() { return arrays_.plan->distance_scratch(); }
  void distances(uintptr_t result, uintptr_t scratch, py::handle stream) {
    const Turn turn(turns_);
    arrays_.check_same_dtypes();
    run({Role::params, Role::out}, stream, py::none(), [&](Plan& plan, void* s) {
      plan.distances(reinterpret_cast<double*>(result), reinterpret_cast<void*>(scratch), s);
    });
  }

  void sgd_step_(py::handle settings, bool with_momentum, py::handle first_step,
                 py::handle predictions, const py::dict& options, py::handle stream,
                 py::handle rates) {
    const Turn turn(turns_);
    if (with_momentum) need(Role::momentum, "momentum_buffers", "needed where momentum != 0");
    need_gradients();
    Loans loans{arrays_.first(), {}};
    Plan::Step step = checked_step(settings, predictions, options, loans);
    bool first = false;
    const std::vector<uint8_t> flags = first_step_flags(first_step, &first);
    for (Setting& s : step.settings) s.first_step = first;
    Roles roles{Role::params, Role::grads};
    if (with_momentum) roles.add(Role::momentum);
    if (!step.predictions.empty()) roles.add(Role::out);
    run(roles, stream, rates,
        [&](Plan& plan, void* s) { plan.sgd_step_(std::move(step), flags, with_momentum, s); });
  }
  void adam_step_(py::handle settings, py::handle predictions, const py::dict& options,
                  py::handle stream) {
    const Turn turn(turns_);
    need_state(true);
    need_gradients();
    Loans loans{arrays_.first(), {}};
    Plan::Step step = checked_step(settings, predictions, options, loans);
    Roles roles = state(true).add(Role::grads);
    if (!step.predictions.empty()) roles.add(Role::out);
    run(roles, stream, py::none(),
        [&](Plan& plan, void* s) { plan.adam_step_(std::move(step), s); });
  }

  // For a plan that is used more than once.
  void keep(bool watch) {
    const Turn turn(turns_);
    arrays_.keep(watch);
  }
  void pin_gradients() {
    const Turn turn(turns_);
    arrays_.plan->pin_gradients();
  }
  void refresh() {
    const Turn turn(turns_);
    arrays_.refresh();
  }
  // Returns whether no gradient is None.
  bool set_gradients(const py::tuple& grads, bool follow) {
    const Turn turn(turns_);
    arrays_.set_gradients(grads, follow);
    return arrays_.plan->all_gradients();
  }
  void forget_gradients() {
    const Turn turn(turns_);
    arrays_.forget_gradients();
  }
  size_t n_outs() { return arrays_.n_outs(); }
  size_t n_groups() { return arrays_.plan->n_groups(); }
  py::tuple last_launch() {
    const Turn turn(turns_);
    return py::make_tuple(arrays_.plan->last_launches(), arrays_.plan->last_rows());
  }

 private:
  static std::vector<ArrayList> array_lists(const std::vector<PyList>& lists) {
    std::vector<ArrayList> result;
    result.reserve(lists.size());
    for (const auto& [role, name, writes, arrays] : lists) {
      if ((role == Role::params) != result.empty()) {
        throw py::value_error(name + ": expected the parameters in the first list, and there only");
      }
      result.push_back({role, name, writes, arrays});
    }
    if (result.empty()) throw py::value_error("lists: expected at least the parameters");
    return result;
  }

  // The weights and state that a rule updates.
  static Roles state(bool adam) {
    Roles roles{Role::params, Role::momentum};
    return adam ? roles.add(Role::second) : roles;
  }

  // The rule of a prediction; throws if its state is missing.
  Plan::Family family(py::handle eps) const {
    Plan::Family result{false, numbers(eps)};
    result.adam = !result.eps.empty();
    need_state(result.adam);
    return result;
  }

  Plan::Terms checked(Plan::Terms t) const {
    if (t.size() != arrays_.plan->n_groups())
      throw std::invalid_argument("one list of terms per group");
    for (const auto& group : t) {
      if (group.size() > static_cast<size_t>(kMaxTerms)) {
        throw std::invalid_argument("steps: expected at most " + std::to_string(kMaxTerms) +
                                    " updates ahead under this law, got " +
                                    std::to_string(group.size()));
      }
    }
    return t;
  }

  Plan::Step checked_step(py::handle given_settings, py::handle given_predictions,
                          const py::dict& given_options, Loans& loans) {
    Plan::Step step{settings(given_settings), predictions(given_predictions)};
    if (step.settings.size() != arrays_.plan->n_groups()) {
      throw std::invalid_argument("one setting per group");
    }
    for (Plan::Prediction& prediction : step.predictions) {
      need_out(prediction.out);
      prediction.terms = checked(std::move(prediction.terms));
    }
    step.options = arrays_.options(given_options, loans);
    return step;
  }

  void need(Role role, const char* name, const char* why) const {
    if (!arrays_.has(role)) throw py::value_error(std::string(name) + ": " + why);
  }
  void need_state(bool adam) const {
    if (!adam) {
      return need(Role::momentum, "momentum_buffers", "a prediction needs the momentum buffers");
    }
    need(Role::momentum, "exp_avgs", "Adam needs the first moments");
    need(Role::second, "exp_avg_sqs", "Adam needs the second moments");
  }
  void need_out(size_t out) const {
    if (out < arrays_.n_outs()) return;
    if (arrays_.n_outs() == 0) {
      throw py::value_error(
          "out: the plan has no outs to write to; give it some, Plan(..., outs=[...]), "
          "each a list like the parameters");
    }
    throw py::value_error("out: expected an index below " + std::to_string(arrays_.n_outs()) +
                          ", the number of outs, got " + std::to_string(out));
  }
  void need_gradients() const {
    if (!arrays_.has_gradients()) {
      throw py::value_error("grads: none are known; give grads= or call refresh() after backward");
    }
  }

  // Returns no flags if all are equal.
  std::vector<uint8_t> first_step_flags(py::handle first_step, bool* all) const {
    if (PyBool_Check(first_step.ptr())) {
      *all = first_step.ptr() == Py_True;
      return {};
    }
    std::vector<bool> flags;
    try {
      flags = first_step.cast<std::vector<bool>>();
    } catch (const py::cast_error&) {
      throw py::type_error("first_step: expected a bool or a sequence of bools, got " +
                           py::repr(first_step).cast<std::string>());
    }
    if (flags.size() != arrays_.plan->size()) {
      throw py::value_error("first_step: expected a bool or one for each of the " +
                            std::to_string(arrays_.plan->size()) + " tensors, got " +
                            std::to_string(flags.size()));
    }
    size_t n_set = 0;
    for (const bool flag : flags) n_set += flag;
    *all = n_set > 0 && n_set == flags.size();
    if (n_set == 0 || *all) return {};
    return {flags.begin(), flags.end()};
  }

  template <class F>
  void run(Roles roles, py::handle stream, py::handle rates, F&& f) {
    Plan& plan = *arrays_.plan;
    if (plan.size() == 0) return;
    arrays_.check_in_place(roles);
    plan.rates = arrays_.rates(rates);
    void* handle = nullptr;
    if (plan.device().cuda) handle = resolve_stream(stream, arrays_.first(), plan.device().index);
    try {
      const py::gil_scoped_release release;
      f(plan, handle);
    } catch (const UnsupportedTypes& error) {
      throw py::value_error(arrays_.describe(error));
    }
  }

  Arrays arrays_;
  Turns turns_;
};

// A method for Python. By its holder, which makes an error of `Plan.__new__(Plan)`, an object
// without a plan; pybind11 would give memory that no constructor has seen as `this`.
template <class Result, class... Arguments>
auto method(Result (PyPlan::*call)(Arguments...)) {
  return [call](const std::shared_ptr<PyPlan>& plan, Arguments... arguments) {
    return ((*plan).*call)(std::forward<Arguments>(arguments)...);
  };
}

py::dict build_info() {
  py::dict info;
  info["version"] = SPECTRAIN_VERSION;
  info["compiler"] = SPECTRAIN_COMPILER;
#if defined(_OPENMP)
  info["openmp"] = true;
#else
  info["openmp"] = false;
#endif
  info["cpu_instruction_set"] = cpu_instruction_set();
  info["cuda"] = cuda_built();
  info["cuda_compiler"] = cuda_compiler_version();
  info["cuda_architectures"] = cuda_architectures();
  info["cuda_architectures_why"] = cuda_architectures_why();
  return info;
}

int require_cuda() {
  std::string why;
  const int count = cuda_device_count(&why);
  if (count == 0) throw std::runtime_error("CUDA was asked for, but " + why);
  return count;
}

// Exports constants, and the names of coefficients, to Python.
void export_constants(py::module_& m) {
  py::enum_<Role>(m, "Role")
      .value("PARAMS", Role::params)
      .value("MOMENTUM", Role::momentum)
      .value("GRADS", Role::grads)
      .value("STASHED", Role::stashed)
      .value("OUT", Role::out)
      .value("SECOND", Role::second);
  m.attr("MAX_GROUPS") = kMaxGroups;
  m.attr("MAX_TERMS") = kMaxTerms;
  m.attr("TERM") = py::tuple(py::cast(names_of_numbers<Term>()));
  std::vector<std::string> setting = names_of_numbers<Setting>();
  setting.push_back("step");
  m.attr("SETTING") = py::tuple(py::cast(setting));
}

}  // namespace
}  // namespace spectrain

// Safe without the GIL: a plan admits one thread at a time, and shared.h has the shared caches.
PYBIND11_MODULE(_C, m, pybind11::mod_gil_not_used()) {
  namespace py = pybind11;
  using spectrain::method;
  using spectrain::PyPlan;
  m.doc() = "Native half of spectrain_ext: validates arrays, resolves streams, launches kernels.";
  spectrain::export_constants(m);
  const auto stream = py::arg("stream");
  const auto rates = py::arg("rates") = py::none();
  py::class_<PyPlan, std::shared_ptr<PyPlan>>(m, "Plan")
      .def(py::init<const std::vector<spectrain::PyList>&, std::vector<uint16_t>, bool>(),
           py::arg("lists"), py::arg("groups"), py::arg("single"))
      .def("predict_", method(&PyPlan::predict_), py::arg("terms"), py::arg("eps"), stream, rates)
      .def("predict", method(&PyPlan::predict), py::arg("terms"), py::arg("eps"), py::arg("out"),
           stream, rates)
      .def("stash_predict_", method(&PyPlan::stash_predict_), py::arg("terms"), py::arg("eps"),
           stream, rates)
      .def("extrapolate", method(&PyPlan::extrapolate), py::arg("steps"), py::arg("out"), stream)
      .def("stash", method(&PyPlan::stash), stream)
      .def("restore_", method(&PyPlan::restore_), stream)
      .def("swap_", method(&PyPlan::swap_), stream)
      .def("write_out", method(&PyPlan::write_out), py::arg("out"), stream)
      .def("distance_scratch", method(&PyPlan::distance_scratch))
      .def("distances", method(&PyPlan::distances), py::arg("result"), py::arg("scratch"), stream)
      .def("sgd_step_", method(&PyPlan::sgd_step_), py::arg("settings"), py::arg("with_momentum"),
           py::arg("first_step"), py::arg("predictions"), py::arg("options"), stream, rates)
      .def("adam_step_", method(&PyPlan::adam_step_), py::arg("settings"), py::arg("predictions"),
           py::arg("options"), stream)
      .def("keep", method(&PyPlan::keep), py::arg("watch"))
      .def("pin_gradients", method(&PyPlan::pin_gradients))
      .def("refresh", method(&PyPlan::refresh))
      .def("set_gradients", method(&PyPlan::set_gradients), py::arg("grads"),
           py::arg("follow") = true)
      .def("forget_gradients", method(&PyPlan::forget_gradients))
      .def_property_readonly("n_outs", method(&PyPlan::n_outs))
      .def_property_readonly("n_groups", method(&PyPlan::n_groups))
      .def("last_launch", method(&PyPlan::last_launch));
  using SharedWatch = std::shared_ptr<spectrain::Watch>;
  py::class_<spectrain::Watch, SharedWatch>(m, "Watch")
      .def(py::init<const py::tuple&>(), py::arg("tensors"))
      .def("in_place", [](const SharedWatch& watch) { return !watch->moved(); });
  m.def(
      "same",
      [](py::handle now, py::handle seen) { return spectrain::same(now.ptr(), seen.ptr()); },
      py::arg("now"), py::arg("seen"));
  m.def("build_info", &spectrain::build_info);
  m.def(
      "stream_handle",
      [](py::handle given) {
        return reinterpret_cast<uintptr_t>(spectrain::resolve_stream(given, py::none(), 0));
      },
      stream);
  m.def("require_cuda", &spectrain::require_cuda);
}
