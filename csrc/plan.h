// A plan: lists of arrays that belong together, validated once, resolved to tables once per use.
// Framework-free: addresses and element types come in, kernels go out.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"

namespace spectrain {

struct Device {
  bool cuda = false;
  int index = 0;
  bool operator==(const Device& other) const { return cuda == other.cuda && index == other.index; }
};

// One position of the lists: params[i] and everything that belongs to it.
struct Item {
  int64_t size;  // elements
  DType param;
  DType momentum;
};

// Columns of a plan. An absent column is empty; a gradient may be null, nothing else may.
using Column = std::vector<void*>;

class Plan {
 public:
  Plan(Device device, std::vector<Item> items) : device_(device), items_(std::move(items)) {}

  Column params, momentum, stashed, grads;
  std::vector<Column> outs;

  // Call after `grads` changed: tables that hold gradients are resolved again at their next use.
  void gradients_changed();

  void predict_(double lr, double steps, void* stream);
  void predict(double lr, double steps, size_t out, void* stream);
  void stash(void* stream);
  void restore_(void* stream);
  void swap_(void* stream);
  void stash_predict_(double lr, double steps, void* stream);

  struct Prediction {
    double steps;
    size_t out;
  };
  // `first_step`: empty, or one flag per tensor (then hyper.first_step is not used).
  void sgd_step_(Hyper hyper, const std::vector<uint8_t>& first_step,
                 const std::vector<Prediction>& predictions, void* stream);

  Device device() const { return device_; }
  size_t size() const { return items_.size(); }
  const Item& item(size_t i) const { return items_[i]; }
  // Kernel launches and rows after merging that the last call took; tests hold them to account.
  int last_launches() const { return last_launches_; }
  int64_t last_rows() const { return last_rows_; }

 private:
  // The rows of one kernel: what a launcher takes.
  struct Table {
    KernelKey key;
    std::vector<Row> rows;
    std::vector<void*> pointers;
    uint32_t n_streams = 0;
    uint32_t n_chunks = 0;
    int64_t bytes = 0;
    CpuKernel cpu = nullptr;
    CudaKernel cuda = nullptr;
  };
  using Tables = std::vector<Table>;

  // Which items take part in a table.
  enum class Which { all, with_gradient, without_gradient };

  struct Request {
    Operation operation;
    std::vector<const Column*> streams;
    Which which = Which::all;
    std::vector<uint8_t> first_step;
    bool operator==(const Request& other) const {
      return operation == other.operation && streams == other.streams && which == other.which &&
             first_step == other.first_step;
    }
  };
  struct Resolved {
    Request request;
    Tables tables;
    bool holds_gradients;
  };

  const Tables& resolve(const Request& request);
  Tables build(const Request& request) const;
  void run(const Request& request, const Hyper& hyper, void* stream);
  void launch(const Tables& tables, const Hyper& hyper, void* stream);
  void copy(const Column& from, const Column& to, void* stream, Which which = Which::all);

  Device device_;
  std::vector<Item> items_;
  std::vector<std::unique_ptr<Resolved>> resolved_;
  int last_launches_ = 0;
  int64_t last_rows_ = 0;
};

}  // namespace spectrain
