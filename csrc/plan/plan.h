// A plan: matching lists of arrays, resolved to kernel tables. Independent of any framework: it
// takes addresses and element types, and launches kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace spectrain {

struct Device {
  bool cuda = false;
  int index = 0;
  bool operator==(const Device& other) const { return cuda == other.cuda && index == other.index; }
  std::string text() const { return cuda ? "cuda:" + std::to_string(index) : "cpu"; }
};

// One list of arrays: an address and an element type for every parameter. No addresses: absent. A
// null address: the gradient is None.
struct Column {
  std::vector<void*> at;
  std::vector<DType> dtype;
  bool present() const { return !at.empty(); }
};

// Thrown if no kernel supports these element types together.
struct UnsupportedTypes : std::invalid_argument {
  UnsupportedTypes(size_t item_, KernelKey key_)
      : std::invalid_argument("no kernel takes these element types together"),
        item(item_),
        key(key_) {}
  size_t item;
  KernelKey key;
};

// Memory on the plan's device from a framework's allocator, returned on destruction.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual void* at() const = 0;
  // Work on this stream uses the memory too: it must not be reused before that work is done.
  virtual void used_on(void* stream) = 0;
};

class Plan {
 public:
  // `sizes`: elements of every parameter; `groups`: index of its setting.
  Plan(Device device, std::vector<int64_t> sizes, std::vector<uint16_t> groups);

  Column params, momentum, second, stashed, grads;
  std::vector<Column> outs;
  // The list of a role other than `out`.
  static Column Plan::* column(Role role) {
    return role == Role::params     ? &Plan::params
           : role == Role::grads    ? &Plan::grads
           : role == Role::momentum ? &Plan::momentum
           : role == Role::second   ? &Plan::second
                                    : &Plan::stashed;
  }

  // The numbers in memory of every group, for the next calls; empty: none.
  std::vector<Source> sources;

  // Allocates device memory for tables, aligned to at least 16 bytes, for work on a stream. Earlier
  // uses of the memory have completed when that work begins.
  std::function<std::unique_ptr<DeviceMemory>(size_t bytes, void* stream)> allocate;
  // Keep long tables on the device. Does not pay off for a single use.
  bool keep_tables = false;

  // After a step was captured in a CUDA graph, gradients must not move.
  void pin_gradients() { gradients_pinned_ = true; }
  bool gradients_pinned() const { return gradients_pinned_; }

  // Whether every item has a gradient.
  bool all_gradients() const;
  // Call after `grads` changed: tables with gradients are then resolved again at their next use.
  void gradients_changed();

  // The terms of one prediction, for every group. No terms: copy the bits of the weights.
  using Terms = std::vector<std::vector<Term>>;
  struct Prediction {
    size_t out;  // index into outs
    Terms terms;
  };

  // The operation of a prediction, and its settings' eps for every group; none: 0.
  struct Predictor {
    Operation operation;
    std::vector<double> eps = {};
  };
  void predict(const Predictor&, const Terms&, const Column& out, void* stream);
  void stash_predict_(const Predictor&, const Terms&, void* stream);
  void extrapolate(double steps, const Column& out, void* stream);
  void copy(const Column& from, const Column& to, void* stream);
  void swap_(void* stream);

  // The caller has checked the options: weights are bfloat16 for stochastic rounding, and gradients
  // are writable if they are set to zero.
  struct Step {
    std::vector<Setting> settings;  // of every group
    std::vector<Prediction> predictions = {};
    StepOptions options = {};
    std::vector<uint8_t> first_step = {};  // none, or one per tensor instead of the settings' flag
  };
  void step(Operation, Step, void* stream);

  // Squared distances of the weights from every list of `outs`, in double: result[j*(n + 1) + i] is
  // |outs[j][i] - params[i]|^2, followed by their sum. Entries of empty tensors are not written.
  // `scratch` has distance_scratch() bytes. The same bits on every machine.
  void distances(double* result, void* scratch, void* stream);
  size_t distance_scratch() const;

  Device device() const { return device_; }
  size_t size() const { return sizes_.size(); }
  int64_t size_of_item(size_t i) const { return sizes_[i]; }
  size_t n_groups() const { return n_groups_; }
  // Kernel launches and merged rows of the last call, for tests.
  int last_launches() const { return last_launches_; }
  int64_t last_rows() const { return last_rows_; }

 private:
  // The table of one kernel.
  struct Table {
    KernelKey key;
    std::vector<Row> rows;
    std::vector<void*> pointers;
    std::vector<int> widths;  // bytes an element, per stream
    uint32_t n_chunks = 0;
    int64_t bytes = 0;
    CpuKernel cpu = nullptr;
    CudaKernel cuda;
    int uses = 0;
    std::unique_ptr<DeviceMemory> memory;
    bool written = false;  // to the device, by enqueued work
  };
  using Tables = std::vector<Table>;

  // Which items a table includes.
  enum class Which { all, with_gradient, without_gradient };

  struct Request {
    Operation operation;
    std::vector<const Column*> streams;
    Which which = Which::all;
    std::vector<uint8_t> first_step = {};
    // Adds to each row the position of its first element among all elements of the items.
    bool positions = false;
    bool operator==(const Request& other) const {
      return operation == other.operation && streams == other.streams && which == other.which &&
             first_step == other.first_step && positions == other.positions;
    }
  };
  struct Resolved {
    Request request;
    Tables tables;
    bool holds_gradients;
    bool captured = false;  // a CUDA graph reads its memory: keep it alive
  };

  // A kernel (one per combination of element types) and its arguments.
  struct Call {
    Request request;
    std::vector<Setting> settings;
    StepOptions options = {};
  };

  Resolved& resolve(const Request& request);
  Tables build(const Request& request) const;
  Table& table_for(Tables& tables, const Request& request, size_t item) const;
  Call copy_call(const Column& from, const Column& to, Which which) const;
  // Returns nothing if the prediction equals the weights and is written in place.
  std::vector<Call> predict_calls(const Predictor&, const Terms&, const Column& out,
                                  Which which) const;
  // The lists of an operation's streams, and of its extra output; `out`: where a prediction goes.
  std::vector<const Column*> streams(Operation operation, const Column* out = nullptr) const;
  // Whether a step rounds second moments stochastically.
  bool rounds_second(Operation operation, const std::vector<Setting>& settings) const;
  // Resolves all calls before the first runs, so that an error changes nothing.
  void run(std::vector<Call> calls, void* stream);
  void run_one(const Call& call, bool capturing, void* stream);
  int run_cuda(Table& table, const TableView& rows, Settings settings, bool capturing,
               void* stream);

  Device device_;
  std::vector<int64_t> sizes_;
  std::vector<uint16_t> groups_;
  size_t n_groups_ = 1;
  std::vector<std::unique_ptr<Resolved>> resolved_;
  bool gradients_pinned_ = false;
  int last_launches_ = 0;
  int64_t last_rows_ = 0;
};

}  // namespace spectrain
