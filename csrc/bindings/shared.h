// What threads share: what is remembered between calls, and lists and dicts that another thread may
// change meanwhile. Safe with and without the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace spectrain {

namespace py = pybind11;

// What was found of the type that a thread asked of last; one for each thread, since two threads
// without the GIL would mix up types and what was found of them. The type is kept, so that its
// address means this type; a thread leaves that one reference behind when it ends.
template <class Found>
class LastType {
 public:
  template <class Find>
  Found of(PyTypeObject* type, Find&& find) {
    if (type == type_) return found_;
    const Found found = find(type);
    Py_INCREF(type);
    PyTypeObject* before = type_;
    type_ = type;
    found_ = found;
    Py_XDECREF(reinterpret_cast<PyObject*>(before));  // last: it may run code that calls this
    return found;
  }

 private:
  PyTypeObject* type_ = nullptr;
  Found found_{};
};

// The items of a list or tuple, for PySequence_Fast_GET_ITEM. Without the GIL, a list is copied.
inline py::object items_of(PyObject* sequence) {
#ifdef Py_GIL_DISABLED
  PyObject* items = PySequence_Tuple(sequence);
#else
  PyObject* items = PySequence_Fast(sequence, "expected a sequence of numbers");
#endif
  if (items == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(items);
}

// What a key of a dict leads to, or nothing.
inline py::object value_of(PyObject* dict, PyObject* key) {
  PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  if (PyDict_GetItemRef(dict, key, &found) < 0) throw py::error_already_set();
#else
  found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  Py_XINCREF(found);
#endif
  return py::reinterpret_steal<py::object>(found);
}

}  // namespace spectrain
