// Reads the Python stacks of all threads at one moment.
#pragma once

#include <pybind11/pybind11.h>

namespace spectrain {

namespace py = pybind11;

class NoCollection {
 public:
  NoCollection() : enabled_(PyGC_Disable() == 1) {}
  ~NoCollection() {
    if (enabled_) PyGC_Enable();
  }
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;

 private:
  bool enabled_;
};

// Returns a list of calls (file, line, function) per thread identifier, the innermost call first.
//
// A frame of another thread is valid until the GIL is released. Following it allocates objects, and
// in CPython 3.11 that may collect garbage, whose finalizers release the GIL: a program that does
// so in Python (traceback.walk_stack) crashes. faulthandler.dump_traceback crashes if C++ code lets
// a thread enter Python just then. Here neither Python code nor a collection runs.
//
// Without the GIL no frame of a running thread may be read, so nothing is found.
inline py::dict stacks() {
#ifdef Py_GIL_DISABLED
  return {};
#endif
  const py::object current_frames = py::module_::import("sys").attr("_current_frames");
  const NoCollection guard;
  const py::dict frames = current_frames();
  py::dict found;
  for (const auto& [thread, innermost] : frames) {
    py::list calls;
    auto object = py::reinterpret_borrow<py::object>(innermost);
    while (object) {
      auto* frame = reinterpret_cast<PyFrameObject*>(object.ptr());
      const auto code =
          py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
      calls.append(py::make_tuple(code.attr("co_filename"), PyFrame_GetLineNumber(frame),
                                  code.attr("co_name")));
      object =
          py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(frame)));
    }
    found[thread] = calls;
  }
  return found;
}

}  // namespace spectrain
