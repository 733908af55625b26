// Checks quickly whether tensors have moved and whether values have changed.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace spectrain {

namespace py = pybind11;

// A tensor's storage can be replaced (`p.data = ...`, `model.double()`, `set_`) or its bytes moved
// (`resize_`, `share_memory_`) at any time without notice. The watch keeps the original storages
// alive, because a plan may still write to them, and reports tensors that moved.
//
// It uses torch's stable C ABI for extensions: 4 ns per tensor, where borrowing again takes 47 and
// data_ptr() 41 (measured with torch 2.13).
//
// Arrays of other frameworks are not watched: their owners guarantee that lent memory stays.
class Watch {
 public:
  Watch() = default;
  explicit Watch(const py::tuple& tensors);
  ~Watch();
  Watch(Watch&& other) noexcept { swap(other); }
  Watch& operator=(Watch&& other) noexcept {
    swap(other);
    return *this;
  }

  // Adds array `index`, whose memory starts at `at`; returns whether it is watched.
  bool add(py::handle array, const void* at, size_t index);
  // Returns the index of the first moved array. All methods need the GIL.
  std::optional<size_t> moved() const;
  // Remembers dtypes, sizes and strides of the arrays added so far.
  void remember_layouts();
  // Whether these arrays are where they were, with the layouts that were remembered.
  bool unchanged() const;

 private:
  struct Tensor {
    void* impl;     // the tensor's implementation
    void* handle;   // the tensor itself
    void* storage;  // a tensor with the original storage
    const void* at;
    size_t index;
  };
  void swap(Watch& other) noexcept {
    tensors_.swap(other.tensors_);
    layouts_.swap(other.layouts_);
  }

  std::vector<Tensor> tensors_;
  std::vector<int64_t> layouts_;  // one after another: dtype, dimensions, sizes, strides
};

// Whether `now` still matches the snapshot `seen`. In a snapshot a tuple stands for a list, a tuple
// or the values of a dict; a dict for some keys of a dict (None: missing); numbers and strings are
// compared by value, other objects by identity. Runs no Python code.
bool same(PyObject* now, PyObject* seen);

}  // namespace spectrain
