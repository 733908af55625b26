// Measures the kernels' choices on this device: elements of a vector, blocks per multiprocessor,
// vectors in flight, grid, cache hints, conversions to 16 bits, bytes of parameters. Prints one
// line of JSON per choice, so that results survive a failure; probe.py reads them.
//
//   nvcc -std=c++17 -arch=sm_90 -fmad=false -Icsrc -o probe bench/gpu/probe.cu && ./probe 26 11
//
// From body.h it uses only Body<Rule, Policy>, LaunchPolicy, VectorOf and (except with
// -DPROBE_OWN_PACKS=0) the definition of Pack.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "kernels/cuda/body.h"
#include "rules/adam.h"
#include "rules/sgd.h"

#ifndef PROBE_OWN_PACKS
#define PROBE_OWN_PACKS 1
#endif

namespace spectrain {

#if PROBE_OWN_PACKS
// An element of a stream that is not reused soon, with hints on loads and stores.
template <class T>
struct Passing {
  T value;
};
template <class T>
struct Arithmetic<Passing<T>> {
  using type = acc_t<T>;
};
template <class T>
SPECTRAIN_HD acc_t<T> widen(Passing<T> x) {
  return widen(x.value);
}
template <class T>
struct Narrow<Passing<T>> {
  SPECTRAIN_HD static Passing<T> from(acc_t<T> x) { return {Narrow<T>::from(x)}; }
};
#if defined(__CUDA_ARCH__)
// The type of an access for loads and stores with hints.
template <int Bytes>
using Hinted = std::conditional_t<Bytes == 16, uint4, uint2>;
#endif

template <class T, int N>
struct alignas(access_bytes<T, N>) Pack<Passing<T>, N> {
  static constexpr int n_accesses = N * sizeof(T) / access_bytes<T, N>;
  Passing<T> element[N];
  SPECTRAIN_HD void load(const Passing<T>* from) {
#if defined(__CUDA_ARCH__)
    using Access = Hinted<access_bytes<T, N>>;
    Access access[n_accesses];
    for (int i = 0; i < n_accesses; ++i) {
      access[i] = __ldcs(reinterpret_cast<const Access*>(from) + i);
    }
    memcpy(element, access, sizeof(element));
#endif
  }
  SPECTRAIN_HD void store(Passing<T>* to) const {
#if defined(__CUDA_ARCH__)
    using Access = Hinted<access_bytes<T, N>>;
    Access access[n_accesses];
    memcpy(access, element, sizeof(element));
    for (int i = 0; i < n_accesses; ++i) __stcs(reinterpret_cast<Access*>(to) + i, access[i]);
#endif
  }
};
template <class T>
struct Pack<Passing<T>, 1> {
  Passing<T> element[1];
  SPECTRAIN_HD void load(const Passing<T>* from) { element[0] = *from; }
  SPECTRAIN_HD void store(Passing<T>* to) const { *to = element[0]; }
};

// bfloat16 with a hardware conversion per element.
struct Converted {
  uint16_t bits;
};
template <>
struct Narrow<Converted> {
  SPECTRAIN_HD static Converted from(float x) {
    Converted result = {};
#if defined(__CUDA_ARCH__)
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#endif
    return result;
  }
};

// bfloat16 that stays float until one instruction converts two elements.
struct Paired {
  uint16_t bits;
};
template <>
struct Narrow<Paired> {
  SPECTRAIN_HD static float from(float x) { return x; }
};
template <int N>
struct Pack<Paired, N> {
  float element[N];
  SPECTRAIN_HD void store(Paired* to) const {
#if defined(__CUDA_ARCH__)
    uint32_t word[N / 2];
    for (int i = 0; i < N / 2; ++i) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
          : "=r"(word[i])
          : "f"(element[2 * i + 1]), "f"(element[2 * i]));
    }
    static_assert(N == 4 || N == 8, "one access");
    using Access = Words<2 * N>;
    Access access;
    memcpy(&access, word, sizeof(access));
    *reinterpret_cast<Access*>(to) = access;
#endif
  }
};
template <>
struct Pack<Paired, 1> {
  float element[1];
  SPECTRAIN_HD void store(Paired* to) const { to->bits = narrow_bfloat16(element[0]).bits; }
};
#endif

// Accepts any arguments with which body.h calls its policy.
template <int Blocks, int InFlight, VectorOf Of>
struct Tuned : LaunchPolicy {
  static constexpr VectorOf vector_of = Of;
  template <class... A>
  SPECTRAIN_HD static constexpr int unroll(A...) {
    return InFlight;
  }
  template <class... A>
  SPECTRAIN_HD static constexpr int blocks_per_multiprocessor(A...) {
    return Blocks;
  }
};

constexpr int kMaxPointers = 16;

template <class Args>
struct Contents {
  Args args;
  Row row;
  void* pointers[kMaxPointers];
  uint32_t n_streams, chunks;
};

template <class Args, size_t Bytes>
struct Parameters : Contents<Args> {
  static_assert(sizeof(Contents<Args>) < Bytes, "they have to fit");
  unsigned char rest[Bytes - sizeof(Contents<Args>)];
};

constexpr size_t kSmall = 3840, kMiddle = 12288, kLarge = 32512;

template <class Rule, class Policy, size_t Bytes, int Blocks>
__global__ void __launch_bounds__(LaunchPolicy::threads, Blocks)
    probe(const __grid_constant__ Parameters<typename Rule::Args, Bytes> p) {
  TableView table{&p.row, p.pointers, 1, p.n_streams, 0, p.chunks};
  Body<Rule, Policy>::run(&p.args, table, {blockIdx.x, threadIdx.x, gridDim.x, blockDim.x});
}

}  // namespace spectrain

using namespace spectrain;

namespace {

int samples = 11;
int multiprocessors = 1;
int64_t elements = 1 << 26;
// Two sets of streams, so that neither is in the L2 cache when used.
std::vector<void*> sets[2];

bool failed(cudaError_t error, const char* name) {
  if (error == cudaSuccess) return false;
  printf("{\"name\": \"%s\", \"error\": \"%s\"}\n", name, cudaGetErrorString(error));
  fflush(stdout);
  return true;
}

// Small positive numbers, as float and as two 16-bit ones; they differ, as real data does.
__global__ void fill(uint32_t* words, int64_t n, uint32_t salt) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += stride) {
    const uint32_t random = static_cast<uint32_t>(i) * 2654435761u + salt;
    words[i] = 0x3c003c00u | ((random >> 8) & 0x007f007fu);
  }
}

struct Summary {
  double median_us, best_us;
};

Summary summary(std::vector<float> milliseconds) {
  std::sort(milliseconds.begin(), milliseconds.end());
  return {1e3 * milliseconds[milliseconds.size() / 2], 1e3 * milliseconds[0]};
}

// Calls launch(set) for each set in turn, timed by two events.
template <class Launch>
bool measure(const char* name, Launch launch, Summary* found) {
  cudaEvent_t start, end;
  if (failed(cudaEventCreate(&start), name) || failed(cudaEventCreate(&end), name)) return false;
  std::vector<float> times;
  for (int i = -2; i < samples; ++i) {
    cudaEventRecord(start);
    launch(i & 1);
    cudaEventRecord(end);
    if (failed(cudaGetLastError(), name) || failed(cudaEventSynchronize(end), name)) return false;
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, start, end);
    if (i >= 0) times.push_back(milliseconds);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  *found = summary(times);
  return true;
}

Setting setting(bool adam, int outs) {
  Setting s;
  s.decay = 0.9;
  s.gain = adam ? 0.1 : 1.0;
  s.decay2 = 0.999;
  s.eps = 1e-8;
  s.step.momentum = 1e-6;  // small, so that numbers stay normal after many runs
  s.n_outs = outs;
  for (int j = 0; j < outs; ++j) {
    s.out_end[j] = j + 1;
    s.terms[j].momentum = 1e-6 * (j + 1);
  }
  if (outs == 0) s.terms[0].momentum = 1e-6;  // a rule with only a prediction
  return s;
}

template <class Rule, int I = 0>
constexpr int stream_bytes() {
  if constexpr (I == Rule::Streams::size) {
    return 0;
  } else {
    using S = stream_t<Rule, I>;
    return (S::reads + S::writes) * static_cast<int>(sizeof(typename S::type)) +
           stream_bytes<Rule, I + 1>();
  }
}

template <class Rule>
int bytes_per_element(int outs) {
  if constexpr (Rule::has_outs) {
    return stream_bytes<Rule>() + outs * static_cast<int>(sizeof(typename Rule::OutType));
  } else {
    return stream_bytes<Rule>();
  }
}

template <class Rule, size_t Bytes>
Parameters<typename Rule::Args, Bytes> parameters(int set, int outs, int64_t n) {
  Parameters<typename Rule::Args, Bytes> p = {};
  Rule::make(setting(Rule::divides, outs), p.args);
  p.row = {n, 0, 0, kAligned, 0};
  p.n_streams = Rule::Streams::size + outs;
  p.chunks = chunks_of(n, 0);
  for (uint32_t i = 0; i < p.n_streams; ++i) p.pointers[i] = sets[set][i];
  return p;
}

// A rule's policy with a persistent grid and with one block per chunk.
template <class Rule, int Blocks, int InFlight, VectorOf Of = LaunchPolicy::vector_of>
void policy(const char* name, const char* variant, int outs) {
  using Policy = Tuned<Blocks, InFlight, Of>;
  const auto kernel = probe<Rule, Policy, kSmall, Blocks>;
  cudaFuncAttributes attributes;
  int resident = 0;
  if (failed(cudaFuncGetAttributes(&attributes, kernel), name)) return;
  if (failed(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, LaunchPolicy::threads,
                                                           0),
             name))
    return;
  const auto first = parameters<Rule, kSmall>(0, outs, elements);
  const auto second = parameters<Rule, kSmall>(1, outs, elements);
  const double bytes = static_cast<double>(elements) * bytes_per_element<Rule>(outs);
  for (const bool persistent : {true, false}) {
    const unsigned grid =
        persistent ? static_cast<unsigned>(resident * multiprocessors) : first.chunks;
    Summary t;
    if (!measure(
            name,
            [&](int set) {
              kernel<<<std::min(grid, first.chunks), LaunchPolicy::threads>>>(set ? second : first);
            },
            &t))
      return;
    printf(
        "{\"name\": \"%s\", \"variant\": \"%s\", \"vector\": %d, \"blocks\": %d, "
        "\"in_flight\": %d, \"grid\": \"%s\", "
        "\"registers\": %d, \"local_bytes\": %zu, \"resident\": %d, \"bytes\": %.0f, "
        "\"median_us\": %.2f, \"best_us\": %.2f, \"gb_per_s\": %.1f}\n",
        name, variant, Body<Rule, Policy>::vector, Blocks, InFlight,
        persistent ? "persistent" : "chunk", attributes.numRegs, attributes.localSizeBytes,
        resident, bytes, t.median_us, t.best_us, bytes / t.median_us / 1e3);
    fflush(stdout);
  }
}

template <class Rule, VectorOf Of = LaunchPolicy::vector_of>
void policies(const char* name, int outs) {
  policy<Rule, 4, 1, Of>(name, "plain", outs);
  policy<Rule, 4, 2, Of>(name, "plain", outs);
  policy<Rule, 3, 1, Of>(name, "plain", outs);
  policy<Rule, 3, 2, Of>(name, "plain", outs);
  policy<Rule, 2, 1, Of>(name, "plain", outs);
  policy<Rule, 2, 2, Of>(name, "plain", outs);
  policy<Rule, 5, 1, Of>(name, "plain", outs);
  policy<Rule, 5, 2, Of>(name, "plain", outs);
  policy<Rule, 6, 1, Of>(name, "plain", outs);
  policy<Rule, 6, 2, Of>(name, "plain", outs);
}

// Rules with mixed widths, by the widest stream and by the narrowest.
template <class Rule>
void mixed_policies(const char* name, int outs) {
  static_assert(mixed<Rule>, "else both are the same");
  policies<Rule, VectorOf::widest>(name, outs);
  policies<Rule, VectorOf::narrowest>(name, outs);
}

// The same with another access, where registers allow two or four blocks.
template <class Rule>
void variants(const char* name, const char* variant, int outs) {
  policy<Rule, 2, 1>(name, variant, outs);
  policy<Rule, 4, 1>(name, variant, outs);
}

// Consecutive launches of one block: the cost of parameters on the device and on the CPU.
template <size_t Bytes>
void launches(const char* name) {
  using Rule = SgdPredict<float, float, float>;
  const auto kernel = probe<Rule, LaunchPolicy, Bytes, 4>;
  const auto p = parameters<Rule, Bytes>(0, 0, kChunk);
  constexpr int kLaunches = 200;
  Summary t;
  if (!measure(
          name,
          [&](int) {
            for (int i = 0; i < kLaunches; ++i) kernel<<<1, LaunchPolicy::threads>>>(p);
          },
          &t))
    return;
  printf(
      "{\"name\": \"%s\", \"variant\": \"launch\", \"parameter_bytes\": %zu, \"median_us\": %.3f, "
      "\"best_us\": %.3f}\n",
      name, sizeof(p), t.median_us / kLaunches, t.best_us / kLaunches);
  fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int exponent = argc > 1 ? atoi(argv[1]) : 26;
  if (argc > 2) samples = std::max(1, atoi(argv[2]));
  elements = static_cast<int64_t>(1) << exponent;
  cudaDeviceProp device;
  if (failed(cudaGetDeviceProperties(&device, 0), "device")) return 1;
  multiprocessors = device.multiProcessorCount;
  printf(
      "{\"name\": \"device\", \"device\": \"%s\", \"multiprocessors\": %d, \"l2_bytes\": %d, "
      "\"elements\": %lld, \"samples\": %d}\n",
      device.name, multiprocessors, device.l2CacheSize, static_cast<long long>(elements), samples);
  for (auto& set : sets) {
    for (uint32_t i = 0; i < 6; ++i) {
      void* memory = nullptr;
      if (failed(cudaMalloc(&memory, elements * sizeof(float)), "memory")) return 1;
      fill<<<4 * multiprocessors, 256>>>(static_cast<uint32_t*>(memory), elements, i);
      set.push_back(memory);
    }
  }
  if (failed(cudaDeviceSynchronize(), "memory")) return 1;

  Summary t;
  const size_t bytes = elements * sizeof(float);
  if (measure(
          "cudaMemcpyAsync",
          [&](int set) {
            cudaMemcpyAsync(sets[set][0], sets[set][1], bytes, cudaMemcpyDeviceToDevice);
          },
          &t)) {
    printf(
        "{\"name\": \"cudaMemcpyAsync\", \"bytes\": %zu, \"median_us\": %.2f, \"best_us\": %.2f, "
        "\"gb_per_s\": %.1f}\n",
        2 * bytes, t.median_us, t.best_us, 2e-3 * bytes / t.median_us);
  }
  using F = float;
  using B = BFloat16;
  policies<SgdMomentum<F, F, F, F>>("SGD step + 2 predictions, fp32", 2);
  policies<AdamStep<F, F, F, F>>("AdamW step + 2 predictions, fp32", 2);
  mixed_policies<AdamStep<F, B, F, B>>("AdamW step + 1 prediction, mixed", 1);
  mixed_policies<SgdMomentum<F, B, F, B>>("SGD step + 1 prediction, mixed", 1);
  mixed_policies<AdamStep<B, B, F, B>>("AdamW step + 1 prediction, bf16 with fp32 state", 1);
  mixed_policies<SgdPredict<F, F, B>>("predict, fp32 to bf16", 0);
  policies<SgdPredict<F, F, F>>("predict, fp32", 0);
#if PROBE_OWN_PACKS
  using PF = Passing<F>;
  using PB = Passing<B>;
  variants<SgdMomentum<F, PF, PF, F>>("SGD step + 2 predictions, fp32", "g and v streamed", 2);
  variants<AdamStep<F, PF, PF, F>>("AdamW step + 2 predictions, fp32", "g and v streamed", 2);
  variants<AdamStep<F, PB, PF, B>>("AdamW step + 1 prediction, mixed", "g and v streamed", 1);
  variants<SgdMomentum<F, PB, PF, B>>("SGD step + 1 prediction, mixed", "g and v streamed", 1);
  variants<AdamStep<F, B, F, Converted>>("AdamW step + 1 prediction, mixed", "cvt.rn.bf16", 1);
  variants<SgdMomentum<F, B, F, Converted>>("SGD step + 1 prediction, mixed", "cvt.rn.bf16", 1);
  variants<AdamStep<F, B, F, Paired>>("AdamW step + 1 prediction, mixed", "cvt.rn.bf16x2", 1);
  variants<SgdMomentum<F, B, F, Paired>>("SGD step + 1 prediction, mixed", "cvt.rn.bf16x2", 1);
#endif
  launches<kSmall>("a launch of one block, 4 KB of parameters");
  launches<kMiddle>("a launch of one block, 12 KB of parameters");
  launches<kLarge>("a launch of one block, 32 KB of parameters");
  return 0;
}
