// Devices, windows of a long table, and errors of the CUDA half.
#include "launch.h"

#include <cuda_runtime.h>

#include <cstring>
#include <sstream>
#include <stdexcept>

#include "capacity.h"
#include "device.h"
#include "resident.h"

namespace spectrain {

CudaKernel find_cuda_copy_family(KernelKey);
CudaKernel find_cuda_sgd_family(KernelKey);
CudaKernel find_cuda_adam_family(KernelKey);
const char* enqueue_distances(DType, const Distances&, void* stream);
const char* enqueue_totals(double* result, int64_t n, uint32_t n_lists, void* stream);

namespace {

const char* const kTooManyGroups =
    "the parameter groups do not fit one launch; use fewer groups a call";

void check(const char* error, int device) {
  if (error != nullptr) throw cuda_error(error, device);
}

size_t bytes_per_row(const TableView& view) { return sizeof(Row) + view.n_streams * sizeof(void*); }
// Rows behind them are aligned.
size_t bytes_of_settings(CudaKernel kernel, int n) {
  return static_cast<size_t>(n) * kernel.setting_bytes + 16;
}

// Rows, then pointers. In the parameters of kernels: what a copy would read is gone when a captured
// graph replays it.
int write_table(const TableView& view, void* to, int device, void* stream) {
  const size_t rows_bytes = view.n_rows * sizeof(Row);
  const size_t pointers_bytes = static_cast<size_t>(view.n_rows) * view.n_streams * sizeof(void*);
  std::vector<char> bytes(rows_bytes + pointers_bytes);
  memcpy(bytes.data(), view.rows, rows_bytes);
  memcpy(bytes.data() + rows_bytes, view.pointers, pointers_bytes);
  int launches = 0;
  check(enqueue_write(to, bytes.data(), bytes.size(), stream, &launches), device);
  return launches;
}

// The view of a table that was written there.
TableView moved(TableView view, const void* at) {
  const auto* bytes = static_cast<const char*>(at);
  view.rows = reinterpret_cast<const Row*>(bytes);
  view.pointers = reinterpret_cast<void* const*>(bytes + view.n_rows * sizeof(Row));
  return view;
}

}  // namespace

bool cuda_built() { return true; }

std::vector<std::string> cuda_architectures() {
  std::vector<std::string> list;
  std::istringstream words(SPECTRAIN_CUDA_ARCHITECTURES);
  for (std::string word; words >> word;) list.push_back(word);
  return list;
}

std::string cuda_architectures_why() { return SPECTRAIN_CUDA_ARCHITECTURES_WHY; }

std::string cuda_compiler_version() { return SPECTRAIN_CUDA_COMPILER_VERSION; }

int cuda_device_count(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  *why = error == cudaSuccess ? "no CUDA device is visible"
                              : std::string("no usable CUDA driver: ") + cudaGetErrorString(error);
  cudaGetLastError();  // the question was answered; later calls start clean
  return 0;
}

CudaKernel find_cuda_kernel(KernelKey key) {
  CudaKernel found = find_cuda_copy_family(key);
  if (found.launch == nullptr) found = find_cuda_sgd_family(key);
  if (found.launch == nullptr) found = find_cuda_adam_family(key);
  return found;
}

int launch_cuda(CudaKernel kernel, const TableView& view, Settings settings, int device,
                void* stream) {
  const DeviceGuard guard(device);
  const size_t row_bytes = bytes_per_row(view);
  const size_t settings_bytes = bytes_of_settings(kernel, settings.size);
  if (settings_bytes + row_bytes > kLargeTable) {
    throw std::runtime_error("CUDA: " + std::to_string(settings.size) +
                             " parameter groups do not fit one launch; use fewer groups a call");
  }
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
    check(kernel.launch(window, settings, device, stream), device);
    ++launches;
  }
  return launches;
}

bool cuda_is_capturing(int device, void* stream) {
  const DeviceGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  // The default stream may not be asked while another one is captured: it is not captured itself.
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

bool fits_parameters(CudaKernel kernel, const TableView& view, int n_settings) {
  return bytes_of_settings(kernel, n_settings) + view.n_rows * bytes_per_row(view) <= kLargeTable;
}

size_t resident_bytes(CudaKernel kernel, const TableView& view, int n_settings) {
  return ResidentLayout(view, n_settings, kernel.setting_bytes).bytes;
}

int launch_cuda_resident(CudaKernel kernel, KernelKey key, const TableView& view, Settings settings,
                         const Program* program, void* memory, bool write, int device,
                         void* stream) {
  constexpr size_t kSharedBytes = 48 * 1024;
  const DeviceGuard guard(device);
  const ResidentLayout layout(view, settings.size, kernel.setting_bytes);
  const size_t argument_bytes = static_cast<size_t>(settings.size) * kernel.setting_bytes;
  if (argument_bytes > kSharedBytes) check(kTooManyGroups, device);
  auto* at = static_cast<char*>(memory);
  int launches = 0;
  if (write) {
    launches += write_table(view, at, device, stream);
  }
  void* arguments = nullptr;
  if (program != nullptr || argument_bytes > kSmallTable) {
    arguments = at + layout.arguments_at;
    const PrepareRequest request{
        key.operation, key.w,
        settings,      program != nullptr ? program->view() : ProgramView{},
        arguments,     static_cast<size_t>(kernel.setting_bytes)};
    check(enqueue_prepare(request, stream, &launches), device);
  }
  check(kernel.launch_resident(moved(view, at), settings, arguments, device, stream), device);
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
