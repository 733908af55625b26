#include "watch.h"

#include <dlfcn.h>
#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <stdexcept>

#include "borrow.h"
#include "shared.h"

namespace spectrain {
namespace {

// From torch/csrc/inductor/aoti_torch/c/shim.h. A handle points to an at::Tensor, which is a
// pointer to the tensor's implementation.
struct TorchAbi {
  int (*delete_handle)(void* handle);
  int (*data_ptr)(void* handle, void** result);
  // Creates a tensor with the same storage: sizes, strides, offset.
  int (*reinterpret)(void* handle, int64_t ndim, const int64_t* sizes, const int64_t* strides,
                     int64_t offset, void** result);
  int (*dtype)(void* handle, int32_t* result);
  int (*dim)(void* handle, int64_t* result);
  int (*sizes)(void* handle, int64_t** result);
  int (*strides)(void* handle, int64_t** result);
};

template <class F>
void find(void* library, const char* name, F** function) {
  *function = library != nullptr ? reinterpret_cast<F*>(dlsym(library, name)) : nullptr;
  if (*function != nullptr) return;
  throw std::runtime_error(std::string("this torch does not export ") + name +
                           ", which a Plan needs; spectrain_ext supports torch >= 2.10");
}

const TorchAbi& torch_abi() {
  static const TorchAbi abi = [] {
    // By name only: `import torch` has loaded the library.
    void* library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    TorchAbi found;
    find(library, "aoti_torch_delete_tensor_object", &found.delete_handle);
    find(library, "aoti_torch_get_data_ptr", &found.data_ptr);
    find(library, "aoti_torch__reinterpret_tensor", &found.reinterpret);
    find(library, "aoti_torch_get_dtype", &found.dtype);
    find(library, "aoti_torch_get_dim", &found.dim);
    find(library, "aoti_torch_get_sizes", &found.sizes);
    find(library, "aoti_torch_get_strides", &found.strides);
    return found;
  }();
  return abi;
}

bool is_torch_tensor(py::handle array) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> type;
  type.call_once_and_store_result(
      [] { return py::object(py::module_::import("torch").attr("Tensor")); });
  return PyObject_TypeCheck(array.ptr(), reinterpret_cast<PyTypeObject*>(type.get_stored().ptr()));
}

struct Layout {
  int32_t dtype = 0;
  int64_t dim = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
};

// Returns whether torch gave the layout; a subclass may have none.
bool read(void* impl, Layout& layout) {
  const TorchAbi& torch = torch_abi();
  return torch.dtype(&impl, &layout.dtype) == 0 && torch.dim(&impl, &layout.dim) == 0 &&
         torch.sizes(&impl, &layout.sizes) == 0 && torch.strides(&impl, &layout.strides) == 0;
}

// Returns a new handle. Not from `_cdata`, which a subclass can answer as it likes.
void* handle_of(py::handle tensor) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> function;
  function.call_once_and_store_result([] {
    const py::object torch = py::module_::import("torch").attr("_C").attr("_aoti");
    return py::object(torch.attr("unsafe_alloc_void_ptr_from_tensor"));
  });
  const py::object capsule = function.get_stored()(tensor);
  void* handle = PyCapsule_GetPointer(capsule.ptr(), nullptr);
  if (handle == nullptr) throw py::error_already_set();
  return handle;
}

}  // namespace

Watch::Watch(const py::tuple& tensors) {
  const std::string name = "tensors";
  for (size_t i = 0; i < tensors.size(); ++i) {
    Loans loans{tensors[i], {}};
    const Borrowed b = borrow(tensors[i], {name, i, false}, loans);
    add(tensors[i], b.size > 0 ? b.data : nullptr, i);
  }
}

bool Watch::add(py::handle array, const void* at, size_t index) {
  if (!is_torch_tensor(array)) return false;
  const TorchAbi& torch = torch_abi();
  tensors_.push_back({nullptr, nullptr, nullptr, at, index});
  Tensor& tensor = tensors_.back();
  tensor.handle = handle_of(array);
  tensor.impl = *static_cast<void**>(tensor.handle);
  const int64_t none = 0;
  if (torch.reinterpret(tensor.handle, 1, &none, &none, 0, &tensor.storage) != 0) {
    throw std::runtime_error("torch gave no handle of a tensor");
  }
  return true;
}

std::optional<size_t> Watch::moved() const {
  if (tensors_.empty()) return std::nullopt;
  const auto data_ptr = torch_abi().data_ptr;
  for (const Tensor& tensor : tensors_) {
    void* impl =
        tensor.impl;  // a handle of its own, in a register: `handle` is a line of cache away
    void* now = nullptr;
    if (data_ptr(&impl, &now) != 0 || now != tensor.at) return tensor.index;
  }
  return std::nullopt;
}

void Watch::remember_layouts() {
  layouts_.clear();
  for (const Tensor& tensor : tensors_) {
    Layout layout;
    if (!read(tensor.impl, layout)) {
      layouts_.clear();
      return;
    }
    layouts_.push_back(layout.dtype);
    layouts_.push_back(layout.dim);
    layouts_.insert(layouts_.end(), layout.sizes, layout.sizes + layout.dim);
    layouts_.insert(layouts_.end(), layout.strides, layout.strides + layout.dim);
  }
}

bool Watch::unchanged() const {
  if (layouts_.empty() || moved()) return false;
  const int64_t* known = layouts_.data();
  for (const Tensor& tensor : tensors_) {
    Layout now;
    if (!read(tensor.impl, now) || known[0] != now.dtype || known[1] != now.dim) return false;
    known += 2;
    if (!std::equal(now.sizes, now.sizes + now.dim, known)) return false;
    known += now.dim;
    if (!std::equal(now.strides, now.strides + now.dim, known)) return false;
    known += now.dim;
  }
  return true;
}

Watch::~Watch() {
  for (const Tensor& tensor : tensors_) {
    if (tensor.storage != nullptr) torch_abi().delete_handle(tensor.storage);
    if (tensor.handle != nullptr) torch_abi().delete_handle(tensor.handle);
  }
}

bool same(PyObject* now, PyObject* seen) {
  if (now == seen) return true;
  if (PyTuple_Check(seen)) {
    const Py_ssize_t n = PyTuple_GET_SIZE(seen);
    if (PyDict_Check(now)) {
#ifdef Py_GIL_DISABLED
      const auto values = py::reinterpret_steal<py::object>(PyDict_Values(now));
      if (!values) throw py::error_already_set();
      return same(values.ptr(), seen);
#endif
      if (PyDict_GET_SIZE(now) != n) return false;
      PyObject* value = nullptr;
      Py_ssize_t at = 0;
      for (Py_ssize_t i = 0; PyDict_Next(now, &at, nullptr, &value); ++i) {
        if (!same(value, PyTuple_GET_ITEM(seen, i))) return false;
      }
      return true;
    }
    if (!PyTuple_Check(now) && !PyList_Check(now)) return false;
    const py::object items = items_of(now);
    if (PySequence_Fast_GET_SIZE(items.ptr()) != n) return false;
    for (Py_ssize_t i = 0; i < n; ++i) {
      if (!same(PySequence_Fast_GET_ITEM(items.ptr(), i), PyTuple_GET_ITEM(seen, i))) return false;
    }
    return true;
  }
  if (PyDict_Check(seen)) {
    if (!PyDict_Check(now)) return false;
    PyObject *key = nullptr, *expected = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(seen, &at, &key, &expected);) {
      const py::object found = value_of(now, key);
      if (!same(found ? found.ptr() : Py_None, expected)) return false;
    }
    return true;
  }
  if (Py_TYPE(now) != Py_TYPE(seen)) return false;
  if (PyFloat_CheckExact(now)) return PyFloat_AS_DOUBLE(now) == PyFloat_AS_DOUBLE(seen);
  if (!PyLong_CheckExact(now) && !PyUnicode_CheckExact(now)) return false;
  const int equal = PyObject_RichCompareBool(now, seen, Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

}  // namespace spectrain
