// The CPU launcher: one rule driven over a table. Compiled once per instruction set
// (SPECTRAIN_ISA).
#include "../kernels.h"

#include <cstddef>
#include <cstdlib>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../instances.h"

#define SPECTRAIN_CONCAT_(a, b) a##b
#define SPECTRAIN_CONCAT(a, b) SPECTRAIN_CONCAT_(a, b)

namespace spectrain {
namespace {  // one copy of everything per instruction set

// Elements a rule is applied to before its pure outputs are streamed and its extra outputs written:
// small enough that what the first loop stored is still in the L1 cache.
constexpr int kBlock = 1024;

#if defined(__AVX512F__)
constexpr int kStreamBytes = 64;
inline void stream_vector(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_load_si512(from));
}
#elif defined(__AVX2__)
constexpr int kStreamBytes = 32;
inline void stream_vector(char* to, const char* from) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
#elif defined(__x86_64__)
constexpr int kStreamBytes = 16;
inline void stream_vector(char* to, const char* from) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to),
                   _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#endif

#if defined(__x86_64__)
// `from` is a staging buffer that shares the target's offset within a vector, see Staging.
inline void stream_bytes(char* to, const char* from, size_t n) {
  size_t i = 0;
  const size_t misaligned = reinterpret_cast<uintptr_t>(to) % kStreamBytes;
  if (misaligned != 0) {
    const size_t head = kStreamBytes - misaligned < n ? kStreamBytes - misaligned : n;
    memcpy(to, from, head);
    i = head;
  }
  for (; i + kStreamBytes <= n; i += kStreamBytes) stream_vector(to + i, from + i);
  if (i < n) memcpy(to + i, from + i, n - i);
}
inline void stream_fence() { _mm_sfence(); }
constexpr bool kCanStream = true;
#else
inline void stream_bytes(char* to, const char* from, size_t n) { memcpy(to, from, n); }
inline void stream_fence() {}
constexpr bool kCanStream = false;
#endif

// Where a pure output is collected before it is written past the cache. Without streaming, the
// output itself.
class Staging {
 public:
  char* begin(char* target, bool stream) {
    target_ = target;
    staged_ = nullptr;
    if (!stream) return target;
#if defined(__x86_64__)
    staged_ = buffer_ + reinterpret_cast<uintptr_t>(target) % kStreamBytes;
#endif
    return staged_;
  }
  void finish(size_t n_bytes) {
    if (staged_ != nullptr) stream_bytes(target_, staged_, n_bytes);
  }

 private:
  alignas(64) char buffer_[kBlock * sizeof(double) + 64];
  char* target_ = nullptr;
  char* staged_ = nullptr;
};

template <class Rule>
struct Cpu {
  using Acc = typename Rule::Acc;
  using Args = typename Rule::Args;
  static constexpr int n_streams = Rule::Streams::size;
  template <int I>
  using stream = stream_t<Rule, I>;
  template <int I>
  using type = typename stream<I>::type;

  // What one thread needs beside its table.
  struct Scratch {
    Staging staging[n_streams];
    // Of a rule with extra outputs, one block of: the direction that was not stored, and the
    // weights between two terms of a prediction.
    alignas(64) Acc direction[Rule::has_outs ? kBlock : 1];
    alignas(64) Acc weights[Rule::has_outs ? kBlock : 1];
  };

  template <int I>
  static Acc load(char* const (&p)[n_streams], int i) {
    return widen(reinterpret_cast<const type<I>*>(p[I])[i]);
  }

  // One block of one row: p points at its first element in every stream.
  static void block(const Args& args, unsigned flags, char* const (&p)[n_streams], int n,
                    Scratch& scratch) {
    [[maybe_unused]] Acc* const direction = scratch.direction;
#pragma omp simd
    for (int i = 0; i < n; ++i) {
      Acc x[n_streams] = {};
      unroll<n_streams>([&](auto index) {
        constexpr int s = decltype(index)::value;
        if constexpr (stream<s>::source >= 0) {
          reinterpret_cast<type<s>*>(p[s])[i] =
              reinterpret_cast<const type<s>*>(p[stream<s>::source])[i];
        }
        if constexpr (stream<s>::reads) x[s] = load<s>(p, i);
      });
      Rule::apply(args, flags, x);
      unroll<n_streams>([&](auto index) {
        constexpr int s = decltype(index)::value;
        if constexpr (stream<s>::writes && stream<s>::source < 0) {
          reinterpret_cast<type<s>*>(p[s])[i] = Narrow<type<s>>::from(x[s]);
        }
      });
      if constexpr (KeepsDirection<Rule>::value) direction[i] = x[Rule::kDirection];
    }
  }

  // One term of a prediction of a block: from the stored weights or the term before, to the output
  // or the term behind.
  template <bool First, bool Last>
  static void term(const Args& args, int t, char* const (&p)[n_streams], char* target, int n,
                   Scratch& scratch) {
    using T = typename Rule::OutType;
    [[maybe_unused]] const Acc* const direction = scratch.direction;
    [[maybe_unused]] Acc* const weights = scratch.weights;
#pragma omp simd
    for (int i = 0; i < n; ++i) {
      Acc x[n_streams] = {};
      unroll<n_streams>([&](auto index) {
        constexpr int s = decltype(index)::value;
        if constexpr (s != Rule::kDirection) x[s] = load<s>(p, i);
      });
      if constexpr (KeepsDirection<Rule>::value) x[Rule::kDirection] = direction[i];
      const Acc w = Rule::advance(args, t, First ? load<0>(p, i) : weights[i], x);
      if constexpr (Last) {
        reinterpret_cast<T*>(target)[i] = Narrow<T>::from(w);
      } else {
        weights[i] = w;
      }
    }
  }

  static void prediction(const Args& args, int j, char* const (&p)[n_streams], char* target, int n,
                         Scratch& scratch) {
    const int begin = args.predictions.begin(j), last = args.predictions.end[j] - 1;
    if (begin == last) return term<true, true>(args, begin, p, target, n, scratch);
    term<true, false>(args, begin, p, target, n, scratch);
    for (int t = begin + 1; t < last; ++t) term<false, false>(args, t, p, target, n, scratch);
    term<false, true>(args, last, p, target, n, scratch);
  }

  static void range(const Args& args, const TableView& table, uint32_t r, Range range,
                    bool stream_outputs, Scratch& scratch) {
    const unsigned flags = table.rows[r].flags;
    for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
      const int n = static_cast<int>(range.end - begin < kBlock ? range.end - begin : kBlock);
      char* p[n_streams];
      unroll<n_streams>([&](auto index) {
        constexpr int s = decltype(index)::value;
        char* at =
            static_cast<char*>(table.pointer(r, s)) + begin * static_cast<int64_t>(sizeof(type<s>));
        p[s] = stream<s>::reads ? at : scratch.staging[s].begin(at, stream_outputs);
      });
      block(args, flags, p, n, scratch);
      unroll<n_streams>([&](auto index) {
        constexpr int s = decltype(index)::value;
        if constexpr (!stream<s>::reads) scratch.staging[s].finish(n * sizeof(type<s>));
      });
      if constexpr (Rule::has_outs) {
        using T = typename Rule::OutType;
        Staging& staging = scratch.staging[0];
        for (int j = 0; j < args.predictions.n_outs; ++j) {
          char* at = static_cast<char*>(table.pointer(r, n_streams + j)) +
                     begin * static_cast<int64_t>(sizeof(T));
          // In place the lines are in the cache already: nothing is gained by going past it.
          prediction(args, j, p, staging.begin(at, stream_outputs && at != p[0]), n, scratch);
          staging.finish(n * sizeof(T));
        }
      }
    }
  }

  static void chunks(const Args* args, const TableView& table, uint32_t begin, uint32_t end,
                     bool stream_outputs) {
    if (begin >= end) return;
    Scratch scratch;
    uint32_t r = table.find_row(begin);
    for (uint32_t chunk = begin; chunk < end; ++chunk) {
      while (r + 1 < table.n_rows && table.rows[r + 1].first_chunk <= chunk) ++r;
      const Row& row = table.rows[r];
      range(args[row.setting], table, r, table.range(row, chunk), stream_outputs, scratch);
    }
    if (stream_outputs) stream_fence();
  }

  static void run(const TableView& table, Settings settings, const CpuOptions& options) {
    // Not a std::vector: nothing that another unit could be linked to may be left behind.
    auto* args = static_cast<Args*>(malloc(sizeof(Args) * settings.size));
    if (args == nullptr) abort();
    for (int i = 0; i < settings.size; ++i) args[i] = Rule::make(settings.data[i]);
    const bool stream_outputs = options.stream_outputs && kCanStream;
#if defined(_OPENMP)
    if (options.parallel && omp_get_max_threads() > 1) {
#pragma omp parallel
      {
        const uint64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const uint64_t n = table.chunk_end - table.chunk_begin;
        chunks(args, table, table.chunk_begin + static_cast<uint32_t>(n * thread / threads),
               table.chunk_begin + static_cast<uint32_t>(n * (thread + 1) / threads),
               stream_outputs);
      }
      free(args);
      return;
    }
#endif
    chunks(args, table, table.chunk_begin, table.chunk_end, stream_outputs);
    free(args);
  }

  static CpuKernel kernel() { return &run; }
};

}  // namespace

// find_kernel_baseline, find_kernel_v3, find_kernel_v4
CpuKernel SPECTRAIN_CONCAT(find_kernel_, SPECTRAIN_ISA)(KernelKey key) {
  if (const CpuKernel found = find_copy_family<CpuKernel, Cpu>(key)) return found;
  if (const CpuKernel found = find_sgd_family<CpuKernel, Cpu>(key)) return found;
  return find_adam_family<CpuKernel, Cpu>(key);
}

}  // namespace spectrain
