// The CPU launcher: runs a rule over a table. Compiled once per instruction set (SPECTRAIN_ISA).
#include "kernels/kernels.h"

#include <cstddef>
#include <cstdlib>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "kernels/instances.h"
#include "rules/distance.h"
#include "rules/rounding.h"

namespace spectrain {
namespace {  // one copy of everything per instruction set

// Block of elements after which pure outputs are streamed and extra outputs written, small enough
// for the L1 cache. With 1024 elements, or with scratch arrays that all start at the same offset in
// a page, the arrays of a step evict one another: a momentum step with bfloat16 gradients and a
// bfloat16 prediction took 1.3 times as long (2^24 elements, Zen 3).
constexpr int kBlock = 256;
constexpr int kSkew = 80;  // elements between one scratch array and the next one

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

// Staging buffer for a pure output that is written with non-temporal stores. Without streaming, the
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

// Converts a block of 16-bit elements to and from their arithmetic type. Compilers vectorize
// integers but not structs, and not one loop with both conversions and a rule.
template <class T>
void widen_block(float* to, const char* from, int n) {
  int begin = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Half>) {
    for (; begin + 8 <= n; begin += 8) {
      const auto* at = reinterpret_cast<const __m128i*>(from + 2 * begin);
      _mm256_storeu_ps(to + begin, _mm256_cvtph_ps(_mm_loadu_si128(at)));
    }
  }
#endif
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
#pragma omp simd
  for (int i = begin; i < n; ++i) to[i] = widen(T{bits[i]});
}
// `Again`: what was stored is read back.
template <class T, bool Again>
void narrow_block(char* to, float* from, int n) {
  int begin = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Half>) {
    for (; begin + 8 <= n; begin += 8) {
      const __m128i bits =
          _mm256_cvtps_ph(_mm256_loadu_ps(from + begin), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * begin), bits);
      if constexpr (Again) _mm256_storeu_ps(from + begin, _mm256_cvtph_ps(bits));
    }
  }
#endif
  auto* bits = reinterpret_cast<uint16_t*>(to);
#pragma omp simd
  for (int i = begin; i < n; ++i) {
    const T rounded = Narrow<T>::from(from[i]);
    bits[i] = rounded.bits;
    if constexpr (Again) from[i] = widen(rounded);
  }
}

// Rounds a block up or down. `position`: of its first element.
template <bool Again>
void round_block(char* to, float* from, int n, const Rounding& by, uint64_t position) {
  constexpr int kShared = Rounding::kShared;
  alignas(64) uint64_t numbers[kBlock / kShared + 1];
  const int head = static_cast<int>(position % kShared);
  const int n_numbers = (head + n + kShared - 1) / kShared;
  const uint64_t first = position / kShared;
#pragma omp simd
  for (int i = 0; i < n_numbers; ++i) {
    numbers[i] = Rounding::mix(by.start + (first + static_cast<uint64_t>(i)) * Rounding::kStep);
  }
  // The bits of an element are those at its place in memory, as x86 and ARM are little-endian.
  uint16_t random[kBlock + kShared];
  memcpy(random, numbers, static_cast<size_t>(n_numbers) * sizeof(uint64_t));
  auto* bits = reinterpret_cast<uint16_t*>(to);
#pragma omp simd
  for (int i = 0; i < n; ++i) {
    const BFloat16 rounded = round_stochastically(from[i], random[head + i]);
    bits[i] = rounded.bits;
    if constexpr (Again) from[i] = widen(rounded);
  }
}

template <class Rule>
struct Cpu {
  using Acc = typename Rule::Acc;
  using Args = typename Rule::Args;
  static constexpr int n_streams = Rule::Streams::size;
  template <int I>
  using stream = stream_t<Rule, I>;
  template <int I>
  using type = typename stream<I>::type;
  // Whether a stream is processed in place, or in a widened copy of the block.
  template <class T>
  static constexpr bool in_place = std::is_same_v<T, Acc>;

  // Whether stored values differ from computed ones.
  template <int I>
  static constexpr bool rounded = stream<I>::writes && !in_place<type<I>>;

  // Scratch memory of one thread for one block. A stream that is processed in place uses its wide
  // copy for the inputs of predictions.
  struct Scratch {
    Staging staging[n_streams];
    alignas(64) Acc wide[n_streams][kBlock + kSkew];
    alignas(64) Acc prediction[Rule::has_outs ? kBlock + kSkew : 1];
  };

  // One block of one row: p points to its first element in every stream, q to the same as Acc.
  // `position`: that element's in the call, if a stream is rounded stochastically.
  static void block(const Args& given, unsigned flags, factor_t<Acc> factor,
                    [[maybe_unused]] const StepOptions& options, [[maybe_unused]] uint64_t position,
                    char* const (&p)[n_streams], Acc* const (&q)[n_streams], int n,
                    Scratch& scratch) {
    unroll<n_streams>([&](auto s) {
      if constexpr (stream<s>::source >= 0) memcpy(p[s], p[stream<s>::source], n * sizeof(type<s>));
      if constexpr (stream<s>::reads && !in_place<type<s>>) widen_block<type<s>>(q[s], p[s], n);
    });
    // Copies, so that the compiler knows that stores in the loop do not change them.
    const auto step = Rule::step(given, flags, factor);
    Acc* at[n_streams];
    for (int s = 0; s < n_streams; ++s) at[s] = q[s];
    Acc* kept[n_streams];
    for (int s = 0; s < n_streams; ++s) kept[s] = scratch.wide[s];
#pragma omp simd
    for (int i = 0; i < n; ++i) {
      Acc x[n_streams] = {};
      unroll<n_streams>([&](auto s) {
        if constexpr (stream<s>::reads) x[s] = at[s][i];
      });
      Rule::apply(step, x);
      unroll<n_streams>([&](auto s) {
        if constexpr (stream<s>::writes && stream<s>::source < 0) at[s][i] = x[s];
      });
      if constexpr (Rule::has_outs) Rule::known(x);
      unroll<n_streams>([&](auto s) {
        if constexpr (keeps<Rule, s> && !rounded<s>) kept[s][i] = x[s];
      });
    }
    unroll<n_streams>([&](auto s) {
      if constexpr (stream<s>::writes && stream<s>::source < 0 && !in_place<type<s>>) {
        bool done = false;
        if constexpr (rounds<Rule, s>) {
          const Rounding& by = rounding_of<Rule, s>(given, options);
          done = by.stochastic;
          if (done) round_block<Rule::has_outs>(p[s], q[s], n, by, position);
        }
        if (!done) narrow_block<type<s>, Rule::has_outs>(p[s], q[s], n);
      }
    });
    if constexpr (Rule::has_outs) {
      if (given.predictions.n_outs > 0) know_stored(n, scratch);
    }
  }

  // Predictions use the stored values.
  static void know_stored(int n, Scratch& scratch) {
    unroll<n_streams>([&](auto s) {
      if constexpr (keeps<Rule, s> && rounded<s>) {
        Acc* kept = scratch.wide[s];
#pragma omp simd
        for (int i = 0; i < n; ++i) {
          Acc x[n_streams] = {};
          x[s] = kept[i];
          Rule::known(x);
          kept[i] = x[s];
        }
      }
    });
  }

  // One term of a prediction of a block. Several terms take several passes over the block.
  static void term(const Args& given, int t, Acc* const (&q)[n_streams], const Acc* from, Acc* to,
                   int n, const Scratch& scratch) {
    const auto move = Rule::move(given, t);
    const Acc* at[n_streams];
    unroll<n_streams>([&](auto s) { at[s] = keeps<Rule, s> ? scratch.wide[s] : q[s]; });
#pragma omp simd
    for (int i = 0; i < n; ++i) {
      Acc x[n_streams] = {};
      unroll<n_streams>([&](auto s) { x[s] = at[s][i]; });
      to[i] = Rule::advance(move, from[i], x);
    }
  }

  static void prediction(const Args& args, int j, Acc* const (&q)[n_streams], char* target, int n,
                         Scratch& scratch) {
    using T = typename Rule::OutType;
    Acc* result = scratch.prediction;
    if constexpr (in_place<T>) result = reinterpret_cast<Acc*>(target);
    const Acc* from = q[0];
    for (int t = args.predictions.begin(j); t < args.predictions.end[j]; ++t) {
      term(args, t, q, from, result, n, scratch);
      from = result;
    }
    if constexpr (!in_place<T>) narrow_block<T, false>(target, result, n);
  }

  // The position of an element in the call, if a stream is rounded stochastically.
  static uint64_t position(const Args& args, const TableView& table, uint32_t r, int64_t element) {
    bool stochastic = false;
    unroll<n_streams>([&](auto s) {
      if constexpr (rounds<Rule, s>) {
        stochastic |= rounding_of<Rule, s>(args, table.options).stochastic;
      }
    });
    return stochastic ? table.position(r, element) : 0;
  }

  static void range(const Args& args, const TableView& table, uint32_t r, Range range,
                    bool stream_outputs, Scratch& scratch) {
    const unsigned flags = table.rows[r].flags;
    const auto factor = gradient_factor<Rule>(table.options.gate);
    for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
      const int n = static_cast<int>(range.end - begin < kBlock ? range.end - begin : kBlock);
      char* p[n_streams];
      Acc* q[n_streams];
      unroll<n_streams>([&](auto s) {
        char* at =
            static_cast<char*>(table.pointer(r, s)) + begin * static_cast<int64_t>(sizeof(type<s>));
        // An output that is also read is in the cache already: non-temporal stores cost more.
        const bool past_cache = stream_outputs && table.pointer(r, s) != table.pointer(r, 0);
        p[s] = stream<s>::reads ? at : scratch.staging[s].begin(at, past_cache);
        q[s] = in_place<type<s>> ? reinterpret_cast<Acc*>(p[s]) : scratch.wide[s];
      });
      const uint64_t position = Cpu::position(args, table, r, begin);
      block(args, flags, factor, table.options, position, p, q, n, scratch);
      unroll<n_streams>([&](auto s) {
        if constexpr (!stream<s>::reads) scratch.staging[s].finish(n * sizeof(type<s>));
      });
      if constexpr (Rule::has_outs) {
        using T = typename Rule::OutType;
        // 16-bit outputs with a division each are not limited by memory: with plain stores, AdamW's
        // mixed step with two predictions took 0.95 of the time at 2^24 elements, 0.90 at 2^22
        // (best and median of 60 alternating calls, one thread).
        const bool past_cache = stream_outputs && (in_place<T> || !Rule::divides);
        Staging& staging = scratch.staging[0];
        for (int j = 0; j < args.predictions.n_outs; ++j) {
          char* at = static_cast<char*>(table.pointer(r, n_streams + j)) +
                     begin * static_cast<int64_t>(sizeof(T));
          bool read = false;  // whether it is the parameters
          unroll<n_streams>([&](auto s) {
            if constexpr (stream<s>::reads) read |= at == p[s];
          });
          prediction(args, j, q, staging.begin(at, past_cache && !read), n, scratch);
          staging.finish(n * sizeof(T));
        }
      }
      if constexpr (kGradient<Rule> >= 0) {
        if (table.options.zero_grad)
          memset(p[kGradient<Rule>], 0, n * sizeof(type<kGradient<Rule>>));
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

  // A skipped step still sets gradients to zero.
  static void zero(const TableView& table) {
    if constexpr (kGradient<Rule> >= 0) {
      for (uint32_t r = 0; r < table.n_rows; ++r) {
        memset(table.pointer(r, kGradient<Rule>), 0,
               static_cast<size_t>(table.rows[r].size) * sizeof(type<kGradient<Rule>>));
      }
    }
  }

  static void run(const TableView& table, Settings settings, const CpuOptions& options) {
    if (table.options.gate.skips()) {
      if (table.options.zero_grad) zero(table);
      return;
    }
    // Not a std::vector: no out-of-line code that the linker could share with another unit.
    auto* args = static_cast<Args*>(malloc(sizeof(Args) * settings.size));
    if (args == nullptr) abort();
    for (int i = 0; i < settings.size; ++i) Rule::make(settings.data[i], args[i]);
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

// The sum over all lanes in the order of a GPU's block: halves are added until one is left.
double sum_lanes(double (&lane)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma omp simd
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return lane[0];
}

template <class T>
double chunk_distance(const T* a, const T* b, int64_t n) {
  alignas(64) double lane[kLanes] = {};
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    const int m = static_cast<int>(n - begin < kLanes ? n - begin : kLanes);
#pragma omp simd
    for (int l = 0; l < m; ++l) lane[l] = add_square(a[begin + l], b[begin + l], lane[l]);
  }
  return sum_lanes(lane);
}

template <class T>
void distances(const Distances& d, bool parallel) {
  const TableView& table = d.table;
  const auto n_chunks = static_cast<int64_t>(table.chunk_end);
#pragma omp parallel for if (parallel) schedule(static)
  for (int64_t chunk = 0; chunk < n_chunks; ++chunk) {
    const uint32_t r = table.find_row(static_cast<uint32_t>(chunk));
    const Range range = table.range(table.rows[r], static_cast<uint32_t>(chunk));
    const T* w = static_cast<const T*>(table.pointer(r, 0)) + range.begin;
    for (uint32_t j = 0; j < d.n_lists; ++j) {
      const T* other = static_cast<const T*>(table.pointer(r, 1 + j)) + range.begin;
      d.partial[chunk * d.n_lists + j] = chunk_distance(other, w, range.end - range.begin);
    }
  }
  for (uint32_t r = 0; r < table.n_rows; ++r) {
    const uint32_t begin = table.rows[r].first_chunk;
    const uint32_t end = r + 1 < table.n_rows ? table.rows[r + 1].first_chunk : table.chunk_end;
    for (uint32_t j = 0; j < d.n_lists; ++j) {
      alignas(64) double lane[kLanes] = {};
      for (uint32_t chunk = begin; chunk < end; ++chunk) {
        lane[(chunk - begin) % kLanes] += d.partial[static_cast<int64_t>(chunk) * d.n_lists + j];
      }
      static_cast<double*>(table.pointer(r, 1 + d.n_lists))[j * d.stride] = sum_lanes(lane);
    }
  }
}

}  // namespace

// find_distances_baseline, find_distances_v3, find_distances_v4
CpuDistances SPECTRAIN_CONCAT(find_distances_, SPECTRAIN_ISA)(DType t) {
  return t == DType::float64    ? &distances<double>
         : t == DType::float32  ? &distances<float>
         : t == DType::bfloat16 ? &distances<BFloat16>
                                : &distances<Half>;
}

// find_kernel_baseline, find_kernel_v3, find_kernel_v4
CpuKernel SPECTRAIN_CONCAT(find_kernel_, SPECTRAIN_ISA)(KernelKey key) {
  return find<CpuKernel, Cpu>(key);
}

}  // namespace spectrain
