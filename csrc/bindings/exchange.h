// Finds a framework's DLPack C exchange API and its current stream.
#pragma once

#include <pybind11/pybind11.h>

#include "dlpack_abi.h"

namespace spectrain {

// Returns null if the type has none. torch's arrays have one.
const dlpack::ExchangeApi* api_of(PyTypeObject* type);

// Returns the handle of `stream`, or of the current stream of the array's framework (torch's if it
// has none).
void* resolve_stream(pybind11::handle stream, pybind11::handle array, int device);

}  // namespace spectrain
