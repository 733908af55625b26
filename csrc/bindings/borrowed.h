// Describes borrowed memory of a Python array: its address, its loans, and its name in errors.
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

// Borrowed objects to release: managed tensors and buffers. Destroy it with the GIL held.
struct Loans {
  // The array whose framework's current stream is used; none: the borrowed array.
  py::handle consumer;
  std::vector<std::shared_ptr<void>> held;
};

// Checks a DLPack tensor and returns its memory.
Borrowed described(const dlpack::Tensor&, const Place&, Loans&);

// Returns an attribute, or nothing if there is none; throws other errors.
py::object attribute(py::handle object, const char* name);
// Clears the current Python error; rethrows KeyboardInterrupt and SystemExit.
void dismiss_error();

std::string type_name(py::handle object);
// Returns an error's first line; further lines may be a C++ stack trace.
std::string first_line(const py::error_already_set&);

}  // namespace spectrain
