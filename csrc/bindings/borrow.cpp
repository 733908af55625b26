#include "borrow.h"

#include <pybind11/gil_safe_call_once.h>

#include "exchange.h"
#include "lend.h"

namespace spectrain {
namespace {

// Describes why an array's memory cannot be borrowed. The owner's message may contain a C++ stack
// trace: use its first line, and only if the array does not describe itself.
std::string refusal(py::handle array) {
  py::error_already_set error;
  if (!error.matches(PyExc_Exception)) throw error;
  const py::object layout = attribute(array, "layout"), device = attribute(array, "device");
  if (layout && device) {
    return "got layout " + py::str(layout).cast<std::string>() + " on device " +
           py::str(device).cast<std::string>();
  }
  return "got " + type_name(array) + ": " + first_line(error);
}

// A negative view shares memory and negates it on reading: its bits are not its values.
bool is_negative_view(py::handle tensor) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<PyObject*> name;
  name.call_once_and_store_result([] { return PyUnicode_InternFromString("is_neg"); });
  PyObject* arguments[] = {tensor.ptr()};
  PyObject* answer = PyObject_VectorcallMethod(name.get_stored(), arguments,
                                               1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (answer == nullptr) {
    dismiss_error();  // not a torch tensor
    return false;
  }
  const bool negative = answer == Py_True;
  Py_DECREF(answer);
  return negative;
}

}  // namespace

Borrowed borrow(py::handle array, const Place& place, Loans& loans, bool anew) {
  const dlpack::ExchangeApi* api = api_of(Py_TYPE(array.ptr()));
  if (api == nullptr) return lend(array, place, loans);
  dlpack::Tensor t;
  if (api->borrow(array.ptr(), &t) != 0) {
    throw py::type_error(place.text() + ": expected a dense tensor on a CPU or CUDA device, " +
                         refusal(array));
  }
  const Borrowed b = described(t, place, loans);
  if (anew && is_negative_view(array)) {  // this check takes longer than everything else
    throw py::value_error(place.text() +
                          ": is a negative view (is_neg()); make it a tensor with resolve_neg()");
  }
  return b;
}

bool may_move(py::handle array) { return api_of(Py_TYPE(array.ptr())) != nullptr; }

}  // namespace spectrain
