// What a framework tells of itself: DLPack's C exchange API, and the stream that it works on.
#pragma once

#include <pybind11/pybind11.h>

#include "dlpack_abi.h"

namespace spectrain {

// Null where arrays of a type have none; torch's have.
const dlpack::ExchangeApi* api_of(PyTypeObject* type);

// The handle of the stream to work on: `stream` if it is one, else the current stream of the
// array's framework; torch's where that has none.
void* resolve_stream(pybind11::handle stream, pybind11::handle array, int device);

}  // namespace spectrain
