// Python arrays in: what one looks like, where its memory is, and which stream its owner works on.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "dlpack_abi.h"
#include "plan/plan.h"

namespace spectrain {

namespace py = pybind11;

// Which array of which argument an error speaks of: "momentum_buffers[3]", or "momentum_buffers"
// where a single array was given.
struct Place {
  const std::string& argument;
  py::ssize_t index;
  bool single;
  bool writes = false;  // the call writes it
  std::string text() const {
    return single ? argument : argument + "[" + std::to_string(index) + "]";
  }
};

struct Borrowed {
  void* data;
  Device device;
  DType dtype;
  int ndim;
  const int64_t* shape;
  const int64_t* strides;
  int64_t size;

  std::string shape_text() const;
  std::string strides_text() const;
  std::string device_text() const;
};

const char* name_of(DType);

// What arrays lent that must be given back: managed tensors, buffers. Destroy it with the GIL held.
struct Loans {
  // The array whose framework's current stream the plan works on; none: the one that lends.
  py::handle consumer;
  std::vector<std::shared_ptr<void>> held;
};

// Borrows the memory of any array: over DLPack's C exchange API (torch), the buffer protocol (NumPy
// and all else on the CPU), `__dlpack__` (CuPy), or `__cuda_array_interface__`. Valid while the
// array and the loans live. Throws TypeError or ValueError that names the place.
// `anew`: false where that was done before with this array, and only its address is in question.
Borrowed borrow(py::handle array, const Place& place, Loans& loans, bool anew = true);
// Whether borrowing an array takes no loan that keeps its memory where it is.
bool may_move(py::handle array);

// An attribute, or nothing where the object has none; what else goes wrong when asking is thrown.
py::object attribute(py::handle object, const char* name);
// Takes the error that is set for an answer, unless it is none (KeyboardInterrupt, SystemExit).
void dismiss_error();

// The handle of the stream to work on: `stream` if it is one, else the current stream of the
// array's framework; torch's where that has none.
void* resolve_stream(py::handle stream, py::handle array, int device);

}  // namespace spectrain
