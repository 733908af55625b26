// Plans on a device, launched by the real launch code on the stand-in for the CUDA runtime: their
// results are those of the same plan on the CPU, in whatever order the streams' work is done, in
// captured graphs, and after calls that failed.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "kernels/cuda/device.h"
#include "kernels/cuda/launch.h"
#include "plan/plan.h"
#include "stand_in/control.h"

namespace spectrain {
namespace {

constexpr int kSeeds = 3;
constexpr size_t kLong = 300;  // rows that are more than a kernel's parameters hold

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

// One list of float32 arrays on the host and the same on the device, none beside another.
struct List {
  std::vector<std::vector<float>> host;
  Column on_host, on_device;

  void make(const std::vector<int64_t>& sizes, std::mt19937_64& random, bool positive) {
    std::normal_distribution<float> normal;
    for (const int64_t n : sizes) {
      std::vector<float> values(static_cast<size_t>(n));
      for (float& x : values) x = positive ? std::abs(normal(random)) : normal(random);
      host.push_back(std::move(values));
    }
    const stand_in::Access access;
    for (std::vector<float>& values : host) {
      on_host.at.push_back(values.data());
      on_device.at.push_back(stand_in::allocate(4 * values.size(), on_host.at.size() % 4 * 4));
      stand_in::write(on_device.at.back(), values.data(), 4 * values.size());
    }
    on_host.dtype.assign(sizes.size(), DType::float32);
    on_device.dtype = on_host.dtype;
  }
  void expect_equal(const char* name) const {
    const stand_in::Access access;
    for (size_t i = 0; i < host.size(); ++i) {
      std::vector<float> came(host[i].size());
      stand_in::read(came.data(), on_device.at[i], 4 * came.size());
      ASSERT_EQ(memcmp(came.data(), host[i].data(), 4 * came.size()), 0) << name << "[" << i << "]";
    }
  }
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

// A plan on the host and its twin on a device.
class Twins {
 public:
  Twins(uint64_t seed, size_t n, int device_index = 0, uint16_t n_groups = 2)
      : sizes(sizes_of(n)), stream_(fresh(seed, device_index)) {
    std::mt19937_64 random(seed);
    std::vector<uint16_t> groups;
    for (size_t i = 0; i < n; ++i) groups.push_back(static_cast<uint16_t>(i % n_groups));
    for (const char* name : {"params", "grads", "momentum", "second", "stashed", "out0", "out1"}) {
      lists[name].make(sizes, random, std::string(name) == "second");
    }
    host = plan_of(Device{}, groups, [this](const char* name) { return lists[name].on_host; });
    device = plan_of(Device{true, device_index}, groups,
                     [this](const char* name) { return lists[name].on_device; });
    device->allocate = [this](size_t bytes, void* stream) { return pool.lend(bytes, stream); };
    number_on_device = static_cast<double*>(stand_in::allocate(sizeof(double)));
    set_number(0.25);
  }
  void set_number(double x) {
    number = x;
    stand_in::write(number_on_device, &x, sizeof(x));
  }
  const void* number_of(const Plan& plan) const {
    return &plan == host.get() ? &number : number_on_device;
  }
  cudaStream_t stream() const { return stream_; }
  // An operation on the host, and on a stream of the device.
  void both(const Operation_& operation, cudaStream_t on) {
    operation.call(*this, *host, nullptr);
    operation.call(*this, *device, on);
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
  std::unique_ptr<Plan> host, device;
  double number = 0.0;
  double* number_on_device = nullptr;

 private:
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
std::vector<Setting> settings_of(const Plan& plan, double lr = 0.1) {
  return std::vector<Setting>(plan.n_groups(), setting(lr));
}
Plan::Terms terms_of(const Plan& plan, double lr = 0.1) {
  return Plan::Terms(plan.n_groups(), {Term{1.0, 2 * lr, 0.0, 1.0}});
}
Plan::Family adam(const Plan& plan) { return {true, std::vector<double>(plan.n_groups(), 1e-8)}; }

// With a learning rate that the kernel reads in memory.
void with_rate(const Twins& twins, Plan& plan, const std::function<void()>& call) {
  plan.rates.assign(plan.n_groups(), {twins.number_of(plan), true});
  plan.rates.back() = {};  // the last group has a number
  call();
  plan.rates = {};
}

// A step by lr and its prediction with decoupled decay, lr in memory.
constexpr Term kByRate{1.0, 0.0, 0.0, 1.0, -0.01, 1.0, 0.0};
constexpr Term kAheadByRate{1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 0.0};

const std::vector<Operation_>& operations() {
  static const std::vector<Operation_> list = {
      {"predict", [](const Twins&, Plan& p, void* s) { p.predict({}, terms_of(p), p.outs[0], s); },
       true, true},
      {"predict of Adam",
       [](const Twins&, Plan& p, void* s) { p.predict(adam(p), terms_of(p), p.outs[1], s); }, true},
      {"predict, a learning rate in memory",
       [](const Twins& t, Plan& p, void* s) {
         Plan::Terms terms = terms_of(p);
         terms[0] = {kAheadByRate};
         with_rate(t, p, [&] { p.predict({}, terms, p.outs[0], s); });
       },
       true, true},
      {"predict in place",
       [](const Twins&, Plan& p, void* s) { p.predict({}, terms_of(p), p.params, s); }},
      {"stash", [](const Twins&, Plan& p, void* s) { p.copy(p.params, p.stashed, s); }, true},
      {"swap", [](const Twins&, Plan& p, void* s) { p.swap_(s); }},
      {"stash and predict",
       [](const Twins&, Plan& p, void* s) { p.stash_predict_({}, terms_of(p), s); }},
      {"extrapolate", [](const Twins&, Plan& p, void* s) { p.extrapolate(2.0, p.outs[1], s); },
       true},
      {"SGD step",
       [](const Twins&, Plan& p, void* s) {
         p.sgd_step_({settings_of(p), {{0, terms_of(p)}, {1, terms_of(p, 0.3)}}}, {}, true, s);
       }},
      {"SGD step, a learning rate in memory",
       [](const Twins& t, Plan& p, void* s) {
         std::vector<Setting> settings = settings_of(p);
         settings[0].step = kByRate;
         Plan::Terms terms = terms_of(p);
         terms[0] = {kAheadByRate};
         with_rate(t, p,
                   [&] { p.sgd_step_({settings, {{0, terms}, {1, terms_of(p)}}}, {}, true, s); });
       }},
      {"Adam step", [](const Twins&, Plan& p,
                       void* s) { p.adam_step_({settings_of(p), {{0, terms_of(p)}}}, s); }},
  };
  return list;
}

}  // namespace

TEST(Cuda, EveryOperationDoesWhatItDoesOnTheHost) {
  for (const size_t n : {size_t{3}, kLong}) {
    for (const uint16_t groups : {uint16_t{2}, uint16_t{4}}) {
      Twins twins(n, n, 0, groups);
      for (const Operation_& operation : operations()) {
        SCOPED_TRACE(operation.name);
        twins.both(operation, 3);
        twins.expect_equal();
      }
    }
  }
}

TEST(Cuda, LongListsAreOneLaunchFromTheirThirdUseOn) {
  Twins twins(1, kLong);
  for (int use = 0; use < 4; ++use) {
    twins.device->predict({}, terms_of(*twins.device), twins.device->outs[0], twins.stream());
    EXPECT_TRUE(use == 1 || (twins.device->last_launches() == 1) == (use > 1));
  }
}

// A table must not lie where a stream, which the call does not follow, still has work to do.
TEST(Cuda, TablesAreInMemoryThatIsFreeForTheCallsStream) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    Twins twins(seed, kLong);
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
        SCOPED_TRACE(operation.name);
        Twins twins(n, n);
        if (warm) twins.both(operation, 2);
        stand_in::begin_capture(twins.stream());
        operation.call(twins, *twins.device, twins.stream());
        const stand_in::Graph graph = stand_in::end_capture(twins.stream());
        for (const double x : {0.5, 0.125}) {
          stand_in::synchronize();
          twins.set_number(x);
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
  void* on_device = stand_in::allocate(twins.device->distance_scratch());
  stand_in::begin_capture(twins.stream());
  twins.device->distances(result, on_device, twins.stream());
  const stand_in::Graph graph = stand_in::end_capture(twins.stream());
  for (const bool captured : {false, true}) {
    stand_in::write(result, std::vector<double>(results).data(), 8 * results);
    if (captured) {
      stand_in::launch(graph, twins.stream());
    } else {
      twins.device->distances(result, on_device, twins.stream());
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
  cudaStream_t stream = stand_in::new_stream(0);
  std::vector<double> expected(n_lists * (n + 1));
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<double>(i);
  std::vector<double> came = expected;
  auto* result = static_cast<double*>(stand_in::allocate(8 * expected.size()));
  stand_in::write(result, came.data(), 8 * came.size());
  for (int64_t j = 0; j < n_lists; ++j) total_distance(&expected[j * (n + 1)], n);
  EXPECT_EQ(total_cuda_distances(result, n, n_lists, 0, stream), 1);
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
        Twins twins(call, n, 2);  // a device that no other test uses: it is asked for its size
        stand_in::set_current(1);
        stand_in::fail_call(call);
        for (int use = 0; use < 3; ++use) {
          operation.call(twins, *twins.host, nullptr);
          try {
            operation.call(twins, *twins.device, twins.stream());
          } catch (const std::runtime_error& error) {
            const std::string text = error.what();
            EXPECT_EQ(text.rfind("CUDA: ", 0), 0u) << text;
            EXPECT_NE(text.find("out of memory"), std::string::npos) << text;
            ++raised;
            operation.call(twins, *twins.device, twins.stream());
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

TEST(Cuda, ACallLeavesTheThreadsContextAndMakesNoOther) {
  for (const int before : {-1, 0, 1}) {
    Twins twins(1, 3, 1);
    stand_in::set_current(before);
    std::set<int> expected = {1};
    if (before >= 0) expected.insert(before);
    for (const Operation_& operation : operations()) {
      operation.call(twins, *twins.device, twins.stream());
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
    twins.device->swap_(elsewhere);
    FAIL() << "a stream of another device";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "CUDA: invalid resource handle (cuda:0)");
  }
  // While a graph is captured elsewhere the default stream can be used by nobody.
  stand_in::begin_capture(elsewhere);
  EXPECT_FALSE(cuda_is_capturing(0, nullptr));
  EXPECT_THROW(twins.device->swap_(nullptr), std::runtime_error);
  stand_in::end_capture(elsewhere);
  twins.host->swap_(nullptr);
  twins.device->swap_(nullptr);
  twins.expect_equal();
}

}  // namespace spectrain
