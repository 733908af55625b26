// The native module: a plan as Python sees it, and what was built.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>

#include "../cuda/launch.h"
#include "arrays.h"

namespace spectrain {
namespace {

double number(const char* name, py::handle object) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw py::type_error(std::string(name) + ": expected a number, got " +
                         py::repr(object).cast<std::string>());
  }
  return value;
}

double non_negative(const char* name, py::handle object) {
  const double value = number(name, object);
  if (!std::isfinite(value) || value < 0.0) {
    throw py::value_error(std::string(name) + ": expected a finite number >= 0, got " +
                          py::repr(py::float_(value)).cast<std::string>());
  }
  return value;
}

class PyPlan {
 public:
  PyPlan(const std::vector<std::tuple<int, std::string, bool, py::tuple>>& lists, bool single)
      : arrays_(array_lists(lists), single) {}

  void predict_(py::handle lr_, py::handle steps_, py::handle stream) {
    need(Role::momentum, "momentum_buffers", "a prediction needs the momentum buffers");
    const double lr = non_negative("lr", lr_), steps = non_negative("steps", steps_);
    run(stream, [&](Plan& plan, void* s) { plan.predict_(lr, steps, s); });
  }
  void predict(py::handle lr_, py::handle steps_, size_t out, py::handle stream) {
    need(Role::momentum, "momentum_buffers", "a prediction needs the momentum buffers");
    const double lr = non_negative("lr", lr_), steps = non_negative("steps", steps_);
    if (out >= arrays_.n_outs()) {
      throw py::value_error("out: expected an index below " + std::to_string(arrays_.n_outs()) +
                            ", the number of outs, got " + std::to_string(out));
    }
    run(stream, [&](Plan& plan, void* s) { plan.predict(lr, steps, out, s); });
  }
  void stash(py::handle stream) {
    need(Role::stashed, "stashed", "needed to stash");
    run(stream, [](Plan& plan, void* s) { plan.stash(s); });
  }
  void restore_(py::handle stream) {
    need(Role::stashed, "stashed", "needed to restore");
    run(stream, [](Plan& plan, void* s) { plan.restore_(s); });
  }
  void swap_(py::handle stream) {
    need(Role::stashed, "stashed", "needed to swap");
    run(stream, [](Plan& plan, void* s) { plan.swap_(s); });
  }
  void stash_predict_(py::handle lr_, py::handle steps_, py::handle stream) {
    need(Role::momentum, "momentum_buffers", "a prediction needs the momentum buffers");
    need(Role::stashed, "stashed", "needed to stash");
    const double lr = non_negative("lr", lr_), steps = non_negative("steps", steps_);
    run(stream, [&](Plan& plan, void* s) { plan.stash_predict_(lr, steps, s); });
  }

  void sgd_step_(py::handle lr, py::handle momentum, py::handle dampening, py::handle weight_decay,
                 bool nesterov, bool maximize, py::handle first_step, const py::sequence& predict,
                 py::handle stream) {
    Hyper hyper;
    hyper.lr = non_negative("lr", lr);
    hyper.momentum = non_negative("momentum", momentum);
    hyper.weight_decay = non_negative("weight_decay", weight_decay);
    hyper.dampening = number("dampening", dampening);
    if (!std::isfinite(hyper.dampening)) {
      throw py::value_error("dampening: expected a finite number, got " +
                            py::repr(dampening).cast<std::string>());
    }
    if (nesterov && (hyper.momentum <= 0.0 || hyper.dampening != 0.0)) {
      throw py::value_error("nesterov: needs momentum > 0 and dampening == 0");
    }
    hyper.nesterov = nesterov;
    hyper.maximize = maximize;
    if (hyper.momentum != 0.0)
      need(Role::momentum, "momentum_buffers", "needed where momentum != 0");
    if (!arrays_.has_gradients()) {
      throw py::value_error("grads: none are known; give grads= or call refresh() after backward");
    }
    if (predict.size() > arrays_.n_outs()) {
      throw py::value_error("predict: expected at most one entry for each of the " +
                            std::to_string(arrays_.n_outs()) + " outs, got " +
                            std::to_string(predict.size()));
    }
    std::vector<Plan::Prediction> predictions;
    for (size_t j = 0; j < predict.size(); ++j) {
      const py::object steps = predict[j];
      if (steps.is_none()) continue;
      const std::string name = "predict[" + std::to_string(j) + "]";
      predictions.push_back({non_negative(name.c_str(), steps), j});
    }
    if (!predictions.empty() && hyper.momentum == 0.0) {
      throw py::value_error("predict: a prediction needs momentum > 0");
    }
    const std::vector<uint8_t> flags = first_step_flags(first_step, &hyper.first_step);
    run(stream, [&](Plan& plan, void* s) { plan.sgd_step_(hyper, flags, predictions, s); });
  }

  void refresh() { arrays_.refresh(); }
  void set_gradients(const py::tuple& grads) { arrays_.set_gradients(grads); }
  py::tuple last_launch() const {
    return py::make_tuple(arrays_.plan->last_launches(), arrays_.plan->last_rows());
  }

 private:
  static std::vector<ArrayList> array_lists(
      const std::vector<std::tuple<int, std::string, bool, py::tuple>>& lists) {
    std::vector<ArrayList> result;
    result.reserve(lists.size());
    for (const auto& [role, name, writes, arrays] : lists) {
      result.push_back({static_cast<Role>(role), name, writes, arrays});
    }
    return result;
  }

  void need(Role role, const char* name, const char* why) const {
    if (!arrays_.has(role)) throw py::value_error(std::string(name) + ": " + why);
  }

  // All flags equal need no flags in the table.
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
  void run(py::handle stream, F&& f) {
    Plan& plan = *arrays_.plan;
    if (plan.size() == 0) return;
    void* handle = nullptr;
    if (plan.device().cuda) handle = resolve_stream(stream, arrays_.first(), plan.device().index);
    const py::gil_scoped_release release;
    f(plan, handle);
  }

  Arrays arrays_;
};

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
  return info;
}

int require_cuda() {
  std::string why;
  const int count = cuda_device_count(&why);
  if (count == 0) throw std::runtime_error("CUDA was asked for, but " + why);
  return count;
}

}  // namespace
}  // namespace spectrain

PYBIND11_MODULE(_C, m) {
  namespace py = pybind11;
  using spectrain::PyPlan;
  m.doc() = "Native half of spectrain_ext: validates arrays, resolves streams, launches kernels.";
  const auto stream = py::arg("stream") = py::none();
  py::class_<PyPlan>(m, "Plan")
      .def(py::init<const std::vector<std::tuple<int, std::string, bool, py::tuple>>&, bool>(),
           py::arg("lists"), py::arg("single"))
      .def("predict_", &PyPlan::predict_, py::arg("lr"), py::arg("steps"), stream)
      .def("predict", &PyPlan::predict, py::arg("lr"), py::arg("steps"), py::arg("out"), stream)
      .def("stash", &PyPlan::stash, stream)
      .def("restore_", &PyPlan::restore_, stream)
      .def("swap_", &PyPlan::swap_, stream)
      .def("stash_predict_", &PyPlan::stash_predict_, py::arg("lr"), py::arg("steps"), stream)
      .def("sgd_step_", &PyPlan::sgd_step_, py::arg("lr"), py::arg("momentum"),
           py::arg("dampening"), py::arg("weight_decay"), py::arg("nesterov"), py::arg("maximize"),
           py::arg("first_step"), py::arg("predict"), stream)
      .def("refresh", &PyPlan::refresh)
      .def("set_gradients", &PyPlan::set_gradients, py::arg("grads"))
      .def("last_launch", &PyPlan::last_launch);
  m.def("build_info", &spectrain::build_info);
  m.def("require_cuda", &spectrain::require_cuda);
}
