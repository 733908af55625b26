// The kernels without Python and without a GPU: the CUDA launchers run on the stand-in for its
// runtime, every thread of every block on the host, and must write the bits that each CPU
// instruction set writes. Every stream is an allocation of exactly its size, so that the address
// sanitizer sees any access beside it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/body.h"
#include "kernels/cuda/launch.h"
#include "kernels/instances.h"
#include "rules/rounding.h"
#include "stand_in/control.h"

namespace spectrain {

CpuKernel find_kernel_baseline(KernelKey);
#if defined(__x86_64__)
CpuKernel find_kernel_v3(KernelKey);
CpuKernel find_kernel_v4(KernelKey);
#endif

namespace {

long comparisons = 0;
int reported = 0;

// A few failures in full say enough.
template <class... Parts>
void fail(const Parts&... parts) {
  if (++reported <= 10) ADD_FAILURE() << (testing::Message() << ... << parts);
}

struct Engine {
  const char* name;
  FindCpuKernel cpu;  // null: CUDA
  CpuOptions options = {};
  bool resident = false;

  int vector(KernelKey key) const { return cpu != nullptr ? 8 : find_cuda_kernel(key).vector; }
};

std::vector<Engine> engines() {
  std::vector<Engine> list = {
      {"CUDA", nullptr},
      {"CUDA, resident table", nullptr, {}, true},
      {"baseline", find_kernel_baseline, {false, false}},
      {"baseline, streamed", find_kernel_baseline, {false, true}},
      {"chosen, threads", find_cpu_kernel, {true, false}},
      {"chosen, threads, streamed", find_cpu_kernel, {true, true}},
  };
#if defined(__x86_64__)
  const std::string best = cpu_instruction_set();
  if (best != "x86-64") list.push_back({"v3, streamed", find_kernel_v3, {false, true}});
  if (best == "x86-64-v4") list.push_back({"v4", find_kernel_v4, {false, false}});
#endif
  return list;
}

// Ordinary values, with the odd ones among them: infinities, NaN, subnormals, zeros of both signs.
double random_value(std::mt19937_64& random) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const double specials[] = {infinity, -infinity, nan,   0.0,   -0.0,  65504.0,
                             65520.0,  1e-7,      -3e-8, 1e-41, 3.4e38};
  const bool odd = random() % 16 == 0;
  std::normal_distribution<double> normal;
  return odd ? specials[random() % std::size(specials)] : normal(random);
}

// Writes a value as an element of a type, or reads one.
template <class T>
void put(char* to, T x) {
  memcpy(to, &x, sizeof(x));
}
template <class T>
T get(const char* from) {
  T x;
  memcpy(&x, from, sizeof(x));
  return x;
}
void store(char* to, DType t, double x) {
  const auto as_float = static_cast<float>(x);
  if (t == DType::float64) put(to, x);
  if (t == DType::float32) put(to, as_float);
  if (t == DType::float16) put(to, narrow_half(as_float));
  if (t == DType::bfloat16) put(to, narrow_bfloat16(as_float));
}
double value(const char* from, DType t) {
  return t == DType::float64   ? get<double>(from)
         : t == DType::float32 ? get<float>(from)
         : t == DType::float16 ? widen(get<Half>(from))
                               : widen(get<BFloat16>(from));
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
  std::vector<int> offsets;       // elements, one per row: the same misalignment in every stream
  bool skewed;                    // or a different one in every stream: never aligned together
  std::vector<Setting> settings;  // two groups, which rows take in turn
  StepOptions options = {};

  std::string name() const {  // numbers as in the enumerations
    std::string text = "operation " + std::to_string(static_cast<int>(key.operation)) + " of";
    for (const DType t : {key.w, key.g, key.s, key.o}) {
      text += " " + std::to_string(static_cast<int>(t));
    }
    return text;
  }
};

// One engine's copy of all streams: an allocation each, the sanitizer's guard band around it.
struct Memory {
  std::vector<std::unique_ptr<char[]>> owners;
  std::vector<void*> pointers;
  std::vector<int64_t> bytes;
};

// Uninitialized, with every stream where it is to begin.
Memory room_for(const Case& c) {
  Memory m;
  for (size_t r = 0; r < c.sizes.size(); ++r) {
    for (size_t s = 0; s < c.streams.size(); ++s) {
      const int width = size_of(c.streams[s]);
      const int64_t offset = (c.offsets[r] + (c.skewed ? static_cast<int>(s) : 0)) * width;
      const int64_t bytes = c.sizes[r] * width;
      m.owners.emplace_back(new char[offset + bytes]);
      m.pointers.push_back(m.owners.back().get() + offset);
      m.bytes.push_back(bytes);
    }
  }
  return m;
}

Memory filled(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  Memory m = room_for(c);
  for (size_t p = 0; p < m.pointers.size(); ++p) {
    const DType t = c.streams[p % c.streams.size()];
    for (int64_t at = 0; at < m.bytes[p]; at += size_of(t)) {
      store(static_cast<char*>(m.pointers[p]) + at, t, random_value(random));
    }
  }
  return m;
}

Memory copy_of(const Memory& from, const Case& c) {
  Memory m = room_for(c);
  for (size_t p = 0; p < m.pointers.size(); ++p) {
    memcpy(m.pointers[p], from.pointers[p], from.bytes[p]);
  }
  return m;
}

bool takes_rate(Operation operation) {
  return operation == Operation::sgd_plain || operation == Operation::sgd_momentum ||
         operation == Operation::sgd_predict || operation == Operation::sgd_stash_predict;
}

// The same setting with a learning rate of 1/2 in memory.
Setting with_rate(Setting s, Rate rate) {
  const auto split = [](double& constant, double& per_lr) {
    if (constant == 0.0) return;
    per_lr = 2.0 * constant;
    constant = 0.0;
  };
  const auto split_term = [&](Term& t) {
    split(t.keep, t.keep_per_lr);
    split(t.momentum, t.momentum_per_lr);
    split(t.gradient, t.gradient_per_lr);
  };
  split_term(s.step);
  for (int i = 0; i < s.n_terms(); ++i) split_term(s.terms[i]);
  s.rate = rate;
  return s;
}

void* on_device(const void* host, size_t bytes) {
  void* at = stand_in::allocate(bytes, reinterpret_cast<uintptr_t>(host) % 16);
  stand_in::write(at, host, bytes);
  return at;
}

// Where a resident table is used, SGD's learning rate is read from the device as well.
void run_on_device(const Engine& engine, const Case& c, const Memory& memory, TableView view,
                   uint64_t seed) {
  stand_in::reset(seed);
  const int device = static_cast<int>(seed % 3);  // on which a grid has one block more
  void* stream = stand_in::new_stream(device);
  std::vector<void*> pointers(view.pointers, view.pointers + view.n_rows * view.n_streams);
  std::vector<void*> moved;
  for (size_t p = 0; p < memory.pointers.size(); ++p) {
    moved.push_back(on_device(memory.pointers[p], memory.bytes[p]));
    pointers[p / c.streams.size() * view.n_streams + p % c.streams.size()] = moved.back();
  }
  view.pointers = pointers.data();
  std::vector<Setting> settings = c.settings;
  const Settings given{settings.data(), static_cast<int>(settings.size())};
  const CudaLaunch launch{find_cuda_kernel(c.key), c.key, view, given, device, stream};
  if (!engine.resident) {
    launch_cuda(launch);
  } else {
    const float as_float = 0.5F;
    const double as_double = 0.5;
    const Rate rate = seed % 2 == 0 ? Rate{on_device(&as_float, sizeof(as_float)), false}
                                    : Rate{on_device(&as_double, sizeof(as_double)), true};
    const bool reads_rate = takes_rate(c.key.operation);
    for (Setting& s : settings) s = reads_rate ? with_rate(s, rate) : s;
    launch_cuda_resident(launch, {stand_in::allocate(resident_bytes(launch)), true, reads_rate});
  }
  stand_in::synchronize();
  for (size_t p = 0; p < moved.size(); ++p) {
    stand_in::read(memory.pointers[p], moved[p], memory.bytes[p]);
  }
}

std::vector<Row> make_rows(const Case& c, const Memory& m, int vector, uint32_t* n_chunks) {
  std::vector<Row> rows;
  std::vector<int> widths;
  for (const DType t : c.streams) widths.push_back(size_of(t));
  *n_chunks = 0;
  for (size_t r = 0; r < c.sizes.size(); ++r) {
    const int head =
        aligned_head(&m.pointers[r * widths.size()], widths.data(), widths.size(), vector);
    const unsigned flags = (head >= 0 ? kAligned : 0) | (r % 2 == 1 ? kFirstStep : 0);
    rows.push_back({c.sizes[r], *n_chunks, static_cast<uint8_t>(std::max(head, 0)),
                    static_cast<uint8_t>(flags), static_cast<uint16_t>(r / 2 % c.settings.size())});
    *n_chunks += chunks_of(c.sizes[r], rows.back().head);
  }
  return rows;
}

// What stochastic rounding needs behind the streams of every row: where its elements start.
std::vector<void*> with_positions(const Case& c, const Memory& m) {
  if (!c.options.rounding.stochastic) return m.pointers;
  std::vector<void*> pointers;
  uintptr_t position = (uintptr_t{1} << 33) + 3;
  for (size_t r = 0; r < c.sizes.size(); ++r) {
    const auto row = m.pointers.begin() + static_cast<ptrdiff_t>(r * c.streams.size());
    pointers.insert(pointers.end(), row, row + static_cast<ptrdiff_t>(c.streams.size()));
    pointers.push_back(reinterpret_cast<void*>(position));
    position += c.sizes[r];
  }
  return pointers;
}

// What the options promise for whole streams: a gate that skips, gradients that are zero
// afterwards.
void check_options(const Case& c, const Memory& before, const Memory& memory, const char* engine) {
  for (size_t p = 0; p < memory.pointers.size(); ++p) {
    const auto* bytes = static_cast<const char*>(memory.pointers[p]);
    ++comparisons;
    if (c.options.zero_grad && p % c.streams.size() == 1) {
      const bool zero = std::count(bytes, bytes + memory.bytes[p], 0) == memory.bytes[p];
      if (!zero) fail(c.name(), ": '", engine, "' left gradients");
    } else if (c.options.gate.skips()) {
      const bool same = memcmp(before.pointers[p], bytes, memory.bytes[p]) == 0;
      if (!same) fail(c.name(), ": '", engine, "' wrote");
    }
  }
}

void compare(const Case& c, const Memory& expected, const Memory& memory, const char* engine) {
  const bool bits_only = c.key.operation == Operation::copy || c.key.operation == Operation::swap;
  for (size_t p = 0; p < memory.pointers.size(); ++p) {
    const size_t stream = p % c.streams.size();
    const DType t = c.streams[stream];
    comparisons += memory.bytes[p] / size_of(t);
    if (memcmp(expected.pointers[p], memory.pointers[p], memory.bytes[p]) == 0) continue;
    for (int64_t at = 0; at < memory.bytes[p]; at += size_of(t)) {
      const char* a = static_cast<char*>(expected.pointers[p]) + at;
      const char* b = static_cast<char*>(memory.pointers[p]) + at;
      if (same(a, b, t, bits_only)) continue;
      fail(c.name(), ": row ", p / c.streams.size(), " stream ", stream, " element ",
           at / size_of(t), ": ", value(a, t), ", '", engine, "' gives ", value(b, t));
    }
  }
}

void check(const Case& c, uint64_t seed) {
  const Settings settings{c.settings.data(), static_cast<int>(c.settings.size())};
  const Memory before = filled(c, seed);
  Memory reference;
  for (const Engine& engine : engines()) {
    Memory memory = copy_of(before, c);
    uint32_t n_chunks = 0;
    const std::vector<Row> rows = make_rows(c, memory, engine.vector(c.key), &n_chunks);
    const std::vector<void*> pointers = with_positions(c, memory);
    const auto n_rows = static_cast<uint32_t>(rows.size());
    const auto n_streams = static_cast<uint32_t>(pointers.size() / rows.size());
    const TableView view{rows.data(), pointers.data(), n_rows, n_streams, 0, n_chunks, c.options};
    if (engine.cpu == nullptr) {
      run_on_device(engine, c, memory, view, seed);
    } else {
      engine.cpu(c.key)(view, settings, engine.options);
    }
    check_options(c, before, memory, engine.name);
    if (reference.pointers.empty()) {
      reference = std::move(memory);
    } else {
      compare(c, reference, memory, engine.name);
    }
  }
}

Setting example(int variant, int n_outs) {
  Setting s;
  s.sign = variant == 1 ? -1.0 : 1.0;
  s.weight_decay = variant == 1 ? 0.0 : 0.01;
  s.decay = 0.9;
  s.gain = variant == 2 ? 0.7 : 1.0;
  s.decay2 = 0.99;
  s.eps = 1e-8;
  s.step = {variant == 2 ? 0.999 : 1.0, 0.05, variant == 0 ? 0.05 : 0.0, 1.25};
  // Predictions: one that moves, one that stays, one with several terms and the gradient.
  const std::vector<std::vector<Term>> predictions = {
      {{1.0, 0.2, 0.0, 1.25}},
      {{1.0, 0.0, 0.0, 1.0}},
      {{0.998, 0.05, 0.03, 1.2}, {0.998, 0.04, 0.0, 1.1}, {1.0, 0.03, 0.0, 1.05}},
  };
  for (int j = 0; j < n_outs; ++j) {
    int end = j == 0 ? 0 : s.out_end[j - 1];
    // Momentum SGD has one term for a prediction: the driver is handed the same table all the same.
    for (const Term& t : predictions[j]) s.terms[end++] = t;
    s.out_end[s.n_outs++] = end;
  }
  return s;
}

void check_all() {
  // The sanitizers make this ten times slower; the chunk boundaries are what they have to see.
#if defined(__SANITIZE_ADDRESS__)
  const std::vector<std::vector<int64_t>> sizes = {{2, 3, 7, 8, 9, 15, 16, 17, 33},
                                                   {kChunk + 5, 1}};
#else
  const std::vector<std::vector<int64_t>> sizes = {
      {1},
      {2, 3, 7, 8, 9, 15, 16, 17, 31, 33},
      {1023, 1024, 1025},
      {kChunk - 1, kChunk, kChunk + 1, 2 * kChunk + 5, 1},
  };
#endif
  struct Combination {
    DType w, g, s, o;
  };
  constexpr auto f16 = DType::float16, bf16 = DType::bfloat16, f32 = DType::float32,
                 f64 = DType::float64;
  const Combination types[] = {
      {f32, f32, f32, f32},   {f64, f64, f64, f64},     {f16, f16, f16, f16},
      {f16, f16, f32, f16},   {bf16, bf16, bf16, bf16}, {bf16, bf16, f32, bf16},
      {f32, bf16, f32, bf16}, {f32, f16, f32, f16},     {f32, f32, f32, bf16},
      {f32, f32, f32, f16},   {f32, bf16, f32, f32},    {f32, f16, f32, f32},
  };
  const float zero = 0.0f, one = 1.0f, scale = 3.7f, clip = 0.3f;
  const Gate scaling[] = {{}, {&zero, &scale, &clip}, {nullptr, &scale, nullptr}};
  uint64_t seed = 1;
  for (const auto& [w, g, s, o] : types) {
    for (const auto& row_sizes : sizes) {
      for (int variant = 0; variant < 3; ++variant) {
        Case c;
        c.sizes = row_sizes;
        for (size_t r = 0; r < row_sizes.size(); ++r) {
          c.offsets.push_back(variant == 0 ? 0 : static_cast<int>((r + variant) % 5));
        }
        c.skewed = variant == 2;
        const auto run = [&](Operation op, std::vector<DType> streams, int n_outs) {
          c.settings = {example(variant, n_outs), example((variant + 1) % 3, n_outs)};
          if (op == Operation::sgd_momentum && n_outs > 2) {
            for (Setting& setting : c.settings) setting.out_end[2] = setting.out_end[1] + 1;
          }
          // As a plan makes it: unused roles repeat the parameters' type.
          const std::string role = roles(op);
          const auto used = [&](char r, DType t) {
            return role.find(r) != std::string::npos ? t : w;
          };
          const bool has_outs = streams.size() > role.size();
          c.key = {op, w, used('g', g), used('s', s), has_outs ? o : used('o', o)};
          c.streams = std::move(streams);
          c.options.gate = scaling[variant];
          c.options.zero_grad = variant == 1 && roles(op)[1] == 'g';
          c.options.rounding = {};
          check(c, ++seed);
          if (roles(op)[1] == 'g' && w == bf16) {
            c.options.rounding = Rounding::seeded(seed);
            check(c, ++seed);
          }
          if (variant == 2) return;
          c.options.gate = {&one};
          check(c, ++seed);
        };
        if (g == w && o == w) {
          run(Operation::copy, {w, w}, 0);
          run(Operation::swap, {w, w}, 0);
          run(Operation::extrapolate, {w, w, w}, 1);
          run(Operation::sgd_stash_predict, {w, s, w}, 1);
        }
        if (g == w || o == w) run(Operation::sgd_plain, {w, g}, 0);
        if (g == w) {
          if (o != w) run(Operation::cast, {w, o}, 0);
          run(Operation::sgd_predict, {w, s, o}, 1);
          run(Operation::adam_predict, {w, s, s, o}, 1);
        }
        run(Operation::sgd_momentum, {w, g, s}, 0);
        run(Operation::sgd_momentum, {w, g, s, o, o, o}, 3);
        run(Operation::adam_step, {w, g, s, s}, 0);
        run(Operation::adam_step, {w, g, s, s, o, o, o}, 3);
      }
    }
  }
}

}  // namespace

TEST(Kernels, EveryInstructionSetAndCudaWriteTheSameBits) {
  check_all();
  EXPECT_GT(comparisons, 1'000'000);
}

}  // namespace spectrain
