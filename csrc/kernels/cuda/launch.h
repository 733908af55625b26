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

// What is to be done, and where.
struct CudaLaunch {
  CudaKernel kernel;
  KernelKey key;
  TableView view;  // of host memory
  Settings settings;
  int device;
  void* stream;
};

// Enqueues it and returns the number of launches it took. Throws std::runtime_error with the CUDA
// runtime's words.
int launch_cuda(const CudaLaunch&);

// Whether what is enqueued on the stream now becomes part of a CUDA graph.
bool cuda_is_capturing(int device, void* stream);

// Whether one launch_cuda() is one launch.
bool fits_parameters(const CudaLaunch&);

// What a table needs to stay on the device.
size_t resident_bytes(const CudaLaunch&);

// A table on the device.
struct Resident {
  void* memory;            // of resident_bytes()
  bool write;              // it is put there first
  const Program* program;  // computes the settings' placeholders there; null: there are none
};

// Enqueues one launch over a table that stays, and returns the number of launches.
int launch_cuda_resident(const CudaLaunch&, const Resident&);

// Writes the table of `d` to `table_at` on the device, 16-byte aligned and with room for whole 16
// bytes, and enqueues the sums. Both return the number of launches.
int launch_cuda_distances(DType, Distances d, void* table_at, int device, void* stream);
int total_cuda_distances(double* result, int64_t n, uint32_t n_lists, int device, void* stream);

}  // namespace spectrain
