// Selects devices, splits long tables into launches, and reports CUDA errors.
#include "launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "device.h"
#include "units.h"

namespace spectrain {

namespace {

void check(const char* error, int device) {
  if (error != nullptr) throw cuda_error(error, device);
}

// The bytes of a group's arguments with as many terms as any group of the call has.
size_t stride_of(const CudaLaunch& given) { return given.kernel.stride(given.settings.terms()); }

// The layout of a resident table in one block of device memory: rows, pointers, arguments of every
// group, which may have all terms in a later call.
struct ResidentLayout {
  size_t arguments_at, bytes;

  explicit ResidentLayout(const CudaLaunch& given)
      : arguments_at((bytes_of_rows(given.view) + 15) / 16 * 16),
        bytes((arguments_at + given.settings.size * given.kernel.stride(kMaxTerms) + 15) / 16 *
              16) {}
};

// Writes rows, then pointers, through kernel parameters: the host memory that a copy would read is
// gone when a captured graph is replayed.
int write_table(const TableView& view, void* to, int device, void* stream) {
  const size_t rows_bytes = view.n_rows * sizeof(Row);
  const size_t pointers_bytes = bytes_of_rows(view) - rows_bytes;
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
  CudaKernel found;
#define SPECTRAIN_FIND(unit) \
  if (found.launch == nullptr) found = find_cuda_##unit(key);
  SPECTRAIN_UNITS(SPECTRAIN_FIND)
#undef SPECTRAIN_FIND
  return found;
}

int launch_cuda(const CudaLaunch& given) {
  const TableView& view = given.view;
  const DeviceGuard guard(given.device);
  const size_t stride = stride_of(given);
  const size_t room = kLargeTable - bytes_before_rows(given.settings.size * stride);
  const auto capacity = static_cast<uint32_t>(room * view.n_rows / bytes_of_rows(view));
  int launches = 0;
  for (uint32_t begin = 0; begin < view.n_rows; begin += capacity) {
    const uint32_t end = view.n_rows - begin < capacity ? view.n_rows : begin + capacity;
    TableView window = view;
    window.rows += begin;
    window.pointers += static_cast<size_t>(begin) * view.n_streams;
    window.n_rows = end - begin;
    window.chunk_begin = view.rows[begin].first_chunk;
    window.chunk_end = end == view.n_rows ? view.chunk_end : view.rows[end].first_chunk;
    check(given.kernel.launch(window, given.settings, stride, given.stream), given.device);
    ++launches;
  }
  return launches;
}

void copy_cuda(void* to, const void* from, size_t bytes, int device, void* stream) {
  const DeviceGuard guard(device);
  const cudaError_t error =
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) throw cuda_error(cudaGetErrorString(error), device);
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

bool fits_parameters(const CudaLaunch& given, bool whole) {
  const size_t rows = bytes_of_rows(given.view);
  return bytes_before_rows(given.settings.size * stride_of(given)) +
             (whole ? rows : std::min(rows, kLargeTable / 2)) <=
         kLargeTable;
}

size_t resident_bytes(const CudaLaunch& given) { return ResidentLayout(given).bytes; }

int launch_cuda_resident(const CudaLaunch& given, const Resident& table) {
  const auto& [kernel, key, view, settings, device, stream] = given;
  const DeviceGuard guard(device);
  const size_t stride = stride_of(given);
  auto* at = static_cast<char*>(table.memory);
  int launches = table.write ? write_table(view, at, device, stream) : 0;
  std::vector<char> on_host(settings.size * stride);
  CudaArguments arguments{on_host.data(), nullptr, on_host.size(), stride};
  char* on_device = at + ResidentLayout(given).arguments_at;
  if (table.reads_memory) {
    check(enqueue_prepare({key, settings, on_device, stride}, stream, &launches), device);
    arguments.on_device = on_device;
  } else {
    kernel.make_arguments(settings, stride, on_host.data());
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
