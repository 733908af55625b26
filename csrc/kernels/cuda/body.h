// The work of one CUDA thread. Also compiles for the host: block, thread and grid are arguments, so
// that tests can run every thread of every block on the CPU, under a sanitizer.
#pragma once

#include "core/table.h"
#include "rules/rounding.h"

namespace spectrain {

struct Lane {
  uint32_t block, thread, blocks, threads;
};

// The stream for which a vector is 16 bytes; other streams use as many elements. Rows with mixed
// widths (16-bit gradients or copies with float32 weights and state) can be accessed
// - by the narrowest stream, 8 elements at a time: one access of 16-bit streams and two of float32
//   streams, which are 32 bytes apart between threads, so that every sector is touched twice;
// - by the widest stream, 4 elements at a time: every access of a warp is contiguous (8 bytes per
//   thread for 16-bit streams). These need two accesses for 8 elements, and a term's coefficients
//   are loaded for half as many elements. This is what is done.
//
// 256 threads. A thread has two vectors of every stream in flight if a rule has few streams, else
// one: on an H200, two take 1% longer in SGD's step, and one 7% longer in swap_. One also if the
// arithmetic is double and must fit 64 registers. Divisions (Adam) call a slow path whose registers
// must not spill: 128 registers then, 64 otherwise. Rows with mixed widths also fit 64 if the table
// is in the parameters. For AdamW with bfloat16 gradients and outputs on sm_90 (nvcc 13.0), 4
// blocks of 56 registers load 56 KB at once per multiprocessor. By the narrowest stream, 2 blocks
// of 90 registers load as much, with half the warps to hide divisions. With a resident table it is
// 3 blocks of 70 registers and 42 KB (2 of 92 and 56 KB).
struct LaunchPolicy {
  static constexpr int threads = 256;
  static constexpr int unroll(int elements_of_all_streams, bool wide_step) {
    return elements_of_all_streams <= 8 && !wide_step ? 2 : 1;
  }
  static constexpr int blocks_per_multiprocessor(bool divides, bool mixed_in_parameters) {
    return divides && !mixed_in_parameters ? 2 : 4;
  }
};

// The data of one access.
template <int Bytes>
struct alignas(Bytes) Words {
  uint32_t word[Bytes / sizeof(uint32_t)];
};
using Quad = Words<16>;

// Bytes, and required alignment, of one access of N elements.
template <class T, int N>
constexpr int access_bytes = N * sizeof(T) < sizeof(Quad) ? N * sizeof(T) : sizeof(Quad);

// N elements, loaded and stored 16 bytes at a time, or all at once if they are smaller.
template <class T, int N>
struct alignas(access_bytes<T, N>) Pack {
  using Access = Words<access_bytes<T, N>>;
  static_assert(N * sizeof(T) % sizeof(Access) == 0, "whole accesses");
  static constexpr int n_accesses = N * sizeof(T) / sizeof(Access);
  T element[N];

  SPECTRAIN_HD void load(const T* from) {
    Access access[n_accesses];
    for (int i = 0; i < n_accesses; ++i) access[i] = reinterpret_cast<const Access*>(from)[i];
    memcpy(element, access, sizeof(element));
  }
  SPECTRAIN_HD void store(T* to) const {
    Access access[n_accesses];
    memcpy(access, element, sizeof(element));
    for (int i = 0; i < n_accesses; ++i) reinterpret_cast<Access*>(to)[i] = access[i];
  }
};

// One element, for heads, tails and unaligned rows.
template <class T>
struct Pack<T, 1> {
  T element[1];
  SPECTRAIN_HD void load(const T* from) { element[0] = *from; }
  SPECTRAIN_HD void store(T* to) const { *to = element[0]; }
};

// A pack for every stream of a rule.
template <class Rule, int N, int I = 0, bool End = (I == Rule::Streams::size)>
struct Packs {
  Pack<typename stream_t<Rule, I>::type, N> head;
  Packs<Rule, N, I + 1> tail;
  template <int J>
  SPECTRAIN_HD auto& get() {
    if constexpr (J == 0) {
      return head;
    } else {
      return tail.template get<J - 1>();
    }
  }
};
template <class Rule, int N, int I>
struct Packs<Rule, N, I, true> {};

// Element size of a rule's widest or narrowest stream or output.
template <class Rule, bool Widest, int I = 0>
constexpr int element_bytes() {
  constexpr auto of = [](int a, int b) { return (a > b) == Widest ? a : b; };
  if constexpr (I < Rule::Streams::size) {
    constexpr int own = sizeof(typename stream_t<Rule, I>::type);
    if constexpr (I + 1 == Rule::Streams::size && !Rule::has_outs) {
      return own;
    } else {
      return of(own, element_bytes<Rule, Widest, I + 1>());
    }
  } else {
    return sizeof(typename Rule::OutType);
  }
}

// Whether streams and outputs have different widths.
template <class Rule>
constexpr bool mixed = element_bytes<Rule, true>() != element_bytes<Rule, false>();

// `Resident`: the table is in global memory.
template <class Rule, bool Resident>
struct Body {
  using Acc = typename Rule::Acc;
  using Args = typename Rule::Args;
  static constexpr int n_streams = Rule::Streams::size;
  static constexpr int vector = sizeof(Quad) / element_bytes<Rule, true>();
  static constexpr bool wide_step =
      sizeof(Acc) == sizeof(double) && Rule::has_outs && !Rule::divides;
  static constexpr int in_flight = LaunchPolicy::unroll(vector * n_streams, wide_step);
  // Whether pointers stay in registers. Else every vector reads them again, because stores might
  // have changed them: that is fast in parameters, the registers would cost Adam one of three
  // blocks on sm_100 and sm_120, and a wide step would spill.
  static constexpr bool keeps_pointers = Resident && !wide_step && !Rule::divides;
  template <int I>
  using stream = stream_t<Rule, I>;
  template <int I>
  using type = typename stream<I>::type;

  const Args& args;
  const TableView& table;
  uint32_t row;
  unsigned flags;
  factor_t<Acc> factor;
  void* kept_pointer[n_streams];

  template <int I>
  SPECTRAIN_HD type<I>* at(int64_t element) const {
    void* pointer = keeps_pointers ? kept_pointer[I] : table.pointer(row, I);
    return global(static_cast<type<I>*>(pointer)) + element;
  }

  template <int N>
  SPECTRAIN_HD void load(Packs<Rule, N>& packs, int64_t element) const {
    unroll<n_streams>([&](auto s) {
      if constexpr (stream<s>::reads) packs.template get<s>().load(at<s>(element));
    });
  }

  template <int N>
  SPECTRAIN_HD void finish(Packs<Rule, N>& packs, int64_t element) const {
    Acc kept[n_streams][N];
    [[maybe_unused]] uint64_t random[n_streams];  // of the element and the ones behind it
    [[maybe_unused]] uint64_t position = 0;
    unroll<n_streams>([&](auto s) {
      if constexpr (rounds<Rule, s>) {
        const Rounding& by = rounding_of<Rule, s>(args, table.options);
        if (by.stochastic) {
          position = table.position(row, element);
          random[s] = by.bits(position) >> 16 * (position % Rounding::kShared);
        }
      }
    });
    unroll<n_streams>([&](auto s) {
      if constexpr (stream<s>::source >= 0) {
        packs.template get<stream<s>::source>().store(at<s>(element));
      }
    });
    SPECTRAIN_UNROLL
    for (int e = 0; e < N; ++e) {
      Acc x[n_streams] = {};
      unroll<n_streams>([&](auto s) {
        if constexpr (stream<s>::reads) x[s] = widen(packs.template get<s>().element[e]);
      });
      Rule::apply(Rule::step(args, flags, factor), x);
      unroll<n_streams>([&](auto s) {
        if constexpr (stream<s>::writes && stream<s>::source < 0) {
          packs.template get<s>().element[e] = Narrow<type<s>>::from(x[s]);
          if constexpr (rounds<Rule, s>) {
            const Rounding& by = rounding_of<Rule, s>(args, table.options);
            if (by.stochastic) {
              if (e > 0) {
                const bool next = (position + e) % Rounding::kShared == 0;
                random[s] = next ? by.bits(position + e) : random[s] >> 16;
              }
              const auto bits = static_cast<uint16_t>(random[s]);
              packs.template get<s>().element[e] = round_stochastically(x[s], bits);
            }
          }
        }
      });
      if constexpr (Rule::has_outs) {
        unroll<n_streams>([&](auto s) {
          if constexpr (stream<s>::writes) x[s] = widen(packs.template get<s>().element[e]);
        });
        Rule::known(x);
        unroll<n_streams>([&](auto s) {
          if constexpr (keeps<Rule, s>) kept[s][e] = x[s];
        });
      }
    }
    unroll<n_streams>([&](auto s) {
      if constexpr (stream<s>::writes && stream<s>::source < 0) {
        packs.template get<s>().store(at<s>(element));
      }
    });
    if constexpr (Rule::has_outs) predictions<N>(packs, kept, element);
    if constexpr (kGradient<Rule> >= 0) {
      if (table.options.zero_grad)
        Pack<type<kGradient<Rule>>, N>{}.store(at<kGradient<Rule>>(element));
    }
  }

  // Every extra output. Elements are the inner loop, so that several of them share loaded
  // coefficients of a term: four if they are one access of the output, else two. With more, SGD's
  // step spills on sm_120 (8 elements) and sm_80 (4 of 16-bit outputs). Rules with divisions have
  // enough registers.
  template <int N>
  SPECTRAIN_HD void predictions(Packs<Rule, N>& packs, const Acc (&kept)[n_streams][N],
                                int64_t element) const {
    using T = typename Rule::OutType;
    constexpr int with_64_registers = N < 4 ? N : N * sizeof(T) == sizeof(Quad) ? 4 : 2;
    constexpr int at_once = Rule::divides ? N : with_64_registers;
    SPECTRAIN_NO_UNROLL
    for (int j = 0; j < args.predictions.n_outs; ++j) {
      Pack<T, N> out;
      SPECTRAIN_UNROLL
      for (int first = 0; first < N; first += at_once) {
        Acc w[at_once];
        predict<at_once>(w, j, packs, kept, first);
        SPECTRAIN_UNROLL
        for (int e = 0; e < at_once; ++e) out.element[first + e] = Narrow<T>::from(w[e]);
      }
      out.store(global(static_cast<T*>(table.pointer(row, n_streams + j))) + element);
    }
  }

  template <int Count, int N>
  SPECTRAIN_HD void predict(Acc (&w)[Count], int j, Packs<Rule, N>& packs,
                            const Acc (&kept)[n_streams][N], int first) const {
    SPECTRAIN_UNROLL
    for (int e = 0; e < Count; ++e) w[e] = widen(packs.template get<0>().element[first + e]);
    SPECTRAIN_NO_UNROLL
    for (int t = args.predictions.begin(j); t < args.predictions.end[j]; ++t) {
      const auto move = Rule::move(args, t);
      SPECTRAIN_UNROLL
      for (int e = 0; e < Count; ++e) {
        Acc x[n_streams] = {};
        unroll<n_streams>([&](auto s) {
          if constexpr (keeps<Rule, s>) {
            x[s] = kept[s][first + e];
          } else {
            x[s] = widen(packs.template get<s>().element[first + e]);
          }
        });
        w[e] = Rule::advance(move, w[e], x);
      }
    }
  }

  SPECTRAIN_HD void one(int64_t element) const {
    Packs<Rule, 1> packs;
    load<1>(packs, element);
    finish<1>(packs, element);
  }

  // Whole vectors of [begin, begin + n*vector), with a stride of all threads.
  SPECTRAIN_HD void vectors(int64_t begin, int n, const Lane& lane) const {
    const int stride = static_cast<int>(lane.threads);
    for (int i = static_cast<int>(lane.thread); i < n; i += stride * in_flight) {
      Packs<Rule, vector> packs[in_flight];
      SPECTRAIN_UNROLL
      for (int u = 0; u < in_flight; ++u) {
        if (i + u * stride < n) load<vector>(packs[u], begin + (i + u * stride) * vector);
      }
      SPECTRAIN_UNROLL
      for (int u = 0; u < in_flight; ++u) {
        if (i + u * stride < n) finish<vector>(packs[u], begin + (i + u * stride) * vector);
      }
    }
  }

  // A skipped step still sets gradients to zero. This is rare, so it is not vectorized.
  SPECTRAIN_HD static void zero(const TableView& table, const Lane& lane) {
    using T = type<kGradient<Rule>>;
    for (uint64_t chunk = table.chunk_begin + static_cast<uint64_t>(lane.block);
         chunk < table.chunk_end; chunk += lane.blocks) {
      const uint32_t r = table.find_row(static_cast<uint32_t>(chunk));
      const Range range = table.range(table.rows[r], static_cast<uint32_t>(chunk));
      T* to = global(static_cast<T*>(table.pointer(r, kGradient<Rule>)));
      for (int64_t i = range.begin + lane.thread; i < range.end; i += lane.threads) to[i] = T{};
    }
  }

  // `stride`: bytes between the arguments of two groups; 0: all chunks of the block are of one.
  SPECTRAIN_HD static void run(const unsigned char* arguments, uint32_t stride,
                               const TableView& table, const Lane& lane) {
    if (table.options.gate.skips()) {
      if constexpr (kGradient<Rule> >= 0) {
        if (table.options.zero_grad) zero(table, lane);
      }
      return;
    }
    const auto factor = gradient_factor<Rule>(table.options.gate);
    for (uint64_t chunk = table.chunk_begin + static_cast<uint64_t>(lane.block);
         chunk < table.chunk_end; chunk += lane.blocks) {
      const uint32_t r = table.find_row(static_cast<uint32_t>(chunk));
      const Row& row = table.rows[r];
      const Args& args = *reinterpret_cast<const Args*>(arguments + row.setting * stride);
      Body body{args, table, r, row.flags, factor, {}};
      for (int s = 0; s < n_streams; ++s) body.kept_pointer[s] = table.pointer(r, s);
      const Range range = table.range(row, static_cast<uint32_t>(chunk));
      int64_t begin = range.begin;
      if ((row.flags & kAligned) != 0) {
        const int64_t aligned = begin == 0 ? row.head : begin;
        if (begin + lane.thread < aligned && begin + lane.thread < range.end) {
          body.one(begin + lane.thread);
        }
        const int n = aligned < range.end ? static_cast<int>((range.end - aligned) / vector) : 0;
        body.vectors(aligned, n, lane);
        begin = aligned + static_cast<int64_t>(n) * vector;
      }
      for (int64_t i = begin + lane.thread; i < range.end; i += lane.threads) body.one(i);
    }
  }
};

}  // namespace spectrain
