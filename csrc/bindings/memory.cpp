#include "memory.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

namespace spectrain {
namespace {

namespace py = pybind11;
using namespace py::literals;

// A tensor of bytes. torch's allocator allocates it for the current stream, that of the first use;
// used_on() reports all other streams, so that the allocator can reuse the memory safely.
class TensorMemory : public DeviceMemory {
 public:
  TensorMemory(size_t bytes, int device, void* stream) : device_(device) {
    const py::gil_scoped_acquire gil;
    const py::module_ torch = py::module_::import("torch");
    const py::object current = torch.attr("cuda").attr("stream")(as_torch(stream));
    current.attr("__enter__")();
    try {
      tensor_ = torch.attr("empty")(bytes, "dtype"_a = torch.attr("uint8"),
                                    "device"_a = torch.attr("device")("cuda", device));
    } catch (...) {
      leave(current);
      throw;
    }
    leave(current);
    at_ = reinterpret_cast<void*>(tensor_.attr("data_ptr")().cast<uintptr_t>());
    known_.push_back(stream);
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
    tensor_.attr("record_stream")(as_torch(stream));
    known_.push_back(stream);
  }

 private:
  py::object as_torch(void* stream) const {
    const py::object cuda = py::module_::import("torch").attr("cuda");
    const auto handle = reinterpret_cast<uintptr_t>(stream);
    // torch's allocator identifies the default stream by its own object.
    if (handle == 0) return cuda.attr("default_stream")(device_);
    return cuda.attr("ExternalStream")(handle, "device"_a = device_);
  }
  static void leave(const py::object& current) {
    current.attr("__exit__")(py::none(), py::none(), py::none());
  }

  int device_;
  py::object tensor_;
  void* at_;
  std::vector<void*> known_;
};

}  // namespace

std::function<std::unique_ptr<DeviceMemory>(size_t, void*)> allocator(int device) {
  return [device](size_t bytes, void* stream) {
    return std::make_unique<TensorMemory>(bytes, device, stream);
  };
}

}  // namespace spectrain
