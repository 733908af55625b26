// Memory that a Python array has lent: where it lies, what must be given back, and what an error
// calls it.
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

// What arrays lent that must be given back: managed tensors, buffers. Destroy it with the GIL held.
struct Loans {
  // The array whose framework's current stream the plan works on; none: the one that lends.
  py::handle consumer;
  std::vector<std::shared_ptr<void>> held;
};

// Memory that DLPack describes: checked for what every array must have.
Borrowed described(const dlpack::Tensor&, const Place&, Loans&);

// An attribute, or nothing where the object has none; what else goes wrong when asking is thrown.
py::object attribute(py::handle object, const char* name);
// Takes the error that is set for an answer, unless it is none (KeyboardInterrupt, SystemExit).
void dismiss_error();

std::string type_name(py::handle object);
// The first line of what an error says: the others may carry a C++ stack trace.
std::string first_line(const py::error_already_set&);

}  // namespace spectrain
