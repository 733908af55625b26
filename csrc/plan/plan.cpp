#include "plan.h"

#include <algorithm>

#include "kernels/cpu/threads.h"
#include "kernels/cuda/launch.h"
#include "rules/distance.h"

namespace spectrain {
namespace {

// A parallel region costs about 2 us; below this many bytes one core is faster.
constexpr int64_t kParallelBytes = 1 << 18;
// Larger pure outputs would evict data that the caller needs next from a 2 MiB L2 cache.
constexpr int64_t kStreamOutputBytes = 4 << 20;
// Resolved tables kept per plan: a training loop uses two or three kinds of call.
constexpr size_t kMaxResolved = 16;

// Rows are aligned to this many elements on the CPU: 16 bytes of the narrowest type.
constexpr int kCpuVector = 8;

// Alignment, and unit of writing, of a table on a device.
constexpr size_t kTableAlignment = 16;

char* aligned(void* pointer) {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  return reinterpret_cast<char*>((at + kTableAlignment - 1) / kTableAlignment * kTableAlignment);
}

char* offset(void* pointer, int64_t bytes) { return static_cast<char*>(pointer) + bytes; }

template <class Condition>
bool any_term(const Plan::Terms& terms, Condition holds) {
  return std::any_of(terms.begin(), terms.end(), [&](const std::vector<Term>& group) {
    return std::any_of(group.begin(), group.end(), holds);
  });
}

// Whether a prediction changes nothing. Then bits are copied, because W - 0*inf would be NaN.
bool is_identity(const Plan::Terms& terms) {
  return !any_term(terms, [](const Term& t) {
    return !t.keeps_weights() || t.has_momentum() || t.has_gradient();
  });
}

bool needs_gradient(const Plan::Terms& terms) {
  return any_term(terms, [](const Term& t) { return t.has_gradient(); });
}

size_t longest(const Plan::Terms& terms) {
  size_t n = 0;
  for (const std::vector<Term>& group : terms) n = std::max(n, group.size());
  return n;
}

// Adds a prediction to the settings of all groups, so that all have the same number of outputs.
void append(std::vector<Setting>& settings, const Plan::Terms& terms) {
  for (size_t g = 0; g < settings.size(); ++g) {
    Setting& s = settings[g];
    int end = s.n_terms();
    // An unchanged group still needs one term, which keeps its weights.
    if (terms[g].empty()) s.terms[end++] = Term{};
    for (const Term& t : terms[g]) s.terms[end++] = t;
    s.out_end[s.n_outs++] = end;
  }
}

}  // namespace

Plan::Plan(Device device, std::vector<int64_t> sizes, std::vector<uint16_t> groups)
    : device_(device), sizes_(std::move(sizes)), groups_(std::move(groups)) {
  for (const uint16_t g : groups_) n_groups_ = std::max<size_t>(n_groups_, g + size_t{1});
}

bool Plan::all_gradients() const {
  return std::all_of(grads.at.begin(), grads.at.end(), [](const void* g) { return g != nullptr; });
}

void Plan::gradients_changed() {
  for (size_t i = resolved_.size(); i-- > 0;) {
    if (resolved_[i]->holds_gradients) resolved_.erase(resolved_.begin() + i);
  }
}

Plan::Resolved& Plan::resolve(const Request& request) {
  for (const auto& resolved : resolved_) {
    if (resolved->request == request) return *resolved;
  }
  bool holds_gradients = request.which != Which::all;
  for (const Column* column : request.streams) holds_gradients |= column == &grads;
  auto entry = std::make_unique<Resolved>(Resolved{request, build(request), holds_gradients});
  if (resolved_.size() >= kMaxResolved) {
    const auto oldest = std::find_if(resolved_.begin(), resolved_.end(),
                                     [](const auto& resolved) { return !resolved->captured; });
    if (oldest != resolved_.end()) resolved_.erase(oldest);
  }
  resolved_.push_back(std::move(entry));
  return *resolved_.back();
}

// Returns the table for an item's element types; creates it at the first use.
Plan::Table& Plan::table_for(Tables& tables, const Request& request, size_t item) const {
  const DType w = params.dtype[item];
  KernelKey key{request.operation, w, w, w, w};
  const OperationRow& row = row_of(request.operation);
  const auto n_streams = static_cast<size_t>(row.n_streams);
  for (size_t s = 0; s < request.streams.size(); ++s) {
    key.of(s < n_streams ? row.roles[s] : Role::out) = request.streams[s]->dtype[item];
  }
  // An output of the weights' type needs no conversion; others in the list may.
  if (key.operation == Operation::cast && key.o == key.w) key.operation = Operation::copy;
  for (Table& table : tables) {
    if (table.key == key) return table;
  }
  Table table;
  table.key = key;
  for (const Column* column : request.streams) table.widths.push_back(size_of(column->dtype[item]));
  if (request.positions) table.widths.push_back(1);  // the position advances by one per element
  if (device_.cuda) {
    table.cuda = find_cuda_kernel(key);
    if (table.cuda.launch == nullptr) throw UnsupportedTypes(item, key);
  } else {
    table.cpu = find_cpu_kernel(key);
    if (table.cpu == nullptr) throw UnsupportedTypes(item, key);
  }
  tables.push_back(std::move(table));
  return tables.back();
}

Plan::Tables Plan::build(const Request& request) const {
  Tables tables;
  const size_t n_arrays = request.streams.size();
  const size_t n_streams = n_arrays + (request.positions ? 1 : 0);
  std::vector<void*> at(n_streams);
  int64_t position = 0;
  for (size_t i = 0; i < sizes_.size(); position += sizes_[i++]) {
    if (sizes_[i] == 0) continue;
    if (request.which != Which::all &&
        (grads.at[i] != nullptr) != (request.which == Which::with_gradient)) {
      continue;
    }
    Table& table = table_for(tables, request, i);
    const bool first = !request.first_step.empty() && request.first_step[i] != 0;
    Row row{sizes_[i], 0, 0, static_cast<uint8_t>(first ? kFirstStep : 0), groups_[i]};
    bool follows = !table.rows.empty() && table.rows.back().flags == row.flags &&
                   table.rows.back().setting == row.setting;
    for (size_t s = 0; s < n_streams; ++s) {
      at[s] = s < n_arrays ? request.streams[s]->at[i] : reinterpret_cast<void*>(position);
      follows = follows && offset(table.pointers[table.pointers.size() - n_streams + s],
                                  table.rows.back().size * table.widths[s]) == at[s];
      if (s < n_arrays) table.bytes += row.size * table.widths[s];
    }
    if (follows) {
      table.rows.back().size += row.size;
    } else {
      table.rows.push_back(row);
      table.pointers.insert(table.pointers.end(), at.begin(), at.end());
    }
  }
  for (Table& table : tables) {
    uint64_t n_chunks = 0;
    for (size_t r = 0; r < table.rows.size(); ++r) {
      Row& row = table.rows[r];
      const int head = aligned_head(&table.pointers[r * n_streams], table.widths.data(), n_arrays,
                                    device_.cuda ? table.cuda.vector : kCpuVector);
      if (head >= 0) row.flags |= kAligned;
      row.head = static_cast<uint8_t>(std::max(head, 0));
      row.first_chunk = static_cast<uint32_t>(n_chunks);
      n_chunks += chunks_of(row.size, row.head);
    }
    if (n_chunks > UINT32_MAX) throw std::length_error("more than 2^43 elements in one call");
    table.n_chunks = static_cast<uint32_t>(n_chunks);
  }
  return tables;
}

int Plan::run_cuda(Table& table, const TableView& rows, Settings settings, bool capturing,
                   void* stream) {
  const bool reads_memory = std::any_of(settings.data, settings.data + settings.size,
                                        [](const Setting& s) { return s.source.in_memory(); });
  // At the first use, writing a long table to the device would take as many launches.
  const bool stays = keep_tables && table.uses++ > 0;
  const CudaLaunch launch{table.cuda, table.key, rows, settings, device_.index, stream};
  if (!reads_memory && fits_parameters(launch, stays)) return launch_cuda(launch);
  if (table.memory == nullptr) {
    table.memory = allocate(resident_bytes(launch), stream);
    table.written = false;
  }
  table.memory->used_on(stream);
  const int launches =
      launch_cuda_resident(launch, {table.memory->at(), !table.written, reads_memory});
  // Captured work runs only when the graph is replayed; earlier calls cannot rely on it.
  table.written |= !capturing;
  return launches;
}

void Plan::run_one(const Call& call, bool capturing, void* stream) {
  const Settings settings{call.settings.data(), static_cast<int>(call.settings.size())};
  Resolved& resolved = resolve(call.request);
  if (capturing) {
    resolved.captured = true;
    gradients_pinned_ |= resolved.holds_gradients;
  }
  for (Table& table : resolved.tables) {
    const TableView rows{table.rows.data(),
                         table.pointers.data(),
                         static_cast<uint32_t>(table.rows.size()),
                         static_cast<uint32_t>(table.widths.size()),
                         0,
                         table.n_chunks,
                         call.options};
    last_rows_ += rows.n_rows;
    if (device_.cuda) {
      last_launches_ += run_cuda(table, rows, settings, capturing, stream);
    } else {
      const bool parallel = table.bytes >= kParallelBytes && threads_are_safe();
      table.cpu(rows, settings, {parallel, table.bytes >= kStreamOutputBytes});
      ++last_launches_;
    }
  }
}

void Plan::run(std::vector<Call> calls, void* stream) {
  last_launches_ = 0;
  last_rows_ = 0;
  for (const Call& call : calls) resolve(call.request);
  const bool capturing = device_.cuda && cuda_is_capturing(device_.index, stream);
  for (Call& call : calls) {
    if (sources.empty() || !row_of(call.request.operation).reads_memory) continue;
    for (size_t g = 0; g < n_groups_; ++g) {
      Setting& setting = call.settings[g];
      setting.source = sources[g];
      if (!setting.source.in_memory()) continue;
      if (setting.n_terms() > kMaxTermsFromMemory) {
        throw std::invalid_argument("steps: expected at most " +
                                    std::to_string(kMaxTermsFromMemory) +
                                    " updates ahead in a call that reads numbers in memory");
      }
      if (!device_.cuda) setting.read_memory();
    }
  }
  for (const Call& call : calls) run_one(call, capturing, stream);
}

Plan::Call Plan::copy_call(const Column& from, const Column& to, Which which) const {
  const Operation operation = from.dtype == to.dtype ? Operation::copy : Operation::cast;
  return {{operation, {&from, &to}, which}, std::vector<Setting>(n_groups_)};
}

std::vector<const Column*> Plan::streams(Operation operation, const Column* out) const {
  const OperationRow& row = row_of(operation);
  std::vector<const Column*> result;
  for (int s = 0; s < row.n_streams; ++s) {
    result.push_back(row.roles[s] == Role::out ? out : &(this->*column(row.roles[s])));
  }
  if (out != nullptr && row.has_outs) result.push_back(out);
  return result;
}

std::vector<Plan::Call> Plan::predict_calls(const Predictor& by, const Terms& terms,
                                            const Column& out, Which which) const {
  if (is_identity(terms)) {
    if (&out == &params) return {};
    return {copy_call(params, out, which)};
  }
  std::vector<Setting> settings(n_groups_);
  append(settings, terms);
  for (size_t g = 0; g < by.eps.size(); ++g) settings.at(g).eps = by.eps[g];
  return {{{by.operation, streams(by.operation, &out), which}, settings}};
}

void Plan::copy(const Column& from, const Column& to, void* stream) {
  run({copy_call(from, to, Which::all)}, stream);
}

void Plan::swap_(void* stream) {
  run({{{Operation::swap, {&params, &stashed}}, std::vector<Setting>(n_groups_)}}, stream);
}

void Plan::predict(const Predictor& by, const Terms& terms, const Column& out, void* stream) {
  run(predict_calls(by, terms, out, Which::all), stream);
}

void Plan::stash_predict_(const Predictor& by, const Terms& terms, void* stream) {
  const Operation in_one_pass = row_of(by.operation).companion;
  if (in_one_pass != Operation::none && !is_identity(terms)) {
    return run(predict_calls({in_one_pass, by.eps}, terms, params, Which::all), stream);
  }
  std::vector<Call> calls = predict_calls(by, terms, params, Which::all);
  calls.insert(calls.begin(), copy_call(params, stashed, Which::all));
  run(calls, stream);
}

void Plan::extrapolate(double steps, const Column& out, void* stream) {
  if (steps == 0.0) return run({copy_call(params, out, Which::all)}, stream);
  std::vector<Setting> settings(n_groups_);
  for (Setting& s : settings) s.terms[0].momentum = steps;
  run({{{Operation::extrapolate, {&params, &stashed, &out}}, settings}}, stream);
}

bool Plan::rounds_second(Operation operation, const std::vector<Setting>& settings) const {
  return row_of(operation).has(Role::second) &&
         std::any_of(settings.begin(), settings.end(),
                     [](const Setting& s) { return s.rounds_second(); }) &&
         std::find(second.dtype.begin(), second.dtype.end(), DType::bfloat16) != second.dtype.end();
}

void Plan::step(Operation operation, Step given, void* stream) {
  auto& [settings, predictions, options, first_step] = given;
  const bool everywhere = all_gradients();
  Request request{operation, streams(operation), everywhere ? Which::all : Which::with_gradient,
                  first_step, options.rounding.stochastic || rounds_second(operation, settings)};
  Predictor later_by{row_of(operation).companion};
  if (later_by.operation == Operation::none && !predictions.empty()) {
    throw std::invalid_argument("predict: this step makes no predictions");
  }
  for (const Setting& s : settings) later_by.eps.push_back(s.eps);
  // The step writes outputs of one element type, as many as a kernel supports. Each other output
  // takes a separate pass over the stored values, with the same bits. Predictions that need the
  // gradient come first, because it is gone by then.
  std::stable_partition(predictions.begin(), predictions.end(),
                        [](const Prediction& p) { return needs_gradient(p.terms); });
  const size_t n_state = request.streams.size();
  const size_t most_terms = sources.empty() ? kMaxTerms : kMaxTermsFromMemory;
  std::vector<Call> later;
  for (const Prediction& p : predictions) {
    const Column& out = outs.at(p.out);
    const bool same_type =
        request.streams.size() == n_state || out.dtype == request.streams.back()->dtype;
    int terms = 0;
    for (const Setting& s : settings) terms = std::max(terms, s.n_terms());
    const bool fits = row_of(operation).has_outs && same_type && settings[0].n_outs < kMaxOuts &&
                      terms + std::max<size_t>(longest(p.terms), 1) <= most_terms;
    if (!fits && needs_gradient(p.terms)) {
      throw std::invalid_argument(
          "predict: second-order predictions have to be written by the step itself, which takes "
          "eight outputs of one element type");
    }
    if (fits) {
      request.streams.push_back(&out);
      append(settings, p.terms);
    } else {
      for (Call& call : predict_calls(later_by, p.terms, out, request.which)) {
        later.push_back(std::move(call));
      }
    }
    if (!everywhere) later.push_back(copy_call(params, out, Which::without_gradient));
  }
  for (Call& call : later) call.options = options.of_later_pass();
  later.insert(later.begin(), Call{std::move(request), std::move(settings), options});
  run(std::move(later), stream);
}

size_t Plan::distance_scratch() const {
  const size_t n_streams = outs.size() + 2;
  size_t bytes = 4 * 2 * kTableAlignment;  // for every type's table: start and end
  for (const int64_t size : sizes_) {
    if (size == 0) continue;
    bytes += sizeof(Row) + n_streams * sizeof(void*);
    bytes += chunks_of(size, 0) * outs.size() * sizeof(double);
  }
  return bytes;
}

void Plan::distances(double* result, void* scratch, void* stream) {
  last_launches_ = 0;
  last_rows_ = 0;
  const auto n_lists = static_cast<uint32_t>(outs.size());
  const int64_t stride = static_cast<int64_t>(sizes_.size()) + 1;
  for (const DType type : {DType::float16, DType::bfloat16, DType::float32, DType::float64}) {
    std::vector<Row> rows;
    std::vector<void*> pointers;
    uint32_t n_chunks = 0;
    int64_t bytes = 0;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      if (sizes_[i] == 0 || params.dtype[i] != type) continue;
      rows.push_back({sizes_[i], n_chunks, 0, 0, 0});
      n_chunks += chunks_of(sizes_[i], 0);
      bytes += sizes_[i] * size_of(type) * (1 + n_lists);
      pointers.push_back(params.at[i]);
      for (const Column& out : outs) pointers.push_back(out.at[i]);
      pointers.push_back(result + i);
    }
    if (rows.empty()) continue;
    Distances d{{rows.data(), pointers.data(), static_cast<uint32_t>(rows.size()), n_lists + 2, 0,
                 n_chunks},
                n_lists,
                static_cast<double*>(scratch),
                stride};
    last_rows_ += d.table.n_rows;
    if (!device_.cuda) {
      find_cpu_distances(type)(d, bytes >= kParallelBytes && threads_are_safe());
      ++last_launches_;
      continue;
    }
    char* table = aligned(d.partial + static_cast<int64_t>(n_chunks) * n_lists);
    last_launches_ += launch_cuda_distances(type, d, table, device_.index, stream);
    scratch = aligned(table + rows.size() * sizeof(Row) + pointers.size() * sizeof(void*));
  }
  const auto n = static_cast<int64_t>(sizes_.size());
  if (device_.cuda) {
    last_launches_ += total_cuda_distances(result, n, n_lists, device_.index, stream);
    return;
  }
  for (uint32_t j = 0; j < n_lists; ++j) total_distance(result + j * stride, n);
}

}  // namespace spectrain
