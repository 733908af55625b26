// Plans on a device, launched by the real launch code on the stand-in for the CUDA runtime: their
// results are those of the same plan on the CPU, in whatever order the streams' work is done, in
// captured graphs, and after calls that failed. Plans on the CPU have the same results with every
// instruction set. Every array has inaccessible memory around it, for the address sanitizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <random>

#include "kernels/cuda/device.h"
#include "kernels/cuda/launch.h"
#include "plan/plan.h"
#include "ptx/elements.h"
#include "stand_in/control.h"

namespace spectrain {
namespace {

constexpr int kSeeds = 3;
constexpr size_t kLong = 141;  // rows that are more than a kernel's parameters hold

// Lends memory as torch's allocator does: what is free on a stream is free for that stream's next
// work at once, and for others' never.
class Pool {
 public:
  std::unique_ptr<DeviceMemory> lend(size_t bytes, void* stream) {
    void* at = nullptr;
    auto& free = free_[stream];
    for (size_t i = 0; i < free.size() && at == nullptr; ++i) {
      if (free[i].second < bytes) continue;
      at = free[i].first;
      bytes = free[i].second;
      free.erase(free.begin() + static_cast<ptrdiff_t>(i));
    }
    if (at == nullptr) at = stand_in::allocate(bytes);
    return std::make_unique<Lent>(*this, at, bytes, stream);
  }

 private:
  struct Lent : DeviceMemory {
    Lent(Pool& pool_, void* at_, size_t bytes_, void* stream_)
        : pool(pool_), address(at_), bytes(bytes_), stream(stream_) {}
    ~Lent() override {
      if (!elsewhere) pool.free_[stream].emplace_back(address, bytes);
    }
    void* at() const override { return address; }
    void used_on(void* other) override { elsewhere |= other != stream; }
    Pool& pool;
    void* address;
    size_t bytes;
    void* stream;
    bool elsewhere = false;
  };
  std::map<void*, std::vector<std::pair<void*, size_t>>> free_;
};

// One list of arrays on the host and their twins, none beside another.
struct List {
  std::vector<std::vector<char>> host;
  DType type = DType::float32;
  Column on_host, twins;

  // `skew`: elements by which the twins lie beside where those of other lists lie.
  void make(const std::vector<int64_t>& sizes, int skew, std::mt19937_64& random, bool positive,
            bool odd) {
    const int width = size_of(type);
    for (const int64_t n : sizes) {
      std::vector<char>& bytes = host.emplace_back(static_cast<size_t>(n * width));
      for (int64_t i = 0; i < n; ++i) {
        const double x = elements::number(random, odd);
        elements::store(&bytes[i * width], type, positive ? std::abs(x) : x);
      }
      on_host.at.push_back(bytes.data());
      const size_t offset = (twins.at.size() + skew) % 5 * width;
      twins.at.push_back(stand_in::allocate(bytes.size(), offset));
      stand_in::write(twins.at.back(), bytes.data(), bytes.size());
    }
    on_host.dtype.assign(sizes.size(), type);
    twins.dtype = on_host.dtype;
  }
  // The same bits, or NaN on both sides.
  void expect_equal(const char* name) const {
    for (size_t i = 0; i < host.size(); ++i) {
      std::vector<char> came(host[i].size());
      stand_in::read(came.data(), twins.at[i], came.size());
      if (came == host[i]) continue;
      const size_t width = size_of(type);
      for (size_t at = 0; at < came.size(); at += width) {
        ASSERT_TRUE(elements::agree(&came[at], &host[i][at], type))
            << name << "[" << i << "], element " << at / width;
      }
    }
  }
};

struct ElementTypes {
  DType w = DType::float32, g = DType::float32, s = DType::float32, o = DType::float32;
};

std::vector<int64_t> sizes_of(size_t n) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < n; ++i) sizes.push_back(static_cast<int64_t>(i % 7 + 1));
  sizes[0] = kChunk + 9;
  return sizes;
}

class Twins;
struct Operation_ {
  const char* name;
  std::function<void(const Twins&, Plan&, void*)> call;
  bool repeats = false;      // does the same when it is done once more
  bool may_be_long = false;  // stands for all of them where lists are long
};

// A plan on the host and its twin, on a device or on the host with another instruction set.
class Twins {
 public:
  Twins(uint64_t seed, size_t n, int device_index = 0, uint16_t n_groups = 2)
      : Twins(seed, sizes_of(n), Device{true, device_index}, n_groups) {}
  Twins(uint64_t seed, std::vector<int64_t> sizes_, Device where, uint16_t n_groups = 2,
        const ElementTypes& types = {}, bool odd = false)
      : sizes(std::move(sizes_)), stream_(fresh(seed, where.index)) {
    std::mt19937_64 random(seed);
    std::vector<uint16_t> groups;
    for (size_t i = 0; i < sizes.size(); ++i) groups.push_back(static_cast<uint16_t>(i % n_groups));
    const std::pair<const char*, DType> roles[] = {
        {"params", types.w},  {"grads", types.g}, {"momentum", types.s}, {"second", types.s},
        {"stashed", types.w}, {"out0", types.o},  {"out1", types.o}};
    int skew = 0;  // with even seeds: never aligned together
    for (const auto& [name, type] : roles) {
      lists[name].type = type;
      lists[name].make(sizes, skew, random, std::string(name) == "second", odd);
      skew += seed % 2 == 0;
    }
    host = plan_of(Device{}, groups, [this](const char* name) { return lists[name].on_host; });
    twin = plan_of(where, groups, [this](const char* name) { return lists[name].twins; });
    twin->allocate = [this](size_t bytes, void* stream) { return pool.lend(bytes, stream); };
    scalars_on_device = static_cast<Scalars*>(stand_in::allocate(sizeof(Scalars)));
    set_rate(0.25);
  }
  void set_rate(double x) {
    scalars.rate = x;
    scalars.count += 1.0;
    stand_in::write(scalars_on_device, &scalars, sizeof(scalars));
  }
  // A learning rate and a step count in memory.
  Source source_of(const Plan& plan) const {
    return {{&of(plan).rate, true}, 0.7, {&of(plan).count, true}, 0.9, 0.99};
  }
  // A step's options, which skip it if an infinity was found.
  StepOptions options_of(const Plan& plan, bool found_inf) const {
    const Scalars& s = of(plan);
    StepOptions options{{found_inf ? &s.one : &s.zero, &s.scale, &s.clip}};
    options.zero_grad = true;
    if (plan.params.dtype[0] == DType::bfloat16) options.rounding = Rounding::seeded(7);
    return options;
  }
  cudaStream_t stream() const { return stream_; }
  // An operation on the host, and of its twin, on a stream of a device.
  void both(const Operation_& operation, cudaStream_t on) {
    operation.call(*this, *host, nullptr);
    operation.call(*this, *twin, on);
  }
  void both(const Operation_& operation, int uses) {
    for (int use = 0; use < uses; ++use) both(operation, stream_);
  }
  void expect_equal() const {
    stand_in::synchronize();
    for (const auto& [name, list] : lists) list.expect_equal(name.c_str());
  }

  Pool pool;  // plans give their memory back
  std::vector<int64_t> sizes;
  std::map<std::string, List> lists;
  std::unique_ptr<Plan> host, twin;

 private:
  struct Scalars {
    double rate = 0.0, count = 0.0;
    float zero = 0.0F, one = 1.0F, scale = 3.7F, clip = 0.3F;
  };
  const Scalars& of(const Plan& plan) const {
    return plan.device().cuda ? *scalars_on_device : scalars;
  }
  template <class Columns>
  std::unique_ptr<Plan> plan_of(Device where, const std::vector<uint16_t>& groups, Columns column) {
    auto plan = std::make_unique<Plan>(where, sizes, groups);
    plan->params = column("params");
    plan->grads = column("grads");
    plan->momentum = column("momentum");
    plan->second = column("second");
    plan->stashed = column("stashed");
    plan->outs = {column("out0"), column("out1")};
    plan->keep_tables = true;
    return plan;
  }
  static cudaStream_t fresh(uint64_t seed, int device) {
    stand_in::reset(seed);
    return stand_in::new_stream(device);
  }
  Scalars scalars;
  Scalars* scalars_on_device = nullptr;
  cudaStream_t stream_;
};

Setting setting(double lr) {
  Setting s;
  s.weight_decay = 0.01;
  s.decay = 0.9;
  s.decay2 = 0.99;
  s.gain = 0.1;
  s.eps = 1e-8;
  s.step = {1.0, lr, 0.0, 1.0};
  return s;
}
// The last group is another one.
std::vector<Setting> settings_of(const Plan& plan, double lr = 0.1) {
  std::vector<Setting> settings(plan.n_groups(), setting(lr));
  settings.back().sign = -1.0;
  settings.back().weight_decay = 0.0;
  settings.back().gain = 1.0;
  settings.back().step = {0.999, lr, lr / 2, 1.25};
  return settings;
}
Plan::Terms terms_of(const Plan& plan, double lr = 0.1) {
  return Plan::Terms(plan.n_groups(), {Term{1.0, 2 * lr, 0.0, 1.0}});
}
// With the gradient, and for Adam of more updates than one.
Plan::Terms far_terms(const Plan& plan, int n) {
  const Term all[] = {{0.998, 0.05, 0.03, 1.2}, {0.998, 0.04, 0.0, 1.1}, {1.0, 0.03, 0.0, 1.05}};
  return Plan::Terms(plan.n_groups(), std::vector<Term>(all, all + n));
}
using Op = Operation;
const Plan::Predictor sgd{Op::sgd_predict};
Plan::Predictor adam(const Plan& plan) {
  return {Op::adam_predict, std::vector<double>(plan.n_groups(), 1e-8)};
}

// With numbers that the kernel reads in memory.
void with_memory(const Twins& twins, Plan& plan, const std::function<void()>& call) {
  plan.sources.assign(plan.n_groups(), twins.source_of(plan));
  plan.sources.back() = {};  // the last group has numbers
  call();
  plan.sources = {};
}

// A step by lr and its prediction with decoupled decay, lr in memory; Adam's, with its count.
constexpr Term kByRate{1.0, 0.0, 0.0, 1.0, -0.01, 1.0, 0.0};
constexpr Term kAheadByRate{1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 0.0};
constexpr Term kByCount{1.0, 0.0, 0.0, 1.0, -0.01, 1.0, 0.0, 0.0};
constexpr Term kAheadByCount{1.0, 0.0, 0.0, 1.0, -0.01, 2.0, 0.0, 1.0};

const std::vector<Operation_>& operations() {
  static const std::vector<Operation_> list = {
      {"predict", [](const Twins&, Plan& p, void* s) { p.predict(sgd, terms_of(p), p.outs[0], s); },
       true, true},
      {"predict of Adam",
       [](const Twins&, Plan& p, void* s) { p.predict(adam(p), terms_of(p), p.outs[1], s); }, true},
      {"predict, a learning rate in memory",
       [](const Twins& t, Plan& p, void* s) {
         Plan::Terms terms = terms_of(p);
         terms[0] = {kAheadByRate};
         with_memory(t, p, [&] { p.predict(sgd, terms, p.outs[0], s); });
       },
       true, true},
      {"predict of Adam, its numbers in memory",
       [](const Twins& t, Plan& p, void* s) {
         Plan::Terms terms = terms_of(p);
         terms[0] = {kAheadByCount, kAheadByCount};
         with_memory(t, p, [&] { p.predict(adam(p), terms, p.outs[1], s); });
       },
       true},
      {"predict of Lion",
       [](const Twins&, Plan& p, void* s) {
         p.predict({Op::lion_predict}, terms_of(p), p.outs[0], s);
       },
       true},
      {"predict in place",
       [](const Twins&, Plan& p, void* s) { p.predict(sgd, terms_of(p), p.params, s); }},
      {"stash", [](const Twins&, Plan& p, void* s) { p.copy(p.params, p.stashed, s); }, true},
      {"write out", [](const Twins&, Plan& p, void* s) { p.copy(p.params, p.outs[0], s); }, true},
      {"swap", [](const Twins&, Plan& p, void* s) { p.swap_(s); }},
      {"stash and predict",
       [](const Twins&, Plan& p, void* s) { p.stash_predict_(sgd, terms_of(p), s); }},
      {"extrapolate", [](const Twins&, Plan& p, void* s) { p.extrapolate(2.0, p.outs[1], s); },
       true},
      {"SGD step",
       [](const Twins&, Plan& p, void* s) {
         p.step(Op::sgd_step, {settings_of(p), {{0, terms_of(p)}, {1, terms_of(p, 0.3)}}}, s);
       }},
      {"SGD step, a learning rate in memory",
       [](const Twins& t, Plan& p, void* s) {
         std::vector<Setting> settings = settings_of(p);
         settings[0].step = kByRate;
         Plan::Terms terms = terms_of(p);
         terms[0] = {kAheadByRate};
         with_memory(t, p,
                     [&] { p.step(Op::sgd_step, {settings, {{0, terms}, {1, terms_of(p)}}}, s); });
       }},
      {"Lion step, a learning rate in memory",
       [](const Twins& t, Plan& p, void* s) {
         std::vector<Setting> settings = settings_of(p);
         settings[0].step = {1.0, 0.0, 0.0, 1.0, -0.01, 0.0, 1.0};
         Plan::Terms terms = terms_of(p);
         terms[0] = {kAheadByRate};
         with_memory(t, p,
                     [&] { p.step(Op::lion_step, {settings, {{0, terms}, {1, terms_of(p)}}}, s); });
       }},
      {"Adam step, its numbers in memory",
       [](const Twins& t, Plan& p, void* s) {
         std::vector<Setting> settings = settings_of(p);
         for (Setting& each : settings) each.decay2 = 0.999;  // rounds bfloat16 moments up or down
         settings[0].step = kByCount;
         Plan::Terms terms = terms_of(p);
         terms[0] = {kAheadByCount, kAheadByCount};
         with_memory(t, p,
                     [&] { p.step(Op::adam_step, {settings, {{0, terms}, {1, terms_of(p)}}}, s); });
       }},
      {"SGD step without momentum",
       [](const Twins&, Plan& p, void* s) { p.step(Op::sgd_plain, {settings_of(p)}, s); }},
      {"SGD step with options",
       [](const Twins& t, Plan& p, void* s) {
         std::vector<uint8_t> first(p.size());
         for (size_t i = 0; i < first.size(); ++i) first[i] = i % 2;
         const Plan::Prediction far{0, far_terms(p, 1)}, near{1, terms_of(p)};
         p.step(Op::sgd_step, {settings_of(p), {near, far}, t.options_of(p, false), first}, s);
       }},
      {"Adam step with options",
       [](const Twins& t, Plan& p, void* s) {
         const Plan::Prediction far{1, far_terms(p, 3)};
         p.copy(p.params, p.grads, s);  // the last step has set them to zero
         p.step(Op::adam_step, {settings_of(p), {far}, t.options_of(p, false)}, s);
       }},
      {"skipped step",
       [](const Twins& t, Plan& p, void* s) {
         p.copy(p.params, p.grads, s);
         p.step(Op::adam_step, {settings_of(p), {{0, terms_of(p)}}, t.options_of(p, true)}, s);
       }},
      {"Adam step",
       [](const Twins&, Plan& p, void* s) {
         p.step(Op::adam_step, {settings_of(p), {{0, terms_of(p)}}}, s);
       }},
  };
  return list;
}

}  // namespace

// On a device, and with wider instruction sets, also for outputs that bypass the cache.
TEST(Kernels, WriteTheBitsOfTheBaselines) {
  constexpr auto f16 = DType::float16, bf16 = DType::bfloat16, f32 = DType::float32,
                 f64 = DType::float64;
  const ElementTypes all[] = {
      {f32, f32, f32, f32},   {f64, f64, f64, f64},     {f16, f16, f16, f16},
      {f16, f16, f32, f16},   {bf16, bf16, bf16, bf16}, {bf16, bf16, f32, bf16},
      {f32, bf16, f32, bf16}, {f32, f16, f32, f16},     {f32, f32, f32, bf16},
      {f32, f32, f32, f16},   {f32, bf16, f32, f32},    {f32, f16, f32, f32},
  };
  const std::vector<int64_t> edges = {kChunk + 9, 1,  2,  3,  7,    8,    9,      15,
                                      16,         17, 31, 33, 1023, 1025, kChunk, 2 * kChunk + 5};
  const std::vector<int64_t> streamed = {(1 << 19) + 9, 5};
  stand_in::reset(0);
  const stand_in::Access access;  // from the host as well
  int compiled = 0;
  for (const ElementTypes& t : all) {
    if (find_cpu_kernel({Operation::sgd_step, t.w, t.g, t.s, t.o}) == nullptr) continue;
    ++compiled;
    for (int set = 0; set <= stand_in::instruction_sets(); ++set) {
      for (const int seed : {0, 1, 2}) {
        const bool on_device = set == stand_in::instruction_sets();
        const bool large = seed == 2;
        if (large && (on_device || set == 0 || t.g != t.w || t.s != t.w)) continue;
        Twins twins(seed, large ? streamed : edges, Device{on_device, 0}, 2, t, true);
        for (const Operation_& operation : operations()) {
          SCOPED_TRACE(testing::Message() << operation.name << " of types " << compiled << ", set "
                                          << set << ", seed " << seed);
          bool refused = false;
          stand_in::choose_instruction_set(0);
          try {
            operation.call(twins, *twins.host, nullptr);
          } catch (const UnsupportedTypes&) {
            refused = true;
          }
          stand_in::choose_instruction_set(on_device ? 0 : set);
          if (refused) {
            EXPECT_THROW(operation.call(twins, *twins.twin, twins.stream()), UnsupportedTypes);
            continue;
          }
          operation.call(twins, *twins.twin, twins.stream());
          twins.expect_equal();
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  stand_in::choose_instruction_set(0);
  EXPECT_EQ(compiled, SPECTRAIN_COMPILED_TYPES);
}

// Every group has other numbers. Most of them are more than a kernel's parameters hold, and the
// most are more than a block's shared memory holds.
TEST(Kernels, TakeAnyNumberOfGroups) {
  for (const DType type : {DType::float32, DType::float64}) {
    if (find_cpu_kernel({Op::adam_step, type, type, type, type}) == nullptr) continue;
    for (const uint16_t n_groups : {1, 29, 30, 100, 1000}) {
      for (const int n_terms : {1, kMaxTerms}) {
        const auto by_group = [&](const auto& each) {
          std::vector<std::decay_t<decltype(each(0.0))>> all;
          for (int g = 0; g < n_groups; ++g) all.push_back(each(0.1 + g * 1e-4));
          return all;
        };
        const auto settings = by_group(setting);
        const auto terms = by_group([&](double lr) {
          return std::vector<Term>(n_terms, Term{1.0, lr / n_terms, 0.0, 1.1});
        });
        const auto by_rate = by_group([&](double by) {
          Setting s = setting(by);
          s.step = {1.0, 0.0, 0.0, 1.0, -0.01, by, 0.0};
          return s;
        });
        const auto ahead_by_rate = by_group(
            [&](double by) { return std::vector<Term>{{1.0, 0.0, 0.0, 1.0, 0.0, 2 * by, 0.0}}; });
        const auto by_count = by_group([&](double by) {
          Setting s = setting(by);
          s.step = {1.0, 0.0, 0.0, 1.0, -0.01, by, 0.0, 0.0};
          return s;
        });
        const auto ahead_by_count = by_group([&](double by) {
          const int n = std::min(n_terms, kMaxTermsFromMemory);
          return std::vector<Term>(n, {1.0, 0.0, 0.0, 1.0, -0.01, by / n, 0.0, 2.0});
        });
        const Operation_ all[] = {
            {"Adam step",
             [&](const Twins&, Plan& p, void* s) {
               p.step(Op::adam_step, {settings, {{0, terms}}}, s);
             },
             false, true},
            {"predict of Adam",
             [&](const Twins&, Plan& p, void* s) { p.predict(adam(p), terms, p.outs[1], s); }},
            {"SGD step",
             [&](const Twins&, Plan& p, void* s) {
               p.step(Op::sgd_step, {settings, {{0, ahead_by_rate}}}, s);
             }},
            {"SGD step, a learning rate in memory",
             [&](const Twins& t, Plan& p, void* s) {
               with_memory(t, p, [&] { p.step(Op::sgd_step, {by_rate, {{1, ahead_by_rate}}}, s); });
             },
             false, true},
            {"Adam step, its numbers in memory",
             [&](const Twins& t, Plan& p, void* s) {
               with_memory(t, p,
                           [&] { p.step(Op::adam_step, {by_count, {{1, ahead_by_count}}}, s); });
             }},
            {"stash", [](const Twins&, Plan& p, void* s) { p.copy(p.params, p.stashed, s); }},
        };
        for (const Operation_& operation : all) {
          if (n_terms > 1 && operation.name[0] == 'S') continue;
          if (n_groups == 1000 && (n_terms > 1 || !operation.may_be_long)) continue;
          SCOPED_TRACE(testing::Message() << operation.name << ", " << n_groups << " groups of "
                                          << n_terms << " terms");
          // Neighbours of other groups; the first group has two rows.
          Twins twins(1, std::vector<int64_t>(n_groups + 1, 5), Device{true, 0}, n_groups,
                      {type, type, type, type});
          twins.both(operation, n_groups == 1000 ? 1 : 2);
          stand_in::begin_capture(twins.stream());
          operation.call(twins, *twins.twin, twins.stream());
          const stand_in::Graph graph = stand_in::end_capture(twins.stream());
          stand_in::synchronize();
          twins.set_rate(0.5);
          operation.call(twins, *twins.host, nullptr);
          stand_in::launch(graph, twins.stream());
          twins.expect_equal();
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// The bits of a division in double that is then rounded, with quotients of any size.
TEST(Kernels, DivideTheFactorOfGradientsInTheirArithmetic) {
  std::mt19937_64 random(1);
  const auto any = [&] {
    const float specials[] = {0.0F, -0.0F, INFINITY, NAN, 1.0F, 3e38F, 1.2e-38F, 1e-45F};
    const auto bits = random();
    const auto near = static_cast<uint32_t>(bits & 0x87ffffffU) | 0x38000000U;  // 2^-15 to 2
    return bits >> 60 == 0   ? specials[bits % std::size(specials)]
           : bits >> 63 == 0 ? bit_cast<float>(near)
                             : bit_cast<float>(static_cast<uint32_t>(bits));
  };
  int subnormal = 0;
  for (int i = 0; i < 2'000'000; ++i) {
    const float clip = any();
    const float scale = i % 2 == 0 ? any() : clip * std::ldexp(1.0F + any(), i % 300 - 150);
    const Gate gate{nullptr, &scale, i % 16 == 0 ? nullptr : &clip};
    const double exact = (gate.clip_factor != nullptr ? clip : 1.0) / double{scale};
    const float expected = static_cast<float>(exact), came = gate.factor<float>();
    ASSERT_TRUE(expected != expected ? came != came
                                     : bit_cast<uint32_t>(came) == bit_cast<uint32_t>(expected))
        << clip << " / " << scale;
    ASSERT_TRUE(exact != exact || gate.factor<double>() == exact);
    subnormal += std::fpclassify(came) == FP_SUBNORMAL;
  }
  EXPECT_GT(subnormal, 10'000);
}

TEST(Cuda, LongListsAreOneLaunchFromTheirThirdUseOn) {
  Twins twins(1, kLong);
  for (int use = 0; use < 4; ++use) {
    twins.twin->predict(sgd, terms_of(*twins.twin), twins.twin->outs[0], twins.stream());
    EXPECT_TRUE(use == 1 || (twins.twin->last_launches() == 1) == (use > 1));
  }
}

// A table must not lie where a stream, which the call does not follow, still has work to do.
TEST(Cuda, TablesAreInMemoryThatIsFreeForTheCallsStream) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    Twins twins(seed, kLong, 0, seed % 2 == 0 ? 2 : 4);
    for (const Operation_& operation : operations()) {
      SCOPED_TRACE(operation.name);
      cudaStream_t other = stand_in::new_stream(0);
      // What a tensor of the other stream leaves behind there: free, and about to be written.
      for (const size_t bytes : {size_t{1} << 12, size_t{1} << 15, size_t{1} << 18}) {
        const auto left = twins.pool.lend(bytes, other);
        stand_in::enqueue(other, [at = left->at(), bytes] { memset(at, 0, bytes); });
      }
      twins.both(operation, 3);
      twins.expect_equal();
    }
  }
}

TEST(Cuda, WorkFollowsItsStreamAndWhatThatWaitsFor) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    Twins twins(seed, kLong);
    cudaStream_t streams[] = {twins.stream(), stand_in::new_stream(0)};
    for (int i = 0; i < 4; ++i) {
      for (const Operation_& operation : operations()) twins.both(operation, streams[i % 2]);
      stand_in::order(streams[i % 2], streams[(i + 1) % 2]);
    }
    twins.expect_equal();
  }
}

TEST(Cuda, GraphsCanBeReplayedWhenTheHostsMemoryIsGone) {
  for (const size_t n : {size_t{3}, kLong}) {
    for (const bool warm : {false, true}) {
      for (const Operation_& operation : operations()) {
        if (n == kLong && !warm && !operation.repeats) continue;  // slow, and launched alike
        SCOPED_TRACE(operation.name);
        Twins twins(n, n);
        if (warm) twins.both(operation, 2);
        stand_in::begin_capture(twins.stream());
        operation.call(twins, *twins.twin, twins.stream());
        const stand_in::Graph graph = stand_in::end_capture(twins.stream());
        for (const double x : {0.5, 0.125}) {
          stand_in::synchronize();
          twins.set_rate(x);
          operation.call(twins, *twins.host, nullptr);
          stand_in::launch(graph, twins.stream());
          twins.both(operation, 1);  // between replays, with the plan's own table
        }
        twins.expect_equal();
      }
    }
  }
}

TEST(Cuda, DistancesHaveTheHostsBitsInAndOutOfGraphs) {
  const size_t n = 9, results = 2 * (n + 1);  // barriers are slow here
  Twins twins(1, n);
  std::vector<double> expected(results), came(results);
  std::vector<char> scratch(twins.host->distance_scratch());
  twins.host->distances(expected.data(), scratch.data(), nullptr);
  auto* result = static_cast<double*>(stand_in::allocate(8 * results));
  void* on_device = stand_in::allocate(twins.twin->distance_scratch());
  stand_in::begin_capture(twins.stream());
  twins.twin->distances(result, on_device, twins.stream());
  const stand_in::Graph graph = stand_in::end_capture(twins.stream());
  for (const bool captured : {false, true}) {
    stand_in::write(result, std::vector<double>(results).data(), 8 * results);
    if (captured) {
      stand_in::launch(graph, twins.stream());
    } else {
      twins.twin->distances(result, on_device, twins.stream());
    }
    stand_in::synchronize();
    stand_in::read(came.data(), result, 8 * results);
    EXPECT_EQ(memcmp(came.data(), expected.data(), 8 * results), 0) << captured;
  }
}

// One thread a list, and a block has no more than 1,024.
TEST(Cuda, AnyNumberOfListsHasTotals) {
  constexpr int64_t n = 2, n_lists = 2500;
  stand_in::reset(1);
  std::vector<double> expected(n_lists * (n + 1));
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<double>(i);
  std::vector<double> came = expected;
  auto* result = static_cast<double*>(stand_in::allocate(8 * came.size()));
  stand_in::write(result, came.data(), 8 * came.size());
  for (int64_t j = 0; j < n_lists; ++j) total_distance(&expected[j * (n + 1)], n);
  EXPECT_EQ(total_cuda_distances(result, n, n_lists, 0, stand_in::new_stream(0)), 1);
  stand_in::synchronize();
  stand_in::read(came.data(), result, 8 * came.size());
  EXPECT_EQ(came, expected);
}

// The call that fails says so, no later one does, and it can be made again.
TEST(Cuda, AnyRuntimeCallMayFail) {
  int raised = 0;
  for (const size_t n : {size_t{3}, kLong}) {
    for (const Operation_& operation : operations()) {
      // In place several launches, some of which were done, cannot be made again.
      if (n == kLong && (!operation.repeats || !operation.may_be_long)) continue;
      SCOPED_TRACE(operation.name);
      for (int call = 0;; ++call) {
        Twins twins(call, n, 2);
        stand_in::set_current(1);
        stand_in::fail_call(call);
        for (int use = 0; use < 3; ++use) {
          operation.call(twins, *twins.host, nullptr);
          try {
            operation.call(twins, *twins.twin, twins.stream());
          } catch (const std::runtime_error& error) {
            const std::string text = error.what();
            EXPECT_EQ(text.rfind("CUDA: ", 0), 0u) << text;
            EXPECT_NE(text.find("out of memory"), std::string::npos) << text;
            ++raised;
            operation.call(twins, *twins.twin, twins.stream());
          }
          EXPECT_EQ(stand_in::current(), 1);
        }
        twins.expect_equal();
        if (!stand_in::failed()) break;
      }
    }
  }
  EXPECT_GT(raised, 100);
}

// Between two devices, on a stream of the first: after the work before it, and once.
TEST(Cuda, ACopyFollowsItsStreamAndNeedsNoCurrentDevice) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    stand_in::reset(seed, 3);
    stand_in::set_current(2);
    cudaStream_t streams[] = {stand_in::new_stream(0), stand_in::new_stream(1)};
    constexpr size_t n = 1000;
    auto* from = static_cast<char*>(stand_in::allocate(n));
    auto* to = static_cast<char*>(stand_in::allocate(n));
    for (const char value : {3, 5}) {
      stand_in::enqueue(streams[0], [=] { memset(from, value, n); });
      copy_cuda(to, from, n, 0, streams[0]);
      stand_in::order(streams[0], streams[1]);
      stand_in::enqueue(streams[1],
                        [=] { EXPECT_EQ(std::count(to, to + n, value), ptrdiff_t{n}); });
      stand_in::order(streams[1], streams[0]);
    }
    stand_in::synchronize();
    EXPECT_EQ(stand_in::current(), 2);
    EXPECT_EQ(stand_in::contexts(), (std::set<int>{0, 2}));
    stand_in::fail_call(0);
    EXPECT_THROW(copy_cuda(to, from, n, 0, streams[0]), std::runtime_error);
    copy_cuda(to, from, n, 0, streams[0]);
  }
}

TEST(Cuda, ACallLeavesTheThreadsContextAndMakesNoOther) {
  for (const int before : {-1, 0, 1}) {
    Twins twins(1, 3, 1);
    stand_in::set_current(before);
    std::set<int> expected = {1};
    if (before >= 0) expected.insert(before);
    for (const Operation_& operation : operations()) {
      operation.call(twins, *twins.twin, twins.stream());
      EXPECT_EQ(stand_in::current(), before) << operation.name;
    }
    EXPECT_EQ(stand_in::contexts(), expected);
  }
}

TEST(Cuda, WhatCannotBeDoneIsRefused) {
  Twins twins(1, 3);
  EXPECT_THROW(DeviceGuard(7), std::runtime_error);
  EXPECT_EQ(stand_in::contexts(), std::set<int>{});
  cudaStream_t elsewhere = stand_in::new_stream(1);
  try {
    twins.twin->swap_(elsewhere);
    FAIL() << "a stream of another device";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "CUDA: invalid resource handle (cuda:0)");
  }
  // While a graph is captured elsewhere the default stream can be used by nobody.
  stand_in::begin_capture(elsewhere);
  EXPECT_FALSE(cuda_is_capturing(0, nullptr));
  EXPECT_THROW(twins.twin->swap_(nullptr), std::runtime_error);
  stand_in::end_capture(elsewhere);
  twins.host->swap_(nullptr);
  twins.twin->swap_(nullptr);
  twins.expect_equal();
}

}  // namespace spectrain
