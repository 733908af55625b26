// The kernels without Python and without a GPU: every thread of every block of the CUDA kernels'
// body is run on the host, and must write the bits that each CPU instruction set writes. Every
// stream is an allocation of exactly its size, so that the address sanitizer sees any access beside
// it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/body.h"
#include "instances.h"

namespace spectrain {

CpuKernel find_kernel_baseline(KernelKey);
#if defined(__x86_64__)
CpuKernel find_kernel_v3(KernelKey);
CpuKernel find_kernel_v4(KernelKey);
#endif

namespace {

int failures = 0;
long comparisons = 0;

// The launcher that by_types and its siblings ask for: a grid of blocks, one lane after the other.
constexpr uint32_t kThreads = 32;
uint32_t grid_blocks = 1;

template <class Rule>
struct HostGrid {
  static void kernel(const TableView& table, const Hyper& hyper, const CpuOptions&) {
    const typename Rule::Args args = Rule::make(hyper);
    for (uint32_t block = 0; block < grid_blocks; ++block) {
      for (uint32_t thread = 0; thread < kThreads; ++thread) {
        Body<Rule>::run(args, table, {block, thread, grid_blocks, kThreads});
      }
    }
  }
};

CpuKernel find_host_grid(KernelKey key) {
  switch (key.operation) {
    case Operation::copy:
      return by_width<HostGrid, Copy>(key.param);
    case Operation::swap:
      return by_width<HostGrid, Swap>(key.param);
    case Operation::predict:
      return by_types<HostGrid, Predict>(key.param, key.momentum);
    case Operation::stash_predict:
      return by_types<HostGrid, StashPredict>(key.param, key.momentum);
    case Operation::sgd_momentum:
      return by_types<HostGrid, SgdMomentum>(key.param, key.momentum);
    case Operation::sgd_plain:
      return by_type<HostGrid, SgdPlain>(key.param);
  }
  return nullptr;
}

struct Engine {
  const char* name;
  FindCpuKernel find;
  uint32_t blocks;  // of the host grid; 0: a CPU kernel
  CpuOptions options;
};

std::vector<Engine> engines() {
  std::vector<Engine> list = {
      {"body, 1 block", find_host_grid, 1, {}},
      {"body, 3 blocks", find_host_grid, 3, {}},
      {"baseline", find_kernel_baseline, 0, {false, false}},
      {"baseline, streamed", find_kernel_baseline, 0, {false, true}},
      {"chosen, threads", find_cpu_kernel, 0, {true, false}},
      {"chosen, threads, streamed", find_cpu_kernel, 0, {true, true}},
  };
#if defined(__x86_64__)
  const std::string best = cpu_instruction_set();
  if (best != "x86-64") list.push_back({"v3, streamed", find_kernel_v3, 0, {false, true}});
  if (best == "x86-64-v4") list.push_back({"v4", find_kernel_v4, 0, {false, false}});
#endif
  return list;
}

const char* name_of(Operation op) {
  const char* names[] = {"copy", "swap", "predict", "stash_predict", "sgd_momentum", "sgd_plain"};
  return names[static_cast<int>(op)];
}

// Ordinary values, with the odd ones among them: infinities, NaN, subnormals, zeros of both signs.
void fill(char* to, int64_t n, DType t, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < n; ++i) {
    const bool odd = random() % 16 == 0;
    const double specials[] = {std::numeric_limits<double>::infinity(),
                               -std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN(),
                               0.0,
                               -0.0,
                               65504.0,
                               65520.0,
                               1e-7,
                               -3e-8,
                               1e-41,
                               3.4e38};
    const double x =
        odd ? specials[random() % (sizeof(specials) / sizeof(*specials))] : normal(random);
    if (t == DType::float64) {
      memcpy(to + 8 * i, &x, 8);
    } else if (t == DType::float32) {
      const auto f = static_cast<float>(x);
      memcpy(to + 4 * i, &f, 4);
    } else if (t == DType::float16) {
      const Half h = narrow_half(static_cast<float>(x));
      memcpy(to + 2 * i, &h, 2);
    } else {
      const BFloat16 b = narrow_bfloat16(static_cast<float>(x));
      memcpy(to + 2 * i, &b, 2);
    }
  }
}

double value(const char* from, DType t) {
  if (t == DType::float64) {
    double x;
    memcpy(&x, from, 8);
    return x;
  }
  if (t == DType::float32) {
    float x;
    memcpy(&x, from, 4);
    return x;
  }
  uint16_t bits;
  memcpy(&bits, from, 2);
  return t == DType::float16 ? widen(Half{bits}) : widen(BFloat16{bits});
}

// The same bits, or both NaN where the operation computes.
bool same(const char* a, const char* b, DType t, bool bits_only) {
  if (memcmp(a, b, size_of(t)) == 0) return true;
  if (bits_only) return false;
  const double x = value(a, t), y = value(b, t);
  return x != x && y != y;
}

struct Case {
  KernelKey key;
  std::vector<DType> streams;
  std::vector<int64_t> sizes;
  std::vector<int> offsets;  // elements, one per row: the same misalignment in every stream
  bool skewed;               // or a different one in every stream: never aligned together
  Hyper hyper;
};

// One engine's copy of all streams: an allocation each, the sanitizer's guard band around it.
struct Memory {
  std::vector<std::unique_ptr<char[]>> owners;
  std::vector<void*> pointers;
  std::vector<int64_t> bytes;
};

Memory make_memory(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  Memory m;
  for (size_t r = 0; r < c.sizes.size(); ++r) {
    for (size_t s = 0; s < c.streams.size(); ++s) {
      const int width = size_of(c.streams[s]);
      const int64_t offset = (c.offsets[r] + (c.skewed ? static_cast<int>(s) : 0)) * width;
      const int64_t bytes = c.sizes[r] * width;
      m.owners.emplace_back(new char[offset + bytes]);
      char* at = m.owners.back().get() + offset;
      fill(at, c.sizes[r], c.streams[s], random);
      m.pointers.push_back(at);
      m.bytes.push_back(bytes);
    }
  }
  return m;
}

std::vector<Row> make_rows(const Case& c, const Memory& m, uint32_t* n_chunks) {
  std::vector<Row> rows;
  *n_chunks = 0;
  for (size_t r = 0; r < c.sizes.size(); ++r) {
    int head = 0;
    for (; head < 8; ++head) {
      bool aligned = true;
      for (size_t s = 0; s < c.streams.size(); ++s) {
        const auto at = reinterpret_cast<uintptr_t>(m.pointers[r * c.streams.size() + s]) +
                        head * size_of(c.streams[s]);
        aligned = aligned && at % 16 == 0;
      }
      if (aligned) break;
    }
    const bool found = head < 8;
    const auto flags = static_cast<uint16_t>(r % 2 == 1 ? kFirstStep : 0);
    rows.push_back({c.sizes[r], *n_chunks, static_cast<uint8_t>(found ? head : 0), found, flags});
    *n_chunks += chunks_of(c.sizes[r], rows.back().head);
  }
  return rows;
}

void check(const Case& c, uint64_t seed) {
  const bool bits_only = c.key.operation == Operation::copy || c.key.operation == Operation::swap;
  Memory reference;
  const char* reference_name = nullptr;
  for (const Engine& engine : engines()) {
    Memory memory = make_memory(c, seed);
    uint32_t n_chunks = 0;
    const std::vector<Row> rows = make_rows(c, memory, &n_chunks);
    const TableView view{rows.data(),
                         memory.pointers.data(),
                         static_cast<uint32_t>(rows.size()),
                         static_cast<uint32_t>(c.streams.size()),
                         0,
                         n_chunks};
    grid_blocks = engine.blocks;
    engine.find(c.key)(view, c.hyper, engine.options);
    if (reference_name == nullptr) {
      reference = std::move(memory);
      reference_name = engine.name;
      continue;
    }
    for (size_t p = 0; p < memory.pointers.size(); ++p) {
      const DType t = c.streams[p % c.streams.size()];
      comparisons += memory.bytes[p] / size_of(t);
      if (memcmp(reference.pointers[p], memory.pointers[p], memory.bytes[p]) == 0) continue;
      for (int64_t at = 0; at < memory.bytes[p]; at += size_of(t)) {
        if (same(static_cast<char*>(reference.pointers[p]) + at,
                 static_cast<char*>(memory.pointers[p]) + at, t, bits_only)) {
          continue;
        }
        if (++failures <= 10) {
          std::printf(
              "%s (%d, %d): row %zu stream %zu element %lld: '%s' gives %.17g, '%s' %.17g\n",
              name_of(c.key.operation), static_cast<int>(c.key.param),
              static_cast<int>(c.key.momentum), p / c.streams.size(), p % c.streams.size(),
              static_cast<long long>(at / size_of(t)), reference_name,
              value(static_cast<char*>(reference.pointers[p]) + at, t), engine.name,
              value(static_cast<char*>(memory.pointers[p]) + at, t));
        }
      }
    }
  }
}

void check_conversions() {
  // Every 16-bit pattern survives the way to float and back; NaN stays NaN.
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto u = static_cast<uint16_t>(bits);
    const float h = widen(Half{u}), b = widen(BFloat16{u});
    const bool half_good =
        h != h ? (narrow_half(h).bits & 0x7fff) > 0x7c00 : narrow_half(h).bits == u;
    const bool bfloat_good =
        b != b ? (narrow_bfloat16(b).bits & 0x7fff) > 0x7f80 : narrow_bfloat16(b).bits == u;
    failures += !half_good + !bfloat_good;
    comparisons += 2;
    if (h != h) continue;
    // The neighbourhood of every midpoint rounds to the nearest, and to even in the middle.
    const float next = widen(Half{static_cast<uint16_t>(u + 1)});
    if ((u & 0x7fff) >= 0x7bff || next != next) continue;
    const float middle = h + (next - h) / 2;  // exact: a half has 11 bits, a float 24
    const uint16_t even = (u & 1) != 0 ? static_cast<uint16_t>(u + 1) : u;
    const float below = std::nextafterf(middle, h), above = std::nextafterf(middle, next);
    failures += narrow_half(middle).bits != even;
    failures += narrow_half(below).bits != u;
    failures += narrow_half(above).bits != static_cast<uint16_t>(u + 1);
    comparisons += 3;
  }
}

void check_all() {
  const std::vector<std::vector<int64_t>> sizes = {
      {1},
      {2, 3, 7, 8, 9, 15, 16, 17, 31, 33},
      {1023, 1024, 1025},
      {kChunk - 1, kChunk, kChunk + 1, 2 * kChunk + 5, 1},
      {5, 3 * kChunk + 11, 64},
  };
  const std::pair<DType, DType> types[] = {
      {DType::float32, DType::float32},   {DType::float64, DType::float64},
      {DType::float16, DType::float16},   {DType::float16, DType::float32},
      {DType::bfloat16, DType::bfloat16}, {DType::bfloat16, DType::float32},
  };
  uint64_t seed = 1;
  for (const auto& [w, v] : types) {
    for (const auto& row_sizes : sizes) {
      for (int variant = 0; variant < 3; ++variant) {
        Case c;
        c.sizes = row_sizes;
        for (size_t r = 0; r < row_sizes.size(); ++r) {
          c.offsets.push_back(variant == 0 ? 0 : static_cast<int>((r + variant) % 5));
        }
        c.skewed = variant == 2;
        c.hyper.lr = 0.05;
        c.hyper.steps = 3.0;
        c.hyper.momentum = 0.9;
        const auto run = [&](Operation op, std::vector<DType> streams) {
          c.key = {op, w, v};
          c.streams = std::move(streams);
          check(c, ++seed);
        };
        run(Operation::copy, {w, w});
        run(Operation::swap, {w, w});
        run(Operation::predict, {w, v, w});
        run(Operation::stash_predict, {w, v, w});
        run(Operation::sgd_plain, {w, w});
        run(Operation::sgd_momentum, {w, w, v});
        c.hyper.nesterov = variant == 0;
        c.hyper.maximize = variant == 1;
        c.hyper.weight_decay = variant == 1 ? 0.0 : 0.01;
        c.hyper.dampening = variant == 2 ? 0.3 : 0.0;
        c.hyper.n_outs = 3;
        c.hyper.out_steps[0] = 4.0;
        c.hyper.out_steps[1] = 0.0;
        c.hyper.out_steps[2] = 0.5;
        run(Operation::sgd_momentum, {w, w, v, w, w, w});
      }
    }
  }
}

}  // namespace
}  // namespace spectrain

int main() {
  spectrain::check_conversions();
  spectrain::check_all();
  std::printf("%ld comparisons, %d failures\n", spectrain::comparisons, spectrain::failures);
  return spectrain::failures == 0 && spectrain::comparisons > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
