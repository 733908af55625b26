// The CUDA half as the rest sees it; stub.cpp stands in for it where there was no CUDA compiler.
#pragma once

#include <string>
#include <vector>

#include "core/program.h"
#include "kernels/kernels.h"
#include "rules/distance.h"

namespace spectrain {

bool cuda_built();
std::vector<std::string> cuda_architectures();
std::string cuda_architectures_why();
std::string cuda_compiler_version();

// Number of usable devices. Zero with `why` filled where there is no driver or no device.
int cuda_device_count(std::string* why);

CudaKernel find_cuda_kernel(KernelKey);

// Enqueues a table on `stream` of a device and returns the number of launches it took. Throws
// std::runtime_error with the CUDA runtime's words.
int launch_cuda(CudaKernel, const TableView&, Settings, int device, void* stream);

// Whether what is enqueued on the stream now becomes part of a CUDA graph.
bool cuda_is_capturing(int device, void* stream);

// Whether one launch_cuda() is one launch.
bool fits_parameters(CudaKernel, const TableView&, int n_settings);

// What a table needs to stay on the device.
size_t resident_bytes(CudaKernel, const TableView&, int n_settings);

// Enqueues one launch over a table that lies in `memory`, of resident_bytes(). `write`: it is put
// there first, from a view of host memory in either case. `program`: computes the settings'
// placeholders on the device; null where there are none. Returns the number of launches.
int launch_cuda_resident(CudaKernel, KernelKey, const TableView&, Settings, const Program* program,
                         void* memory, bool write, int device, void* stream);

// Writes the table of `d` to `table_at` on the device, 16-byte aligned and with room for whole 16
// bytes, and enqueues the sums. Both return the number of launches.
int launch_cuda_distances(DType, Distances d, void* table_at, int device, void* stream);
int total_cuda_distances(double* result, int64_t n, uint32_t n_lists, int device, void* stream);

}  // namespace spectrain
