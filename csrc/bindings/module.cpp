// Defines the Python module: plans and build information. Python checks hyperparameters and
// computes coefficients (plan.py, numbers.py, laws.py); arrays are checked here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "arrays.h"
#include "kernels/cuda/launch.h"
#include "memory.h"
#include "numbers.h"
#include "stacks.h"
#include "turn.h"

namespace spectrain {
namespace {

// Role, name in error messages, whether the call writes it, arrays.
using PyList = std::tuple<Role, std::string, bool, py::tuple>;

// What steps and predictions use, where a plan has it.
constexpr Roles kState = bit(Role::params) | bit(Role::momentum) | bit(Role::second);

class PyPlan {
 public:
  Turns turns;

  PyPlan(const std::vector<PyList>& lists, std::vector<uint16_t> groups, bool single)
      : arrays_(array_lists(lists), std::move(groups), single) {
    const Device device = arrays_.plan->device();
    if (device.cuda) arrays_.plan->allocate = allocator(device.index);
  }

  // Writes to the weights if `out` is None.
  void predict(const std::string& operation, py::handle given, py::handle eps, py::handle sources,
               std::optional<size_t> out, py::handle stream) {
    const Plan::Predictor by{operation_of(operation), numbers(eps)};
    const Plan::Terms t = checked(terms(given));
    run(kState | (out ? bit(Role::out) : 0), stream, sources,
        [&](Plan& plan, void* s) { plan.predict(by, t, out ? plan.outs[*out] : plan.params, s); });
  }
  void stash_predict_(const std::string& operation, py::handle given, py::handle eps,
                      py::handle sources, py::handle stream) {
    const Plan::Predictor by{operation_of(operation), numbers(eps)};
    need(Role::stashed, "stashed", "needed to stash");
    const Plan::Terms t = checked(terms(given));
    run(kState | bit(Role::stashed), stream, sources,
        [&](Plan& plan, void* s) { plan.stash_predict_(by, t, s); });
  }
  void extrapolate(double steps, size_t out, py::handle stream) {
    need(Role::stashed, "previous", "needed to extrapolate");
    run(bit(Role::params) | bit(Role::stashed) | bit(Role::out), stream, py::none(),
        [&](Plan& plan, void* s) { plan.extrapolate(steps, plan.outs[out], s); });
  }
  void stash(py::handle stream) {
    move_stashed("needed to stash", stream,
                 [](Plan& plan, void* s) { plan.copy(plan.params, plan.stashed, s); });
  }
  void restore_(py::handle stream) {
    move_stashed("needed to restore", stream,
                 [](Plan& plan, void* s) { plan.copy(plan.stashed, plan.params, s); });
  }
  void swap_(py::handle stream) {
    move_stashed("needed to swap", stream, [](Plan& plan, void* s) { plan.swap_(s); });
  }
  void write_out(size_t out, py::handle stream) {
    run(bit(Role::params) | bit(Role::out), stream, py::none(),
        [&](Plan& plan, void* s) { plan.copy(plan.params, plan.outs[out], s); });
  }

  size_t distance_scratch() { return arrays_.plan->distance_scratch(); }
  void distances(uintptr_t result, uintptr_t scratch, py::handle stream) {
    run(bit(Role::params) | bit(Role::out), stream, py::none(), [&](Plan& plan, void* s) {
      plan.distances(reinterpret_cast<double*>(result), reinterpret_cast<void*>(scratch), s);
    });
  }

  void step(const std::string& name, py::handle given, py::handle given_predictions,
            py::handle sources, py::handle first_step, const py::dict& options, py::handle stream) {
    const Operation operation = operation_of(name);
    if (!arrays_.has_gradients()) {
      throw py::value_error("grads: none are known; give grads= or call refresh() after backward");
    }
    Plan::Step step{settings(given), predictions(given_predictions)};
    if (PyBool_Check(first_step.ptr())) {
      for (Setting& each : step.settings) each.first_step = first_step.ptr() == Py_True;
    } else {
      step.first_step = first_step.cast<std::vector<uint8_t>>();
    }
    for (Plan::Prediction& each : step.predictions) each.terms = checked(std::move(each.terms));
    Loans loans{arrays_.first(), {}};
    step.options = arrays_.options(options, loans);
    const Roles outs = step.predictions.empty() ? 0 : bit(Role::out);
    run(kState | bit(Role::grads) | outs, stream, sources,
        [&](Plan& plan, void* s) { plan.step(operation, std::move(step), s); });
  }

  // For a plan that is used more than once.
  void keep(bool watch) { arrays_.keep(watch); }
  void pin_gradients() { arrays_.plan->pin_gradients(); }
  // Returns whether no gradient is None.
  bool set_gradients(const py::tuple& grads) {
    arrays_.set_gradients(grads);
    return arrays_.plan->all_gradients();
  }
  void forget_gradients() { arrays_.forget_gradients(); }
  size_t n_outs() { return arrays_.plan->outs.size(); }
  py::tuple last_launch() {
    return py::make_tuple(arrays_.plan->last_launches(), arrays_.plan->last_rows());
  }

 private:
  static std::vector<ArrayList> array_lists(const std::vector<PyList>& lists) {
    std::vector<ArrayList> result;
    for (const auto& [role, name, writes, arrays] : lists) {
      result.push_back({role, name, writes, arrays});
    }
    return result;
  }

  // The operation of this name; throws if the plan does not have its state.
  Operation operation_of(const std::string& name) const {
    Operation operation{};
    while (operation != Operation::none && name != row_of(operation).name) {
      operation = static_cast<Operation>(static_cast<int>(operation) + 1);
    }
    if (operation == Operation::none) throw py::value_error("no such operation");
    const OperationRow& row = row_of(operation);
    if (row.has(Role::second)) {
      need(Role::momentum, "exp_avgs", "Adam needs the first moments");
      need(Role::second, "exp_avg_sqs", "Adam needs the second moments");
    } else if (operation == Operation::lion_step || operation == Operation::lion_predict) {
      need(Role::momentum, "exp_avgs", "Lion needs the averages of gradients");
    } else if (row.has(Role::momentum)) {
      need(Role::momentum, "momentum_buffers",
           row.has(Role::grads) ? "needed where momentum != 0"
                                : "a prediction needs the momentum buffers");
    }
    return operation;
  }

  static Plan::Terms checked(Plan::Terms t) {
    for (const auto& group : t) {
      if (group.size() > static_cast<size_t>(kMaxTerms)) {
        throw std::invalid_argument("steps: expected at most " + std::to_string(kMaxTerms) +
                                    " updates ahead under this law, got " +
                                    std::to_string(group.size()));
      }
    }
    return t;
  }

  template <class F>
  void move_stashed(const char* why, py::handle stream, F&& f) {
    need(Role::stashed, "stashed", why);
    run(bit(Role::params) | bit(Role::stashed), stream, py::none(), f);
  }

  void need(Role role, const char* name, const char* why) const {
    if (!arrays_.has(role)) throw py::value_error(std::string(name) + ": " + why);
  }
  template <class F>
  void run(Roles used, py::handle stream, py::handle sources, F&& f) {
    Plan& plan = *arrays_.plan;
    if (plan.size() == 0) return;
    arrays_.check_in_place(used);
    plan.sources = arrays_.sources(sources);
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
};

// A method for Python: one call of a plan at a time.
template <class Result, class... Arguments>
auto method(Result (PyPlan::*call)(Arguments...)) {
  return [call](PyPlan& plan, Arguments... arguments) {
    const Turn turn(plan.turns);
    return (plan.*call)(std::forward<Arguments>(arguments)...);
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
  const CudaBuild cuda = cuda_build();
  info["cuda"] = cuda.built;
  info["cuda_compiler"] = cuda.compiler;
  info["cuda_architectures"] = py::str(cuda.architectures).attr("split")();
  info["cuda_architectures_why"] = cuda.why;
  return info;
}

int require_cuda() {
  std::string why;
  const int count = cuda_device_count(&why);
  if (count == 0) throw std::runtime_error("CUDA was asked for, but " + why);
  return count;
}

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
  m.attr("ROUNDED_DECAY") = kRoundedDecay;
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
  py::class_<PyPlan>(m, "Plan")
      .def(py::init<const std::vector<spectrain::PyList>&, std::vector<uint16_t>, bool>(),
           py::arg("lists"), py::arg("groups"), py::arg("single"))
      .def("predict", method(&PyPlan::predict), py::arg("operation"), py::arg("terms"),
           py::arg("eps"), py::arg("sources"), py::arg("out"), stream)
      .def("stash_predict_", method(&PyPlan::stash_predict_), py::arg("operation"),
           py::arg("terms"), py::arg("eps"), py::arg("sources"), stream)
      .def("extrapolate", method(&PyPlan::extrapolate), py::arg("steps"), py::arg("out"), stream)
      .def("stash", method(&PyPlan::stash), stream)
      .def("restore_", method(&PyPlan::restore_), stream)
      .def("swap_", method(&PyPlan::swap_), stream)
      .def("write_out", method(&PyPlan::write_out), py::arg("out"), stream)
      .def("distance_scratch", method(&PyPlan::distance_scratch))
      .def("distances", method(&PyPlan::distances), py::arg("result"), py::arg("scratch"), stream)
      .def("step", method(&PyPlan::step), py::arg("operation"), py::arg("settings"),
           py::arg("predictions"), py::arg("sources"), py::arg("first_step"), py::arg("options"),
           stream)
      .def("keep", method(&PyPlan::keep), py::arg("watch"))
      .def("pin_gradients", method(&PyPlan::pin_gradients))
      .def("set_gradients", method(&PyPlan::set_gradients), py::arg("grads"))
      .def("forget_gradients", method(&PyPlan::forget_gradients))
      .def_property_readonly("n_outs", method(&PyPlan::n_outs))
      .def("last_launch", method(&PyPlan::last_launch));
  py::class_<spectrain::Watch>(m, "Watch")
      .def(py::init<const py::tuple&>(), py::arg("tensors"))
      .def("in_place", [](const spectrain::Watch& watch) { return !watch.moved(); });
  m.def(
      "same",
      [](py::handle now, py::handle seen) { return spectrain::same(now.ptr(), seen.ptr()); },
      py::arg("now"), py::arg("seen"));
  m.def("stacks", &spectrain::stacks);
  m.def("power", &spectrain::power, py::arg("x"), py::arg("n"));
  m.def("build_info", &spectrain::build_info);
  m.def(
      "stream_handle",
      [](py::handle given) {
        return reinterpret_cast<uintptr_t>(spectrain::resolve_stream(given, py::none(), 0));
      },
      stream);
  m.def("require_cuda", &spectrain::require_cuda);
  m.def(
      "copy",
      [](uintptr_t to, uintptr_t from, size_t bytes, int device, uintptr_t given) {
        const py::gil_scoped_release release;
        spectrain::copy_cuda(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from),
                             bytes, device, reinterpret_cast<void*>(given));
      },
      py::arg("to"), py::arg("source"), py::arg("bytes"), py::arg("device"), stream);
}
