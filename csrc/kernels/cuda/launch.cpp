// Selects devices, splits long tables into launches, and reports CUDA errors.
#include "launch.h"

#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <vector>

#include "device.h"
#include "units.h"

namespace spectrain {

namespace {

constexpr size_t kRowAlignment = 16;  // of the data after the settings

void check(const char* error, int device) {
  if (error != nullptr) throw cuda_error(error, device);
}

size_t bytes_per_row(const TableView& view) { return sizeof(Row) + view.n_streams * sizeof(void*); }
size_t bytes_of_settings(const CudaLaunch& given) {
  return static_cast<size_t>(given.settings.size) * given.kernel.setting_bytes;
}

[[noreturn]] void refuse_groups(const CudaLaunch& given) {
  throw cuda_error(std::to_string(given.settings.size) +
                       " parameter groups do not fit one launch; use fewer groups a call",
                   given.device);
}

// The layout of a resident table in one block of device memory: rows, pointers, arguments of every
// group.
struct ResidentLayout {
  size_t argument_bytes, arguments_at, bytes;

  explicit ResidentLayout(const CudaLaunch& given)
      : argument_bytes(bytes_of_settings(given)),
        arguments_at((given.view.n_rows * bytes_per_row(given.view) + 15) / 16 * 16),
        bytes((arguments_at + argument_bytes + 15) / 16 * 16) {}
};

// Writes rows, then pointers, through kernel parameters: the host memory that a copy would read is
// gone when a captured graph is replayed.
int write_table(const TableView& view, void* to, int device, void* stream) {
  const size_t rows_bytes = view.n_rows * sizeof(Row);
  const size_t pointers_bytes = view.n_rows * bytes_per_row(view) - rows_bytes;
  std::vector<char> bytes(rows_bytes + pointers_bytes);
  memcpy(bytes.data(), view.rows, rows_bytes);
  memcpy(bytes.data() + rows_bytes, view.pointers, pointers_bytes);
  int launches = 0;
  check(enqueue_write(to, bytes.data(), bytes.size(), stream, &launches), device);
  return launches;
}

// The view of a table in device memory.
TableView moved(TableView view, const void* at) {
  const auto* bytes = static_cast<const char*>(at);
  view.rows = reinterpret_cast<const Row*>(bytes);
  view.pointers = reinterpret_cast<void* const*>(bytes + view.n_rows * sizeof(Row));
  return view;
}

}  // namespace

CudaBuild cuda_build() {
  return {true, SPECTRAIN_CUDA_ARCHITECTURES, SPECTRAIN_CUDA_ARCHITECTURES_WHY,
          SPECTRAIN_CUDA_COMPILER_VERSION};
}

int cuda_device_count(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  *why = error == cudaSuccess ? "no CUDA device is visible"
                              : std::string("no usable CUDA driver: ") + cudaGetErrorString(error);
  cudaGetLastError();  // clear the error for later calls
  return 0;
}

CudaKernel find_cuda_kernel(KernelKey key) {
  CudaKernel found = find_cuda_copy(key);
  if (found.launch == nullptr) found = find_cuda_sgd(key);
  if (found.launch == nullptr) found = find_cuda_adam(key);
  return found;
}

int launch_cuda(const CudaLaunch& given) {
  const TableView& view = given.view;
  const DeviceGuard guard(given.device);
  const size_t row_bytes = bytes_per_row(view);
  const size_t settings_bytes = kRowAlignment + bytes_of_settings(given);
  if (settings_bytes + row_bytes > kLargeTable) refuse_groups(given);
  const auto capacity = static_cast<uint32_t>((kLargeTable - settings_bytes) / row_bytes);
  int launches = 0;
  for (uint32_t begin = 0; begin < view.n_rows; begin += capacity) {
    const uint32_t end = view.n_rows - begin < capacity ? view.n_rows : begin + capacity;
    TableView window = view;
    window.rows += begin;
    window.pointers += static_cast<size_t>(begin) * view.n_streams;
    window.n_rows = end - begin;
    window.chunk_begin = view.rows[begin].first_chunk;
    window.chunk_end = end == view.n_rows ? view.chunk_end : view.rows[end].first_chunk;
    check(given.kernel.launch(window, given.settings, given.stream), given.device);
    ++launches;
  }
  return launches;
}

bool cuda_is_capturing(int device, void* stream) {
  const DeviceGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  // The default stream must not be queried during a capture; it cannot be captured itself.
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

bool fits_parameters(const CudaLaunch& given) {
  const TableView& view = given.view;
  return kRowAlignment + bytes_of_settings(given) + view.n_rows * bytes_per_row(view) <=
         kLargeTable;
}

size_t resident_bytes(const CudaLaunch& given) { return ResidentLayout(given).bytes; }

int launch_cuda_resident(const CudaLaunch& given, const Resident& table) {
  const auto& [kernel, key, view, settings, device, stream] = given;
  const DeviceGuard guard(device);
  const ResidentLayout layout(given);
  if (layout.argument_bytes > kSharedBytes) refuse_groups(given);
  auto* at = static_cast<char*>(table.memory);
  int launches = table.write ? write_table(view, at, device, stream) : 0;
  std::vector<char> on_host(layout.argument_bytes);
  CudaArguments arguments{on_host.data(), nullptr, on_host.size()};
  char* on_device = at + layout.arguments_at;
  if (table.reads_rate) {
    check(enqueue_prepare({key, settings, on_device, static_cast<size_t>(kernel.setting_bytes)},
                          stream, &launches),
          device);
    arguments.on_device = on_device;
  } else {
    kernel.make_arguments(settings, on_host.data());
    if (on_host.size() > kSmallTable) {
      check(enqueue_write(on_device, on_host.data(), on_host.size(), stream, &launches), device);
      arguments.on_device = on_device;
    }
  }
  check(kernel.launch_resident(moved(view, at), arguments, stream), device);
  return launches + 1;
}

int launch_cuda_distances(DType type, Distances d, void* table_at, int device, void* stream) {
  const DeviceGuard guard(device);
  const int launches = write_table(d.table, table_at, device, stream);
  d.table = moved(d.table, table_at);
  check(enqueue_distances(type, d, stream), device);
  return launches + 2;
}

int total_cuda_distances(double* result, int64_t n, uint32_t n_lists, int device, void* stream) {
  if (n_lists == 0) return 0;
  const DeviceGuard guard(device);
  check(enqueue_totals(result, n, n_lists, stream), device);
  return 1;
}

}  // namespace spectrain
