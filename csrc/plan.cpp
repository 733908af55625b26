#include "plan.h"

#include <stdexcept>

#include "cpu/threads.h"
#include "cuda/launch.h"

namespace spectrain {
namespace {

// A parallel region costs about 2 us; below this many bytes one core is done sooner.
constexpr int64_t kParallelBytes = 1 << 18;
// Pure outputs above this size would push what the caller needs next out of a 2 MiB L2 cache.
constexpr int64_t kStreamOutputBytes = 4 << 20;
// Resolved tables kept per plan: a training loop uses two or three kinds of call.
constexpr size_t kMaxResolved = 16;

// The position of the momentum buffer among an operation's streams; -1 where it has none.
int momentum_stream(Operation operation) {
  switch (operation) {
    case Operation::predict:
    case Operation::stash_predict:
      return 1;
    case Operation::sgd_momentum:
      return 2;
    default:
      return -1;
  }
}

char* offset(void* pointer, int64_t bytes) { return static_cast<char*>(pointer) + bytes; }

// Elements until every stream is 16-byte aligned, or -1 if they never are together. Eight elements
// are the period of the narrowest type.
int aligned_head(void* const* pointers, const int* widths, uint32_t n) {
  for (int head = 0; head < 8; ++head) {
    bool aligned = true;
    for (uint32_t s = 0; s < n; ++s) {
      aligned &= reinterpret_cast<uintptr_t>(offset(pointers[s], head * widths[s])) % 16 == 0;
    }
    if (aligned) return head;
  }
  return -1;
}

CudaKernel cuda_kernel_or_throw(KernelKey key) {
  const CudaKernel kernel = find_cuda_kernel(key);
  if (kernel == nullptr) throw std::runtime_error("no CUDA kernel for these element types");
  return kernel;
}

}  // namespace

void Plan::gradients_changed() {
  for (size_t i = resolved_.size(); i-- > 0;) {
    if (resolved_[i]->holds_gradients) resolved_.erase(resolved_.begin() + i);
  }
}

const Plan::Tables& Plan::resolve(const Request& request) {
  for (const auto& resolved : resolved_) {
    if (resolved->request == request) return resolved->tables;
  }
  bool holds_gradients = request.which != Which::all;
  for (const Column* column : request.streams) holds_gradients |= column == &grads;
  auto entry = std::make_unique<Resolved>(Resolved{request, build(request), holds_gradients});
  if (resolved_.size() >= kMaxResolved) resolved_.erase(resolved_.begin());
  resolved_.push_back(std::move(entry));
  return resolved_.back()->tables;
}

Plan::Tables Plan::build(const Request& request) const {
  Tables tables;
  const auto n_streams = static_cast<uint32_t>(request.streams.size());
  const int momentum_at = momentum_stream(request.operation);
  std::vector<void*> at(n_streams);
  for (size_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    if (item.size == 0) continue;
    if (request.which != Which::all &&
        (grads[i] != nullptr) != (request.which == Which::with_gradient)) {
      continue;
    }
    // One table per combination of element types, in order of appearance.
    const KernelKey key{request.operation, item.param,
                        momentum_at >= 0 ? item.momentum : item.param};
    Table* table = nullptr;
    for (Table& t : tables) {
      if (t.key.param == key.param && t.key.momentum == key.momentum) table = &t;
    }
    if (table == nullptr) {
      tables.emplace_back();
      table = &tables.back();
      table->key = key;
      table->n_streams = n_streams;
      if (device_.cuda) {
        table->cuda = cuda_kernel_or_throw(key);
      } else {
        table->cpu = find_cpu_kernel(key);
      }
    }
    const auto width = [&](uint32_t s) {
      return size_of(static_cast<int>(s) == momentum_at ? key.momentum : key.param);
    };
    const auto flags =
        static_cast<uint16_t>(!request.first_step.empty() && request.first_step[i] ? 1 : 0);
    bool follows = !table->rows.empty() && table->rows.back().flags == flags;
    for (uint32_t s = 0; s < n_streams; ++s) {
      at[s] = (*request.streams[s])[i];
      follows = follows && offset(table->pointers[table->pointers.size() - n_streams + s],
                                  table->rows.back().size * width(s)) == at[s];
      table->bytes += item.size * width(s);
    }
    if (follows) {
      table->rows.back().size += item.size;
    } else {
      table->rows.push_back({item.size, 0, 0, 0, flags});
      table->pointers.insert(table->pointers.end(), at.begin(), at.end());
    }
  }
  for (Table& table : tables) {
    std::vector<int> widths(n_streams, size_of(table.key.param));
    if (momentum_at >= 0) widths[momentum_at] = size_of(table.key.momentum);
    uint64_t n_chunks = 0;
    for (size_t r = 0; r < table.rows.size(); ++r) {
      Row& row = table.rows[r];
      const int head = aligned_head(&table.pointers[r * n_streams], widths.data(), n_streams);
      row.aligned = head >= 0;
      row.head = static_cast<uint8_t>(head > 0 ? head : 0);
      row.first_chunk = static_cast<uint32_t>(n_chunks);
      n_chunks += chunks_of(row.size, row.head);
    }
    if (n_chunks > UINT32_MAX) throw std::length_error("more than 2^44 elements in one call");
    table.n_chunks = static_cast<uint32_t>(n_chunks);
  }
  return tables;
}

void Plan::launch(const Tables& tables, const Hyper& hyper, void* stream) {
  for (const Table& table : tables) {
    const TableView view{table.rows.data(),
                         table.pointers.data(),
                         static_cast<uint32_t>(table.rows.size()),
                         table.n_streams,
                         0,
                         table.n_chunks};
    last_rows_ += view.n_rows;
    if (device_.cuda) {
      last_launches_ += launch_cuda(table.cuda, view, hyper, device_.index, stream);
    } else {
      const bool parallel = table.bytes >= kParallelBytes && threads_are_safe();
      table.cpu(view, hyper, {parallel, table.bytes >= kStreamOutputBytes});
      ++last_launches_;
    }
  }
}

void Plan::run(const Request& request, const Hyper& hyper, void* stream) {
  last_launches_ = 0;
  last_rows_ = 0;
  launch(resolve(request), hyper, stream);
}

void Plan::copy(const Column& from, const Column& to, void* stream, Which which) {
  launch(resolve({Operation::copy, {&from, &to}, which, {}}), Hyper{}, stream);
}

void Plan::predict_(double lr, double steps, void* stream) {
  last_launches_ = 0;
  last_rows_ = 0;
  if (lr * steps == 0.0) return;  // W - 0*v, but without turning 0*inf into NaN
  Hyper hyper;
  hyper.lr = lr;
  hyper.steps = steps;
  run({Operation::predict, {&params, &momentum, &params}, Which::all, {}}, hyper, stream);
}

void Plan::predict(double lr, double steps, size_t out, void* stream) {
  if (lr * steps == 0.0) {
    last_launches_ = 0;
    last_rows_ = 0;
    return copy(params, outs.at(out), stream);
  }
  Hyper hyper;
  hyper.lr = lr;
  hyper.steps = steps;
  run({Operation::predict, {&params, &momentum, &outs.at(out)}, Which::all, {}}, hyper, stream);
}

void Plan::stash(void* stream) {
  run({Operation::copy, {&params, &stashed}, Which::all, {}}, Hyper{}, stream);
}

void Plan::restore_(void* stream) {
  run({Operation::copy, {&stashed, &params}, Which::all, {}}, Hyper{}, stream);
}

void Plan::swap_(void* stream) {
  run({Operation::swap, {&params, &stashed}, Which::all, {}}, Hyper{}, stream);
}

void Plan::stash_predict_(double lr, double steps, void* stream) {
  if (lr * steps == 0.0) return stash(stream);
  Hyper hyper;
  hyper.lr = lr;
  hyper.steps = steps;
  run({Operation::stash_predict, {&params, &momentum, &stashed}, Which::all, {}}, hyper, stream);
}

void Plan::sgd_step_(Hyper hyper, const std::vector<uint8_t>& first_step,
                     const std::vector<Prediction>& predictions, void* stream) {
  last_launches_ = 0;
  last_rows_ = 0;
  bool all_gradients = true;
  for (const void* g : grads) all_gradients &= g != nullptr;
  const Which stepped = all_gradients ? Which::all : Which::with_gradient;
  if (hyper.momentum == 0.0) {
    launch(resolve({Operation::sgd_plain, {&params, &grads}, stepped, {}}), hyper, stream);
    return;
  }
  Request request{Operation::sgd_momentum, {&params, &grads, &momentum}, stepped, first_step};
  for (const Prediction& p : predictions) {
    if (hyper.n_outs == kMaxOuts) break;
    request.streams.push_back(&outs.at(p.out));
    hyper.out_steps[hyper.n_outs++] = p.steps;
  }
  launch(resolve(request), hyper, stream);
  // What one kernel cannot write takes a pass each, with the same bits: both read stored values.
  for (size_t j = kMaxOuts; j < predictions.size(); ++j) {
    const Column& out = outs.at(predictions[j].out);
    hyper.steps = predictions[j].steps;
    if (hyper.lr * hyper.steps == 0.0) {
      copy(params, out, stream, stepped);
    } else {
      launch(resolve({Operation::predict, {&params, &momentum, &out}, stepped, {}}), hyper, stream);
    }
  }
  if (all_gradients) return;
  for (const Prediction& p : predictions) {
    copy(params, outs.at(p.out), stream, Which::without_gradient);
  }
}

}  // namespace spectrain
