// Access to lists and dicts that other threads may change, with and without the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace spectrain {

namespace py = pybind11;

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

// Returns the value of a dict's key, or nothing.
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
