// Python arrays in: what one looks like, where its memory is, and which stream its owner works on.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "../plan.h"
#include "dlpack_abi.h"

namespace spectrain {

namespace py = pybind11;

// Which array of which argument an error speaks of: "momentum_buffers[3]", or "momentum_buffers"
// where a single array was given.
struct Place {
  const std::string& argument;
  py::ssize_t index;
  bool single;
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

// Borrows without owning: valid while the array lives and is not resized. Throws TypeError or
// ValueError that names the place.
Borrowed borrow(py::handle array, const Place& place);

// The handle of the stream to work on: `stream` if it is one, else the owner's current stream.
void* resolve_stream(py::handle stream, py::handle array, int device);

}  // namespace spectrain
