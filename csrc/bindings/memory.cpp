#include "memory.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

namespace spectrain {
namespace {

namespace py = pybind11;

py::object calls() { return py::module_::import("spectrain_ext.operators.calls"); }

// A tensor of bytes. torch's allocator allocates it for the current stream, that of the first use;
// used_on() reports all other streams, so that the allocator can reuse the memory safely.
class TensorMemory : public DeviceMemory {
 public:
  TensorMemory(size_t bytes, int device, void* stream) : device_(device), known_{stream} {
    const py::gil_scoped_acquire gil;
    tensor_ = calls().attr("bytes_for")(bytes, device, reinterpret_cast<uintptr_t>(stream));
    at_ = reinterpret_cast<void*>(tensor_.attr("data_ptr")().cast<uintptr_t>());
  }
  ~TensorMemory() override {
    const py::gil_scoped_acquire gil;
    tensor_ = py::object();
  }
  TensorMemory(const TensorMemory&) = delete;
  TensorMemory& operator=(const TensorMemory&) = delete;

  void* at() const override { return at_; }

  void used_on(void* stream) override {
    if (std::find(known_.begin(), known_.end(), stream) != known_.end()) return;
    const py::gil_scoped_acquire gil;
    const auto handle = reinterpret_cast<uintptr_t>(stream);
    tensor_.attr("record_stream")(calls().attr("torch_stream")(handle, device_));
    known_.push_back(stream);
  }

 private:
  int device_;
  std::vector<void*> known_;
  py::object tensor_;
  void* at_;
};

}  // namespace

std::function<std::unique_ptr<DeviceMemory>(size_t, void*)> allocator(int device) {
  return [device](size_t bytes, void* stream) {
    return std::make_unique<TensorMemory>(bytes, device, stream);
  };
}

}  // namespace spectrain
