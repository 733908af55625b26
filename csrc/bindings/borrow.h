// Borrows the memory of Python arrays: its address, its loans, and its name in errors.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "dlpack_abi.h"
#include "plan/plan.h"

namespace spectrain {

namespace py = pybind11;

// Names an array in error messages: "momentum_buffers[3]", or "momentum_buffers" for a single
// array.
struct Place {
  const std::string& argument;
  size_t index;
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

  const char* begin() const { return static_cast<const char*>(data); }
  const char* end() const { return begin() + size * size_of(dtype); }
  std::string shape_text() const;
  std::string strides_text() const;
};

const char* name_of(DType);

// Managed tensors to release. Destroy it with the GIL held.
struct Loans {
  // The array whose framework's current stream is used; none: the borrowed array.
  py::handle consumer;
  std::vector<std::shared_ptr<void>> held;
};

// Borrows an array's memory by DLPack: its C exchange API (torch) or `__dlpack__` (NumPy, CuPy).
// Valid while the array and the loans live. Throws TypeError or ValueError that names the place.
// `anew`: false if the same array was borrowed before and only its address may have changed.
Borrowed borrow(py::handle array, const Place& place, Loans& loans, bool anew = true);
// Whether a borrowed array can move, because no loan pins its memory.
bool may_move(py::handle array);

// Returns the handle of `stream`, or of the current stream of the array's framework (torch's if it
// has none).
void* resolve_stream(py::handle stream, py::handle array, int device);

// Returns an attribute, or nothing if there is none; throws other errors.
py::object attribute(py::handle object, const char* name);
// Clears the current Python error; rethrows KeyboardInterrupt and SystemExit.
void dismiss_error();

std::string type_name(py::handle object);

}  // namespace spectrain
