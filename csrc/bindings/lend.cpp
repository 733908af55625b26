#include "lend.h"

#include <cstring>

#include "exchange.h"

namespace spectrain {
namespace {

void check_writable(bool read_only, const Place& place) {
  if (read_only && place.writes) {
    throw py::value_error(place.text() + ": is written, but got a read-only array");
  }
}

// Sizes and strides in elements, from an interface that counts bytes.
struct Extents {
  std::vector<int64_t> shape, strides;
};

int64_t in_elements(int64_t bytes, int64_t item, const Place& place) {
  if (bytes % item == 0) return bytes / item;
  throw py::value_error(place.text() + ": expected a dense layout without gaps, got a stride of " +
                        std::to_string(bytes) + " bytes between elements of " +
                        std::to_string(item));
}

// The buffer protocol: one C call, for host memory; it reports read-only buffers.

struct Buffer {
  Py_buffer view{};
  Extents extents;
  ~Buffer() {
    if (view.obj != nullptr) PyBuffer_Release(&view);
  }
};

dlpack::DataType buffer_type(const Py_buffer& view, py::handle array, const Place& place) {
  const std::string given = view.format != nullptr ? view.format : "B";
  const char* format = given.c_str();
  if (std::strchr("@=<", *format) != nullptr && *format != '\0') ++format;
  const char letter = std::strlen(format) == 1 ? *format : '?';
  const bool floating = (letter == 'e' && view.itemsize == 2) ||
                        (letter == 'f' && view.itemsize == 4) ||
                        (letter == 'd' && view.itemsize == 8);
  if (!floating) {
    const py::object dtype = attribute(array, "dtype");
    throw py::type_error(
        place.text() + ": expected float16, bfloat16, float32 or float64, got " +
        (dtype ? py::str(dtype).cast<std::string>() : "a buffer of format " + given));
  }
  return {dlpack::kFloat, static_cast<uint8_t>(8 * view.itemsize), 1};
}

bool lend_buffer(py::handle array, const Place& place, Loans& loans, Borrowed* b) {
  if (!PyObject_CheckBuffer(array.ptr())) return false;
  const auto buffer = std::make_shared<Buffer>();
  Py_buffer& view = buffer->view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_RECORDS_RO) != 0) {
    dismiss_error();  // buffers cannot describe some NumPy types: try another interface
    return false;
  }
  loans.held.push_back(buffer);
  const dlpack::DataType type = buffer_type(view, array, place);
  check_writable(view.readonly != 0, place);
  auto& [shape, strides] = buffer->extents;
  shape.assign(view.shape, view.shape + view.ndim);
  for (int d = 0; d < view.ndim; ++d) {
    strides.push_back(in_elements(view.strides[d], view.itemsize, place));
  }
  *b = described({view.buf, {dlpack::kCpu, 0}, view.ndim, type, shape.data(), strides.data(), 0},
                 place, loans);
  return true;
}

// DLPack capsules.

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

bool lend_dlpack(py::handle array, const Place& place, Loans& loans, Borrowed* b) {
  if (!attribute(array, "__dlpack__")) return false;
  py::object capsule;
  try {
    capsule = capsule_of(array, loans);
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    throw py::type_error(place.text() + ": expected a dense tensor on a CPU or CUDA device, got " +
                         type_name(array) + ": " + first_line(error));
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* managed = take<dlpack::ManagedTensorVersioned>(capsule, "dltensor_versioned",
                                                               "used_dltensor_versioned", loans);
    if (managed->version.major != dlpack::kMajorVersion) {
      throw py::type_error(place.text() + ": expected DLPack version " +
                           std::to_string(dlpack::kMajorVersion) + ", got " +
                           std::to_string(managed->version.major));
    }
    check_writable((managed->flags & dlpack::kReadOnly) != 0, place);
    *b = described(managed->tensor, place, loans);
    return true;
  }
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    throw py::type_error(place.text() + ": expected a DLPack capsule from __dlpack__, got " +
                         py::repr(capsule).cast<std::string>());
  }
  *b = described(take<dlpack::ManagedTensor>(capsule, "dltensor", "used_dltensor", loans)->tensor,
                 place, loans);
  return true;
}

// `__cuda_array_interface__`, version 2 or 3. It does not name a device: assume the current one.

bool lend_cuda_array(py::handle array, const Place& place, Loans& loans, Borrowed* b) {
  const py::object described_by = attribute(array, "__cuda_array_interface__");
  if (!described_by) return false;
  const py::dict interface = described_by;
  const auto typestr = interface["typestr"].cast<std::string>();
  if (typestr != "<f4" && typestr != "<f8") {
    throw py::type_error(place.text() + ": expected float32 or float64, got " + typestr +
                         (typestr == "<f2" || typestr == "<V2"
                              ? ", which through __cuda_array_interface__ may be float16 or "
                                "bfloat16; an array with __dlpack__ says which"
                              : ""));
  }
  if (interface.contains("mask") && !interface["mask"].is_none()) {
    throw py::type_error(place.text() + ": expected an array without a mask");
  }
  const auto data = interface["data"].cast<std::pair<uintptr_t, bool>>();
  check_writable(data.second, place);
  const int64_t item = typestr == "<f4" ? 4 : 8;
  const auto extents = std::make_shared<Extents>();
  loans.held.push_back(extents);
  for (const py::handle size : interface["shape"]) extents->shape.push_back(size.cast<int64_t>());
  const py::object strides =
      interface.contains("strides") ? py::object(interface["strides"]) : py::none();
  if (!strides.is_none()) {
    for (const py::handle stride : strides) {
      extents->strides.push_back(in_elements(stride.cast<int64_t>(), item, place));
    }
    if (extents->strides.size() != extents->shape.size()) {
      throw py::type_error(place.text() + ": expected as many strides as dimensions");
    }
  }
  const py::object cuda = py::module_::import("torch").attr("cuda");
  const bool usable =
      cuda.attr("is_available")().cast<bool>();  // else the launch reports the error
  const int device = usable ? cuda.attr("current_device")().cast<int>() : 0;
  const dlpack::DataType type{dlpack::kFloat, static_cast<uint8_t>(8 * item), 1};
  *b = described({reinterpret_cast<void*>(data.first),
                  {dlpack::kCuda, device},
                  static_cast<int32_t>(extents->shape.size()),
                  type,
                  extents->shape.data(),
                  strides.is_none() ? nullptr : extents->strides.data(),
                  0},
                 place, loans);
  return true;
}

}  // namespace

Borrowed lend(py::handle array, const Place& place, Loans& loans) {
  Borrowed b;
  if (lend_buffer(array, place, loans, &b) || lend_dlpack(array, place, loans, &b) ||
      lend_cuda_array(array, place, loans, &b)) {
    return b;
  }
  throw py::type_error(place.text() + ": expected a tensor, got " + type_name(array));
}

}  // namespace spectrain
