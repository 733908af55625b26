// What is looked at again and again: are tensors still where they were found, and values what they
// were?
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

namespace spectrain {

namespace py = pybind11;

// A tensor's storage can be exchanged (`p.data = ...`, `model.double()`, `set_`) or its bytes moved
// (`resize_`, `share_memory_`) at any time, without a sign. The watch keeps the storages alive that
// were found, so that an exchange frees nothing a plan may still write to, and tells what moved.
//
// It speaks to torch by the C functions that torch exports for extensions (its stable ABI): 4 ns a
// tensor, where borrowing it again takes 47 and data_ptr() 41 (measured with torch 2.13).
//
// Arrays of other frameworks are not watched: their owners promise to leave lent memory in place.
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

  // Of array `index`, whose memory starts at `at`.
  void add(py::handle array, const void* at, size_t index);
  // The index of the first one that moved. Call it with the GIL held, as everything here.
  std::optional<size_t> moved() const;

 private:
  struct Tensor {
    void* impl;     // what the tensor's `_cdata` names
    void* handle;   // the very tensor
    void* storage;  // another one with the storage that it had
    const void* at;
    size_t index;
  };
  void swap(Watch& other) noexcept { tensors_.swap(other.tensors_); }

  std::vector<Tensor> tensors_;
};

// Whether `now` is still what `seen` was noted of it. There a tuple stands for a list, a tuple or
// the values of a dict, a dict for what these keys of a dict lead to (None: to nothing), a number
// or a string for its value and whatever else for itself. No Python code runs.
bool same(PyObject* now, PyObject* seen);

}  // namespace spectrain
