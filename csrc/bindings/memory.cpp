#include "memory.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

namespace spectrain {
namespace {

namespace py = pybind11;
using namespace py::literals;

// A tensor of bytes. Torch's allocator knows the stream it was made on, and is told of all others:
// so it can take the memory back at any time.
class TensorMemory : public DeviceMemory {
 public:
  TensorMemory(size_t bytes, int device) : device_(device) {
    const py::gil_scoped_acquire gil;
    const py::module_ torch = py::module_::import("torch");
    tensor_ = torch.attr("empty")(bytes, "dtype"_a = torch.attr("uint8"),
                                  "device"_a = torch.attr("device")("cuda", device));
    at_ = reinterpret_cast<void*>(tensor_.attr("data_ptr")().cast<uintptr_t>());
    const py::object cuda = torch.attr("cuda");
    known_.push_back(handle_of(cuda.attr("current_stream")(device)));
  }
  ~TensorMemory() override {
    const py::gil_scoped_acquire gil;
    tensor_ = py::object();
  }
  TensorMemory(const TensorMemory&) = delete;
  TensorMemory& operator=(const TensorMemory&) = delete;

  void* at() const override { return at_; }

  void used_on(void* stream) override {
    const auto handle = reinterpret_cast<uintptr_t>(stream);
    if (std::find(known_.begin(), known_.end(), handle) != known_.end()) return;
    const py::gil_scoped_acquire gil;
    const py::object cuda = py::module_::import("torch").attr("cuda");
    tensor_.attr("record_stream")(cuda.attr("ExternalStream")(handle, "device"_a = device_));
    known_.push_back(handle);
  }

 private:
  static uintptr_t handle_of(const py::object& stream) {
    return stream.attr("cuda_stream").cast<uintptr_t>();
  }

  int device_;
  py::object tensor_;
  void* at_;
  std::vector<uintptr_t> known_;
};

}  // namespace

std::function<std::unique_ptr<DeviceMemory>(size_t)> allocator(int device) {
  return [device](size_t bytes) { return std::make_unique<TensorMemory>(bytes, device); };
}

}  // namespace spectrain
