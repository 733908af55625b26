#include "borrow.h"

#include "lend.h"

namespace spectrain {
namespace {

// torch calls the attribute by its second name from 2.10.1 on, by its first before.
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

// Looking the capsule up costs 0.3 us; nearly every array of a call has the type of the one before.
const dlpack::ExchangeApi* api_of(PyTypeObject* type) {
  static PyTypeObject* last_type = nullptr;  // guarded by the GIL
  static const dlpack::ExchangeApi* last_api = nullptr;
  if (type == last_type) return last_api;
  const dlpack::ExchangeApi* api = find_api(type);
  Py_INCREF(type);  // its address means this type for as long as it is remembered
  Py_XDECREF(reinterpret_cast<PyObject*>(last_type));
  last_type = type;
  last_api = api;
  return api;
}

// Why an owner would not lend its memory. Its own words may carry a C++ stack trace: they are used
// only where the array does not say what it is, and then the first line of them.
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

// A negative view shares memory whose values it flips on reading: its bits are not its values.
bool is_negative_view(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  PyObject* arguments[] = {tensor.ptr()};
  PyObject* answer =
      PyObject_VectorcallMethod(name, arguments, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (answer == nullptr) {
    dismiss_error();  // not a torch tensor
    return false;
  }
  const bool negative = answer == Py_True;
  Py_DECREF(answer);
  return negative;
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
std::string Borrowed::device_text() const {
  return device.cuda ? "cuda:" + std::to_string(device.index) : "cpu";
}

Borrowed borrow(py::handle array, const Place& place, Loans& loans, bool anew) {
  const dlpack::ExchangeApi* api = api_of(Py_TYPE(array.ptr()));
  if (api == nullptr) return lend(array, place, loans);
  dlpack::Tensor t;
  if (api->borrow(array.ptr(), &t) != 0) {
    throw py::type_error(place.text() + ": expected a dense tensor on a CPU or CUDA device, " +
                         refusal(array));
  }
  const Borrowed b = described(t, place, loans);
  if (anew && is_negative_view(array)) {  // asking takes longer than all the rest
    throw py::value_error(place.text() +
                          ": is a negative view (is_neg()); make it a tensor with resolve_neg()");
  }
  return b;
}

bool may_move(py::handle array) { return api_of(Py_TYPE(array.ptr())) != nullptr; }

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

std::string first_line(const py::error_already_set& error) {
  const auto words = py::str(error.value()).cast<std::string>();
  return words.substr(0, words.find('\n'));
}

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
    if (current_stream_of(array, device, &handle)) return handle;
    const py::object torch_tensor = py::module_::import("torch").attr("Tensor");
    api = api_of(reinterpret_cast<PyTypeObject*>(torch_tensor.ptr()));
  }
  if (api != nullptr && api->current_stream != nullptr &&
      api->current_stream(dlpack::kCuda, device, &handle) != 0) {
    throw py::error_already_set();
  }
  return handle;
}

}  // namespace spectrain
