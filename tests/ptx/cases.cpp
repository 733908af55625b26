#include "cases.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>

#include "elements.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/units.h"
#include "plan/plan.h"

namespace cases {
namespace {

using namespace spectrain;
using Random = std::mt19937_64;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

bool chance(Random& random, int one_of) { return random() % static_cast<uint64_t>(one_of) == 0; }
int64_t between(Random& random, int64_t first, int64_t last) {
  return first + static_cast<int64_t>(random() % static_cast<uint64_t>(last - first + 1));
}

// --- memory ---

class Memory : public DeviceMemory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&at_, std::max<size_t>(bytes, 1)));
  }
  ~Memory() override { cudaFree(at_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* at() const override { return at_; }
  void used_on(void*) override {}
  void write(const void* from, size_t bytes, size_t at = 0) {
    check(cudaMemcpy(static_cast<char*>(at_) + at, from, bytes, cudaMemcpyHostToDevice));
  }
  std::vector<char> read() const {
    std::vector<char> bytes(bytes_);
    check(cudaMemcpy(bytes.data(), at_, bytes_, cudaMemcpyDeviceToHost));
    return bytes;
  }

 private:
  void* at_ = nullptr;
  size_t bytes_;
};

// --- lists ---

enum class Layout { apart, flat, shifted, scattered };

// One list of arrays: on the host, and in one allocation each or one for all on the device.
struct List {
  std::string name;
  DType type;
  Column on_host, on_device;
  std::vector<std::vector<char>> arrays;
  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<std::pair<size_t, size_t>> places;  // of every array: its memory, and bytes in it

  List(std::string name_, DType type_, const std::vector<int64_t>& sizes, Layout layout, int skew,
       bool positive, bool special, Random& random)
      : name(std::move(name_)), type(type_) {
    const auto width = static_cast<size_t>(size_of(type));
    std::vector<size_t> order(sizes.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    places.resize(sizes.size());
    size_t end = 0;
    if (layout == Layout::scattered) std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) {
      const size_t bytes = static_cast<size_t>(sizes[i]) * width;
      if (layout == Layout::flat || layout == Layout::scattered) {
        if (layout == Layout::scattered) end += static_cast<size_t>(between(random, 0, 9)) * width;
        places[i] = {0, end};
        end += bytes;
      } else {
        const size_t shift =
            layout == Layout::shifted ? (i + static_cast<size_t>(skew)) % 5 * width : 0;
        places[i] = {memory.size(), shift};
        memory.push_back(std::make_unique<Memory>(shift + bytes));
      }
    }
    if (memory.empty()) memory.push_back(std::make_unique<Memory>(end));
    for (size_t i = 0; i < sizes.size(); ++i) {
      std::vector<char>& bytes = arrays.emplace_back(static_cast<size_t>(sizes[i]) * width);
      for (size_t at = 0; at < bytes.size(); at += width) {
        const double x = elements::number(random, special);
        elements::store(&bytes[at], type, positive ? std::fabs(x) : x);
      }
      on_host.at.push_back(bytes.data());
      const auto& [k, at] = places[i];
      on_device.at.push_back(static_cast<char*>(memory[k]->at()) + at);
      if (!bytes.empty()) memory[k]->write(bytes.data(), bytes.size(), at);
    }
    on_host.dtype = on_device.dtype = std::vector<DType>(sizes.size(), type);
  }

  // Throws for the first element that differs.
  void compare(bool to_the_bit) const {
    std::vector<std::vector<char>> came;
    for (const auto& m : memory) came.push_back(m->read());
    const auto width = static_cast<size_t>(size_of(type));
    for (size_t i = 0; i < arrays.size(); ++i) {
      const char* other = came[places[i].first].data() + places[i].second;
      for (size_t at = 0; at < arrays[i].size(); at += width) {
        const char* own = arrays[i].data() + at;
        if (to_the_bit ? memcmp(own, other + at, width) == 0
                       : elements::agree(own, other + at, type)) {
          continue;
        }
        throw std::runtime_error(name + "[" + std::to_string(i) + "], element " +
                                 std::to_string(at / width) + ": the CPU has " + hex(own, width) +
                                 ", the device " + hex(other + at, width));
      }
    }
  }

  static std::string hex(const char* from, size_t n) {
    std::string text = "0x";
    char two[3];
    for (size_t k = n; k-- > 0;) {
      snprintf(two, sizeof(two), "%02x", static_cast<unsigned char>(from[k]));
      text += two;
    }
    return text;
  }
};

// --- a case ---

// The longest takes the most time, as it has a block for every row: of the first seeds only a few
// rules have it.
enum class Shape { edges, chunks, rows, groups, beyond_parameters };
constexpr Shape kShapes[] = {Shape::edges, Shape::groups, Shape::chunks, Shape::rows,
                             Shape::edges, Shape::groups, Shape::chunks, Shape::beyond_parameters};

Shape shape_of(const Case& given) {
  const Shape shape = kShapes[given.seed % std::size(kShapes)];
  const auto& [operation, w, g, s, o] = given.key;
  const bool chosen = w == DType::float32 && g == w && s == w && o == w &&
                      (operation == Operation::copy || operation == Operation::sgd_step ||
                       operation == Operation::adam_step);
  const bool first = given.seed < std::size(kShapes);
  return shape == Shape::beyond_parameters && first && !chosen ? Shape::rows : shape;
}

// `row_bytes`: of a row in a table.
std::vector<int64_t> sizes_of(Shape shape, int64_t row_bytes, Random& random) {
  constexpr int64_t edges[] = {0, 1, 3, 7, 8, 9, 31, 1023, 1025, 4101};
  if (shape == Shape::edges) {
    std::vector<int64_t> sizes(std::begin(edges), std::end(edges));
    std::shuffle(sizes.begin(), sizes.end(), random);
    return sizes;
  }
  if (shape == Shape::chunks) {
    return {between(random, 3, 5) * kChunk + between(random, 0, 9), kChunk, kChunk - 1};
  }
  // More rows than the smaller or the larger size of a kernel's parameters holds.
  const int64_t n = shape == Shape::rows     ? kSmallTable / row_bytes + 1
                    : shape == Shape::groups ? between(random, 40, 72)
                                             : kLargeTable / row_bytes + between(random, 1, 30);
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < n; ++i) sizes.push_back(between(random, 1, 17));
  return sizes;
}

Setting drawn_setting(Random& random) {
  Setting s;
  s.sign = chance(random, 4) ? -1.0 : 1.0;
  s.weight_decay = chance(random, 2) ? 0.01 : 0.0;
  s.decay = chance(random, 6) ? 0.0 : 0.9;
  s.gain = chance(random, 2) ? 1.0 : 0.1;
  s.decay2 = chance(random, 2) ? 0.99 : 0.999;  // the latter rounds bfloat16 stochastically
  s.count = static_cast<double>(between(random, 1, 4000));
  s.eps = chance(random, 4) ? 0.0 : 1e-8;
  s.first_step = chance(random, 6);
  s.step = {chance(random, 2) ? 1.0 : 0.999, 0.1, chance(random, 3) ? 0.05 : 0.0,
            chance(random, 2) ? 1.0 : 1.25};
  return s;
}

// Coefficients with zeros, which are special to the rules.
Term drawn_term(Random& random, bool with_gradient) {
  return {chance(random, 2) ? 1.0 : 0.998, chance(random, 6) ? 0.0 : 0.03,
          with_gradient && chance(random, 2) ? 0.02 : 0.0, chance(random, 2) ? 1.0 : 1.1};
}

uint64_t seed_of(const Case& given) {
  const auto& [operation, w, g, s, o] = given.key;
  uint64_t seed = given.seed;
  for (const int part : {static_cast<int>(operation), static_cast<int>(w), static_cast<int>(g),
                         static_cast<int>(s), static_cast<int>(o)}) {
    seed = Rounding::mix(seed * 16 + static_cast<uint64_t>(part) + 1);
  }
  return seed;
}

class Call {
 public:
  Call(const Case& given, bool clear_tables)
      : case_(given), random_(seed_of(given)), shape_(shape_of(given)) {
    const bool distances = case_.key.operation == Operation::none;
    const bool several_outs = row_of_case().has_outs;
    const bool long_lists = shape_ == Shape::beyond_parameters || shape_ == Shape::chunks;
    n_outs_ = distances      ? (chance(random_, 8) ? 300 : 1 + random_() % 3)
              : several_outs ? static_cast<size_t>(between(random_, 0, long_lists ? 2 : 10))
                             : 1;
    const size_t n_streams = row_of_case().n_streams + (several_outs ? n_outs_ : 0);
    sizes_ =
        sizes_of(shape_, static_cast<int64_t>(sizeof(Row) + n_streams * sizeof(void*)), random_);
    if (n_outs_ > 10) sizes_ = {1, 5};
    // An allocation for each of many arrays takes long on a device, and neighbours would be one
    // row.
    const Layout layout = is_long() ? Layout::scattered : static_cast<Layout>(random_() % 4);
    const bool special = chance(random_, 2);
    n_groups_ = shape_ == Shape::groups
                    ? static_cast<size_t>(between(random_, 12, chance(random_, 3) ? 130 : 64))
                    : 1 + random_() % 3;
    const auto& [operation, w, g, s, o] = given.key;
    (void)operation;
    const auto add = [&](const std::string& name, DType type, bool positive = false) {
      const int skew = static_cast<int>(lists_.size());
      lists_.push_back(
          std::make_unique<List>(name, type, sizes_, layout, skew, positive, special, random_));
    };
    add("params", w);
    add("grads", g);
    add("momentum", s);
    add("second", s, true);
    add("stashed", w);
    for (size_t j = 0; j < n_outs_; ++j) add("out " + std::to_string(j), o);
    std::vector<uint16_t> groups;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      groups.push_back(
          static_cast<uint16_t>(chance(random_, 3) ? random_() % n_groups_ : i % n_groups_));
    }
    groups.back() = static_cast<uint16_t>(n_groups_ - 1);
    scalars_.write(&numbers_, sizeof(numbers_));
    host_ = plan(Device{}, groups);
    device_ = plan(Device{true, 0}, groups);
    device_->allocate = [clear_tables](size_t bytes, void*) {
      auto memory = std::make_unique<Memory>(bytes);
      if (clear_tables) memory->write(std::vector<char>(bytes).data(), bytes);
      return memory;
    };
    host_->keep_tables = device_->keep_tables =
        shape_ == Shape::beyond_parameters || !chance(random_, 4);
    draw();
  }

  void run() {
    cudaStream_t streams[2];
    cudaEvent_t event;
    for (cudaStream_t& s : streams) check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaStream_t stream = streams[0];
    const bool captured = case_.key.operation != Operation::none && chance(random_, 3);
    // Long tables stay on the device from their second use on.
    const bool stays = shape_ == Shape::beyond_parameters;
    const int64_t uses = stays ? 2 : between(random_, 1, 3);
    for (int64_t use = 0; use < uses; ++use) {
      call(*host_, nullptr);
      call(*device_, stream);
      if (chance(random_, 2)) {  // goes on on another stream, which follows
        check(cudaEventRecord(event, stream));
        stream = streams[stream == streams[0]];
        check(cudaStreamWaitEvent(stream, event, 0));
      }
      if (!stays && use + 1 < uses && chance(random_, 2)) move_gradients();
    }
    if (captured) replay(stream);
    check(cudaDeviceSynchronize());
    const bool copies =
        case_.key.operation == Operation::copy || case_.key.operation == Operation::swap;
    for (const auto& list : lists_) list->compare(copies);
    check(cudaEventDestroy(event));
    for (cudaStream_t s : streams) check(cudaStreamDestroy(s));
  }

 private:
  struct Numbers {
    double rate = 0.25, count = 1.0;
    float zero = 0.0F, one = 1.0F, scale = 3.7F, clip = 0.3F;
  };

  const OperationRow& row_of_case() const {
    static constexpr OperationRow none{"distances", Operation::none, nullptr, 0, false, false};
    return case_.key.operation == Operation::none ? none : row_of(case_.key.operation);
  }

  bool is_adam() const { return row_of_case().has(Role::second); }

  bool is_long() const { return shape_ == Shape::rows || shape_ == Shape::beyond_parameters; }

  std::unique_ptr<Plan> plan(Device where, const std::vector<uint16_t>& groups) {
    auto made = std::make_unique<Plan>(where, sizes_, groups);
    const auto column = [&](size_t i) {
      return where.cuda ? lists_[i]->on_device : lists_[i]->on_host;
    };
    made->params = column(0);
    made->grads = column(1);
    made->momentum = column(2);
    made->second = column(3);
    made->stashed = column(4);
    for (size_t j = 0; j < n_outs_; ++j) made->outs.push_back(column(5 + j));
    return made;
  }

  void draw() {
    for (size_t g = 0; g < n_groups_; ++g) settings_.push_back(drawn_setting(random_));
    for (size_t i = 0; i < sizes_.size(); ++i) first_step_.push_back(chance(random_, 3));
    reads_memory_ = row_of_case().reads_memory && chance(random_, 3);
    in_place_ = chance(random_, 4) && case_.key.o == case_.key.w;
    skips_ = chance(random_, 6);
    gate_ = static_cast<unsigned>(random_() % 8);
    options_.zero_grad = chance(random_, 2);
    const bool rounds = case_.key.w == DType::bfloat16 && chance(random_, 2);
    if (rounds) options_.rounding = Rounding::seeded(random_());
    const bool steps = row_of_case().has(Role::grads), adam = is_adam();
    int64_t left = reads_memory_ ? kMaxTermsFromMemory : kMaxTerms;
    const bool longest = chance(random_, 4);
    for (size_t j = 0; j < std::max<size_t>(n_outs_, 1); ++j) {
      // Later outputs may take passes of their own, which cannot use the gradient.
      const bool with_gradient = j < 2 && (case_.key.operation == Operation::sgd_step ||
                                           case_.key.operation == Operation::lion_step);
      const int64_t most = adam ? (longest ? left : std::min<int64_t>(left, 4)) : 1;
      const int64_t n = most < 1 ? 1 : longest ? most : between(random_, 0, most);
      left -= std::max<int64_t>(n, 1);
      Plan::Terms terms(n_groups_);
      for (auto& group : terms) {
        for (int64_t k = 0; k < n; ++k) {
          group.push_back(drawn_term(random_, with_gradient || (adam && j == 0 && k == 0)));
        }
        if (n > 1 && chance(random_, 4)) group.pop_back();
      }
      terms_.push_back(terms);
    }
    if (reads_memory_) use_memory();
    if (steps && !is_long() && chance(random_, 3)) move_gradients();
  }

  // The coefficients are numbers plus multiples of a rate in memory, and for Adam have its bias
  // corrections by a count in memory, except in the last group.
  void use_memory() {
    for (size_t g = 0; g + 1 < n_groups_ || g == 0; ++g) {
      settings_[g].step = {1.0, 0.0, 0.0, 1.0, -0.01, 1.0, 0.0, is_adam() ? 0.0 : -1.0};
      for (Plan::Terms& terms : terms_) {
        for (Term& t : terms[g]) {
          t.momentum = 0.0, t.momentum_per_lr = 2.0;
          if (is_adam()) t.ahead = static_cast<double>(between(random_, 0, 5));
        }
      }
      Source source{{nullptr, true, 0.5},
                    chance(random_, 2) ? 1.0 : 0.7,
                    {nullptr, true, 7.0},
                    settings_[g].decay,
                    settings_[g].decay2};
      sources_.push_back(source);
      which_.push_back(static_cast<unsigned>(between(random_, 1, 3)));
    }
  }

  // Other tensors have a gradient now: most, or few, as of a mixture's experts.
  void move_gradients() {
    const bool few = chance(random_, 2);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const bool missing = few ? !chance(random_, 8) : chance(random_, 3);
      host_->grads.at[i] = missing ? nullptr : lists_[1]->on_host.at[i];
      device_->grads.at[i] = missing ? nullptr : lists_[1]->on_device.at[i];
    }
    host_->gradients_changed();
    device_->gradients_changed();
  }

  void replay(cudaStream_t stream) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    call(*device_, stream);
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    for (const double rate : {0.5, 0.125}) {
      check(cudaDeviceSynchronize());
      numbers_.rate = rate;
      numbers_.count += 1.0;
      scalars_.write(&numbers_, sizeof(numbers_));
      call(*host_, nullptr);
      check(cudaGraphLaunch(executable, stream));
    }
    check(cudaDeviceSynchronize());
    check(cudaGraphExecDestroy(executable));
    check(cudaGraphDestroy(graph));
  }

  StepOptions options_of(const Plan& p) const {
    const Numbers& at = p.device().cuda ? *static_cast<const Numbers*>(scalars_.at()) : numbers_;
    StepOptions options = options_;
    if ((gate_ & 1) != 0) options.gate.found_inf = skips_ ? &at.one : &at.zero;
    if ((gate_ & 2) != 0) options.gate.grad_scale = &at.scale;
    if ((gate_ & 4) != 0) options.gate.clip_factor = &at.clip;
    return options;
  }

  void call(Plan& p, cudaStream_t stream) {
    if (reads_memory_) {
      const Numbers& at = p.device().cuda ? *static_cast<const Numbers*>(scalars_.at()) : numbers_;
      p.sources = sources_;
      for (size_t g = 0; g < p.sources.size(); ++g) {
        if ((which_[g] & 1) != 0) p.sources[g].lr.at = &at.rate;
        if ((which_[g] & 2) != 0) p.sources[g].count.at = &at.count;
      }
      p.sources.resize(n_groups_);
    }
    const Column& out = in_place_ || p.outs.empty() ? p.params : p.outs[0];
    switch (case_.key.operation) {
      case Operation::copy:
        return p.copy(p.params, p.stashed, stream);
      case Operation::cast:
        return p.copy(p.params, p.outs[0], stream);
      case Operation::swap:
        return p.swap_(stream);
      case Operation::extrapolate:
        return p.extrapolate(2.0, p.outs[0], stream);
      case Operation::sgd_predict:
        return p.predict({Operation::sgd_predict}, terms_[0], out, stream);
      case Operation::sgd_stash_predict:
        return p.stash_predict_({Operation::sgd_predict}, terms_[0], stream);
      case Operation::adam_predict:
        return p.predict({Operation::adam_predict, eps()}, terms_[0], out, stream);
      case Operation::lion_predict:
        return p.predict({Operation::lion_predict}, terms_[0], out, stream);
      case Operation::none:
        return distances(p, stream);
      default: {
        Plan::Step step{settings_, {}, options_of(p), {}};
        if (case_.key.operation == Operation::sgd_step) step.first_step = first_step_;
        if (row_of_case().has_outs) {
          for (size_t j = 0; j < n_outs_; ++j) step.predictions.push_back({j, terms_[j]});
        }
        return p.step(case_.key.operation, step, stream);
      }
    }
  }

  std::vector<double> eps() const {
    std::vector<double> all;
    for (const Setting& s : settings_) all.push_back(s.eps);
    return all;
  }

  // Sums are double: they are compared here.
  void distances(Plan& p, cudaStream_t stream) {
    const size_t n = n_outs_ * (sizes_.size() + 1);
    if (!p.device().cuda) {
      std::vector<char> scratch(p.distance_scratch());
      sums_.assign(n, 0.0);
      p.distances(sums_.data(), scratch.data(), nullptr);
      return;
    }
    const Memory scratch(p.distance_scratch());
    Memory result(n * sizeof(double));
    result.write(std::vector<double>(n).data(), n * sizeof(double));
    p.distances(static_cast<double*>(result.at()), scratch.at(), stream);
    check(cudaDeviceSynchronize());
    const std::vector<char> came = result.read();
    for (size_t i = 0; i < n; ++i) {
      const char* own = reinterpret_cast<const char*>(&sums_[i]);
      const char* other = &came[i * sizeof(double)];
      if (elements::agree(own, other, DType::float64)) continue;
      throw std::runtime_error("distance " + std::to_string(i) + ": the CPU has " +
                               List::hex(own, 8) + ", the device " + List::hex(other, 8));
    }
  }

  const Case& case_;
  Random random_;
  Shape shape_;
  std::vector<int64_t> sizes_;
  size_t n_groups_ = 1, n_outs_ = 0;
  std::vector<std::unique_ptr<List>> lists_;
  Numbers numbers_;
  Memory scalars_{sizeof(Numbers)};
  std::unique_ptr<Plan> host_, device_;
  std::vector<Setting> settings_;
  std::vector<Plan::Terms> terms_;
  std::vector<uint8_t> first_step_;
  std::vector<Source> sources_;
  std::vector<unsigned> which_;  // of each group's numbers are in memory: rate 1, count 2
  bool reads_memory_ = false, in_place_ = false, skips_ = false;
  unsigned gate_ = 0;
  StepOptions options_;
  std::vector<double> sums_;
};

const char* name_of(DType type) {
  return type == DType::float64   ? "f64"
         : type == DType::float32 ? "f32"
         : type == DType::float16 ? "f16"
                                  : "bf16";
}

}  // namespace

std::string Case::text() const {
  std::string text = name;
  for (const DType type : {key.w, key.g, key.s, key.o}) text += std::string(" ") + name_of(type);
  return text + ", seed " + std::to_string(seed);
}

std::vector<Case> all(uint64_t first, uint64_t seeds) {
  constexpr DType types[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};
  std::vector<Case> found;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    for (int k = 0; k < static_cast<int>(Operation::none); ++k) {
      const auto operation = static_cast<Operation>(k);
      for (const DType w : types) {
        for (const DType g : types) {
          for (const DType s : types) {
            for (const DType o : types) {
              KernelKey key{operation, w, g, s, o};
              // What an operation does not use repeats the parameters' type.
              const OperationRow& row = row_of(operation);
              if ((!row.has(Role::grads) && g != w) || (!row.has(Role::momentum) && s != w)) {
                continue;
              }
              if (!row.has(Role::out) && !row.has_outs && o != w) continue;
              if (find_cuda_kernel(key).launch == nullptr) continue;
              found.push_back({row.name, key, seed});
            }
          }
        }
      }
    }
    for (const DType w : types) found.push_back({"distances", {Operation::none, w, w, w, w}, seed});
  }
  return found;
}

void run(const Case& given, bool clear_tables) {
  try {
    Call(given, clear_tables).run();
  } catch (const std::exception& error) {
    throw std::runtime_error(given.text() + ": " + error.what());
  }
}

}  // namespace cases

// The CPU's kernels for its baseline, whose bits those of other instruction sets are.
namespace spectrain {
CpuKernel find_kernel_baseline(KernelKey);
CpuDistances find_distances_baseline(DType);
CpuKernel find_cpu_kernel(KernelKey key) { return find_kernel_baseline(key); }
CpuDistances find_cpu_distances(DType type) { return find_distances_baseline(type); }
const char* cpu_instruction_set() { return "baseline"; }
}  // namespace spectrain
