#include "borrowed.h"

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

}  // namespace spectrain
