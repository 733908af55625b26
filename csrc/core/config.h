// Hides compiler differences.
#pragma once

#define SPECTRAIN_CONCAT_(a, b) a##b
#define SPECTRAIN_CONCAT(a, b) SPECTRAIN_CONCAT_(a, b)

#if defined(__CUDACC__)
#define SPECTRAIN_HD __host__ __device__ __forceinline__
#define SPECTRAIN_UNROLL _Pragma("unroll")
#define SPECTRAIN_NO_UNROLL _Pragma("unroll 1")
#else
// always_inline is required, not an optimization: these headers are compiled once per CPU
// instruction set. The linker could merge in an out-of-line copy from the AVX-512 unit, which would
// crash an older machine.
#define SPECTRAIN_HD inline __attribute__((always_inline))
#define SPECTRAIN_UNROLL
#define SPECTRAIN_NO_UNROLL
#endif

// A flag that is tested in loops over elements. On the CPU it is a number, because a bool keeps GCC
// from vectorizing SGD's step (three times as long for 65,536 weights). On a GPU it is a bool,
// because a number makes float64's step spill.
namespace spectrain {
#if defined(__CUDACC__)
template <class Acc>
using Flag = bool;
#else
template <class Acc>
using Flag = Acc;
#endif
}  // namespace spectrain

// Elements of a row that a thread block (CUDA) or a loop iteration (CPU) processes at a time: 8 KiB
// of float32 per stream. With 4096, steps take 1 to 3% longer on an H200. Equal on both sides, so
// that host tests can use the CUDA table.
namespace spectrain {
constexpr int kChunk = 2048;

// Marks a pointer to global memory.
template <class T>
SPECTRAIN_HD T* global(T* p) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(p));  // else the compiler emits generic loads and stores
#endif
  return p;
}

}  // namespace spectrain
