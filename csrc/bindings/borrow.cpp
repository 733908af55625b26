#include "borrow.h"

#include <pybind11/gil_safe_call_once.h>

#include "exchange.h"

namespace spectrain {
namespace {

std::string dlpack_type_name(dlpack::DataType t) {
  const char* kind = t.code == dlpack::kInt       ? "int"
                     : t.code == dlpack::kUInt    ? "uint"
                     : t.code == dlpack::kFloat   ? "float"
                     : t.code == dlpack::kBfloat  ? "bfloat"
                     : t.code == dlpack::kComplex ? "complex"
                     : t.code == dlpack::kBool    ? "bool"
                                                  : "an 8-bit or smaller float, ";
  return t.code == dlpack::kBool ? kind : kind + std::to_string(t.bits);
}

std::string list_text(const int64_t* values, int n) {
  std::string text = "(";
  for (int i = 0; i < n; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + (n == 1 ? ",)" : ")");
}

const int64_t* contiguous_strides(const dlpack::Tensor& t, Loans& loans) {
  const auto strides = std::make_shared<std::vector<int64_t>>(t.ndim + 1);  // never null
  int64_t step = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    (*strides)[d] = step;
    step *= t.shape[d];
  }
  loans.held.push_back(strides);
  return strides->data();
}

// Returns an error's first line; further lines may be a C++ stack trace.
std::string first_line(const py::error_already_set& error) {
  const auto words = py::str(error.value()).cast<std::string>();
  return words.substr(0, words.find('\n'));
}

// Checks a DLPack tensor and returns its memory.
Borrowed described(const dlpack::Tensor& t, const Place& place, Loans& loans) {
  Borrowed b;
  b.ndim = t.ndim;
  b.shape = t.shape;
  b.strides = t.strides != nullptr ? t.strides : contiguous_strides(t, loans);
  b.size = 1;
  for (int d = 0; d < t.ndim; ++d) b.size *= t.shape[d];
  b.data = static_cast<char*>(t.data) + t.byte_offset;

  switch (t.device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      b.device = {false, 0};
      break;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      b.device = {true, t.device.id};
      break;
    default:
      throw py::type_error(place.text() +
                           ": expected a CPU or CUDA tensor, got DLPack device type " +
                           std::to_string(t.device.type));
  }
  const bool bfloat = t.dtype.code == dlpack::kBfloat && t.dtype.bits == 16;
  const bool floating = t.dtype.code == dlpack::kFloat &&
                        (t.dtype.bits == 16 || t.dtype.bits == 32 || t.dtype.bits == 64);
  if ((!bfloat && !floating) || t.dtype.lanes != 1) {
    throw py::type_error(place.text() + ": expected float16, bfloat16, float32 or float64, got " +
                         dlpack_type_name(t.dtype));
  }
  b.dtype = bfloat               ? DType::bfloat16
            : t.dtype.bits == 16 ? DType::float16
            : t.dtype.bits == 32 ? DType::float32
                                 : DType::float64;
  if (b.size > 0 && t.data == nullptr) {
    throw py::type_error(
        place.text() + ": has no memory of its own (a fake or meta tensor, or a wrapper subclass)");
  }
  if ((reinterpret_cast<uintptr_t>(b.data) & (size_of(b.dtype) - 1)) != 0) {
    throw py::value_error(place.text() + ": expected memory aligned to its elements of " +
                          std::to_string(size_of(b.dtype)) + " bytes");
  }
  return b;
}

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

// Renames the capsule, as DLPack requires, and ensures that the deleter is called once.
template <class Managed>
const Managed* take(py::handle capsule, const char* name, const char* used, Loans& loans) {
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (managed == nullptr) throw py::error_already_set();
  loans.held.reserve(loans.held.size() + 1);
  PyCapsule_SetName(capsule.ptr(), used);
  loans.held.push_back(std::shared_ptr<Managed>(managed, [](Managed* m) {
    if (m->deleter != nullptr) m->deleter(m);
  }));
  return managed;
}

// DLPack represents the legacy default stream (handle 0) as 1.
py::int_ dlpack_stream(py::handle array, int device, const Loans& loans) {
  const py::handle consumer = loans.consumer.ptr() != nullptr ? loans.consumer : array;
  const auto handle = reinterpret_cast<uintptr_t>(resolve_stream(py::none(), consumer, device));
  return py::int_(handle == 0 ? 1 : handle);
}

py::object capsule_of(py::handle array, Loans& loans) {
  py::dict arguments;
  if (const py::object asked = attribute(array, "__dlpack_device__")) {
    const py::tuple device = asked();
    const int type = py::int_(device[0]).cast<int>();
    if (type == dlpack::kCuda || type == dlpack::kCudaManaged) {
      arguments["stream"] = dlpack_stream(array, py::int_(device[1]).cast<int>(), loans);
    }
  }
  const py::object method = array.attr("__dlpack__");
  try {
    return method(**arguments, py::arg("max_version") = py::make_tuple(dlpack::kMajorVersion, 0));
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;  // else it is older than the argument
  }
  return method(**arguments);
}

[[noreturn]] void refuse_read_only(const Place& place, const std::string& why) {
  throw py::value_error(place.text() + ": expected a writable array, got a read-only one" + why);
}

// NumPy before 2.1, and other owners without versioned capsules, export no read-only arrays at all.
[[noreturn]] void refuse(const py::error_already_set& error, py::handle array, const Place& place) {
  const std::string why = first_line(error);
  if (why.find("readonly") != std::string::npos || why.find("read-only") != std::string::npos) {
    refuse_read_only(place, ": " + why);
  }
  throw py::type_error(place.text() + ": expected a dense tensor on a CPU or CUDA device, got " +
                       type_name(array) + ": " + why);
}

// Borrows an array without a C exchange API.
Borrowed lend(py::handle array, const Place& place, Loans& loans) {
  if (!attribute(array, "__dlpack__")) {
    throw py::type_error(place.text() + ": expected a tensor or an array with __dlpack__, got " +
                         type_name(array));
  }
  py::object capsule;
  try {
    capsule = capsule_of(array, loans);
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    refuse(error, array, place);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* managed = take<dlpack::ManagedTensorVersioned>(capsule, "dltensor_versioned",
                                                               "used_dltensor_versioned", loans);
    if (managed->version.major != dlpack::kMajorVersion) {
      throw py::type_error(place.text() + ": expected DLPack version " +
                           std::to_string(dlpack::kMajorVersion) + ", got " +
                           std::to_string(managed->version.major));
    }
    if (place.writes && (managed->flags & dlpack::kReadOnly) != 0) refuse_read_only(place, "");
    return described(managed->tensor, place, loans);
  }
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    throw py::type_error(place.text() + ": expected a DLPack capsule from __dlpack__, got " +
                         py::repr(capsule).cast<std::string>());
  }
  const auto* managed = take<dlpack::ManagedTensor>(capsule, "dltensor", "used_dltensor", loans);
  return described(managed->tensor, place, loans);
}

}  // namespace

const char* name_of(DType t) {
  switch (t) {
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float32:
      return "float32";
    case DType::float64:
      return "float64";
  }
  return "?";
}

std::string Borrowed::shape_text() const { return list_text(shape, ndim); }
std::string Borrowed::strides_text() const { return list_text(strides, ndim); }

void dismiss_error() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw py::error_already_set();
  PyErr_Clear();
}

py::object attribute(py::handle object, const char* name) {
  PyObject* found = PyObject_GetAttrString(object.ptr(), name);
  if (found == nullptr) dismiss_error();
  return py::reinterpret_steal<py::object>(found);
}

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

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
