#include "borrow.h"

#include <pybind11/gil_safe_call_once.h>

#include "shared.h"

namespace spectrain {
namespace {

// torch uses the second name from 2.10.1 on, and the first before.
const dlpack::ExchangeApi* find_api(PyTypeObject* type) {
  for (const char* name : {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"}) {
    PyObject* found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
    if (found == nullptr) {
      dismiss_error();
      continue;
    }
    const auto capsule = py::reinterpret_steal<py::object>(found);
    auto* api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) dismiss_error();
    while (api != nullptr && api->version.major != dlpack::kMajorVersion) api = api->previous;
    if (api != nullptr && api->borrow != nullptr) return api;
  }
  return nullptr;
}

// Returns null if the type has no API. Remembers the last type, because a lookup costs 0.3 us and
// nearly all arrays of a call have the same one; per thread, because without the GIL two threads
// could mix up types and results. The type is kept alive, so that its address stays unique.
const dlpack::ExchangeApi* api_of(PyTypeObject* type) {
  thread_local PyTypeObject* known = nullptr;
  thread_local const dlpack::ExchangeApi* api = nullptr;
  if (type == known) return api;
  const dlpack::ExchangeApi* found = find_api(type);
  Py_INCREF(type);
  PyTypeObject* before = known;
  known = type;
  api = found;
  Py_XDECREF(reinterpret_cast<PyObject*>(before));  // last: it may run code that comes here
  return found;
}

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

  const bool cuda = t.device.type == dlpack::kCuda || t.device.type == dlpack::kCudaManaged;
  if (!cuda && t.device.type != dlpack::kCpu && t.device.type != dlpack::kCudaHost) {
    throw py::type_error(place.text() + ": expected a CPU or CUDA tensor, got DLPack device type " +
                         std::to_string(t.device.type));
  }
  b.device = {cuda, cuda ? t.device.id : 0};
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

// The owner's message may contain a C++ stack trace: use its first line, and only if the array does
// not describe itself. NumPy before 2.1, and other owners without versioned capsules, export no
// read-only arrays at all.
[[noreturn]] void refuse(const py::error_already_set& error, py::handle array, const Place& place) {
  if (!error.matches(PyExc_Exception)) throw error;
  const std::string why = first_line(error);
  if (why.find("readonly") != std::string::npos || why.find("read-only") != std::string::npos) {
    refuse_read_only(place, ": " + why);
  }
  const py::object layout = attribute(array, "layout"), device = attribute(array, "device");
  throw py::type_error(place.text() + ": expected a dense tensor on a CPU or CUDA device, got " +
                       (layout && device ? "layout " + py::str(layout).cast<std::string>() +
                                               " on device " + py::str(device).cast<std::string>()
                                         : type_name(array) + ": " + why));
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
  constexpr const char* names[] = {"float16", "bfloat16", "float32", "float64"};
  return names[static_cast<int>(t)];
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

void* resolve_stream(py::handle stream, py::handle array, int device) {
  if (!stream.is_none()) {
    if (py::isinstance<py::int_>(stream)) return reinterpret_cast<void*>(stream.cast<uintptr_t>());
    if (const py::object protocol = attribute(stream, "__cuda_stream__")) {
      const py::tuple pair = protocol();
      return reinterpret_cast<void*>(pair[1].cast<uintptr_t>());
    }
    for (const char* name : {"cuda_stream", "ptr"}) {  // torch.cuda.Stream, cupy.cuda.Stream
      if (const py::object handle = attribute(stream, name)) {
        return reinterpret_cast<void*>(handle.cast<uintptr_t>());
      }
    }
    throw py::type_error(
        "stream: expected None, an integer handle or an object with "
        "__cuda_stream__, got " +
        type_name(stream));
  }
  void* handle = nullptr;
  const dlpack::ExchangeApi* api = array.is_none() ? nullptr : api_of(Py_TYPE(array.ptr()));
  if (api == nullptr) {
    const py::object calls = py::module_::import("spectrain_ext.operators.calls");
    if (calls.attr("framework_of")(array).cast<std::string>() == "cupy") {
      const py::object cuda = py::module_::import("cupy").attr("cuda");
      const py::object current = cuda.attr("get_current_stream")(device);
      return reinterpret_cast<void*>(current.attr("ptr").cast<uintptr_t>());
    }
    const py::object torch_tensor = py::module_::import("torch").attr("Tensor");
    api = api_of(reinterpret_cast<PyTypeObject*>(torch_tensor.ptr()));
  }
  if (api != nullptr && api->current_stream != nullptr &&
      api->current_stream(dlpack::kCuda, device, &handle) != 0) {
    throw py::error_already_set();
  }
  return handle;
}

Borrowed borrow(py::handle array, const Place& place, Loans& loans, bool anew) {
  const dlpack::ExchangeApi* api = api_of(Py_TYPE(array.ptr()));
  if (api == nullptr) return lend(array, place, loans);
  dlpack::Tensor t;
  if (api->borrow(array.ptr(), &t) != 0) {
    refuse(py::error_already_set(), array, place);
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
