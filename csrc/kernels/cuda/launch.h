// The interface of the CUDA code; stub.cpp replaces it in builds without a CUDA compiler.
#pragma once

#include <string>

#include "kernels/kernels.h"
#include "rules/distance.h"

namespace spectrain {

struct CudaBuild {
  bool built;
  const char *architectures, *why, *compiler;  // what it is for, separated by spaces
};
CudaBuild cuda_build();

// Returns the number of usable devices. If 0, `why` has the reason.
int cuda_device_count(std::string* why);

CudaKernel find_cuda_kernel(KernelKey);

// A request to launch a kernel.
struct CudaLaunch {
  CudaKernel kernel;
  KernelKey key;
  TableView view;  // of host memory
  Settings settings;
  int device;
  void* stream;
};

// Launches it and returns the number of launches. Throws std::runtime_error with the CUDA runtime's
// message.
int launch_cuda(const CudaLaunch&);

// Copies memory of one device, or between two, on a stream of `device`, which one of them is.
// Throws std::runtime_error with the CUDA runtime's message.
void copy_cuda(void* to, const void* from, size_t bytes, int device, void* stream);

// Whether the stream is being captured in a CUDA graph.
bool cuda_is_capturing(int device, void* stream);

// Whether launch_cuda() takes one launch or, if not `whole`, launches that are at least half rows.
// It must not be called where this is false.
bool fits_parameters(const CudaLaunch&, bool whole);

// Returns the memory that a resident table needs.
size_t resident_bytes(const CudaLaunch&);

// A table in device memory.
struct Resident {
  void* memory;       // of resident_bytes()
  bool write;         // write the table there first
  bool reads_memory;  // a setting depends on a number in device memory
};

// Launches on a resident table and returns the number of launches.
int launch_cuda_resident(const CudaLaunch&, const Resident&);

// Writes the table of `d` to `table_at` on the device (16-byte aligned, padded to 16 bytes) and
// launches the sums. Both return the number of launches.
int launch_cuda_distances(DType, Distances d, void* table_at, int device, void* stream);
int total_cuda_distances(double* result, int64_t n, uint32_t n_lists, int device, void* stream);

}  // namespace spectrain
