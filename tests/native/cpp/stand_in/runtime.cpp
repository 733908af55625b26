// A stand-in for the CUDA runtime and a device: kernels run on the host, late, and in any order
// that CUDA allows. It refuses what CUDA refuses.
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "control.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

constexpr size_t kShared = 48 * 1024;
namespace spectrain {
extern thread_local unsigned char shared_memory[];
alignas(16) thread_local unsigned char shared_memory[kShared];
}  // namespace spectrain

struct CUstream_st {
  int device = 0;
  bool capturing = false;
  stand_in::Graph graph;
  size_t last = 0;            // work that the next one follows
  std::vector<size_t> after;  // and more
};

namespace stand_in {
namespace {

[[noreturn]] void fatal(const std::string& what) {
  std::fprintf(stderr, "stand-in: %s\n", what.c_str());
  std::abort();
}

struct Work {
  std::function<void()> run;
  std::vector<size_t> after;
  bool done = false;
};

struct State {
  std::mt19937_64 random;
  int devices = 1;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  CUstream_st legacy;
  std::vector<Work> work;  // the first is nothing, and done
  std::set<int> contexts;
  int current = -1, selected = 0;
  int calls_to_failure = -1;
  bool failed = false;
  cudaError_t last_error = cudaSuccess;
} state;

// --- memory ---

constexpr size_t kArena = size_t{1} << 28, kGuard = 256;
char* arena = nullptr;
size_t used = 0;

void poison([[maybe_unused]] void* at, [[maybe_unused]] size_t n) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(at, n);
#endif
}
void unpoison([[maybe_unused]] void* at, [[maybe_unused]] size_t n) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(at, n);
#endif
}
void protect(int how) {
  if (mprotect(arena, kArena, how) != 0) fatal("mprotect failed");
}
int accesses = 0;

// --- a block: its threads are fibers, which change places at barriers ---

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  uint32_t thread = 0;
  bool idle = true;
};

// One fiber does one thread after the other, until one waits at a barrier; then another goes on.
class Block {
 public:
  Block(const std::function<void()>& thread, uint32_t threads) : thread_(thread) {
    for (uint32_t t = 0; t < threads; ++t) order_.push_back(t);
    std::shuffle(order_.begin(), order_.end(), state.random);
  }
  void run() {
    running = this;
    while (next_ < order_.size()) resume(idle());
    while (!waiting_.empty()) {
      if (waiting_.size() != order_.size()) fatal("some threads of a block wait, others are done");
      std::vector<Fiber*> waiting;
      waiting.swap(waiting_);
      std::shuffle(waiting.begin(), waiting.end(), state.random);
      for (Fiber* fiber : waiting) resume(*fiber);
    }
    running = nullptr;
  }
  void barrier() {
    Fiber& me = *current_;
    waiting_.push_back(&me);
    leave(me);
    threadIdx = dim3(me.thread);
  }
  static Block* running;

 private:
  static void start() {
    entered(nullptr, &host_stack, &host_stack_bytes);
    Fiber& me = *running->current_;
    while (true) {
      while (running->next_ < running->order_.size()) {
        me.thread = running->order_[running->next_++];
        me.idle = false;
        threadIdx = dim3(me.thread);
        running->thread_();
        me.idle = true;
      }
      leave(me);
    }
  }
  static Fiber& idle() {
    for (auto& fiber : fibers) {
      if (fiber->idle) return *fiber;
    }
    fibers.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *fibers.back();
    fiber.stack.resize(size_t{1} << 18);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, &Block::start, 0);
    return fiber;
  }
  void resume(Fiber& fiber) {
    current_ = &fiber;
    void* kept = nullptr;
    leaving(&kept, fiber.stack.data(), fiber.stack.size());
    swapcontext(&host, &fiber.context);
    entered(kept, nullptr, nullptr);
  }
  static void leave(Fiber& me) {
    void* kept = nullptr;
    leaving(&kept, host_stack, host_stack_bytes);
    swapcontext(&me.context, &host);
    entered(kept, nullptr, nullptr);
  }

  // The sanitizer wants to know what it is on.
  static void leaving([[maybe_unused]] void** kept, [[maybe_unused]] const void* to,
                      [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(kept, to, bytes);
#endif
  }
  static void entered([[maybe_unused]] void* kept, [[maybe_unused]] const void** from,
                      [[maybe_unused]] size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(kept, from, bytes);
#endif
  }

  static std::vector<std::unique_ptr<Fiber>> fibers;
  static ucontext_t host;
  static const void* host_stack;
  static size_t host_stack_bytes;

  const std::function<void()>& thread_;
  std::vector<uint32_t> order_;
  size_t next_ = 0;
  std::vector<Fiber*> waiting_;
  Fiber* current_ = nullptr;
};

Block* Block::running = nullptr;
std::vector<std::unique_ptr<Fiber>> Block::fibers;
ucontext_t Block::host;
const void* Block::host_stack = nullptr;
size_t Block::host_stack_bytes = 0;

void run_grid(const std::function<void()>& thread, dim3 grid, dim3 block, size_t shared) {
  unsigned char* behind = spectrain::shared_memory + shared;
  const size_t rest = kShared - shared;
  poison(behind, rest);
  std::vector<uint32_t> blocks(grid.x);
  for (uint32_t b = 0; b < grid.x; ++b) blocks[b] = b;
  std::shuffle(blocks.begin(), blocks.end(), state.random);
  gridDim = grid;
  blockDim = block;
  for (const uint32_t b : blocks) {
    blockIdx = dim3(b);
    Block(thread, block.x).run();
  }
  unpoison(behind, rest);
}

// --- streams ---

CUstream_st& stream_of(cudaStream_t given) { return given == nullptr ? state.legacy : *given; }

bool anyone_captures() {
  return std::any_of(state.streams.begin(), state.streams.end(),
                     [](const auto& stream) { return stream->capturing; });
}

void append(CUstream_st& stream, std::function<void()> run) {
  if (stream.capturing) {
    stream.graph.push_back(std::move(run));
    return;
  }
  stream.after.push_back(stream.last);
  state.work.push_back({std::move(run), std::move(stream.after)});
  stream.after.clear();
  stream.last = state.work.size() - 1;
}

cudaError_t raised(cudaError_t error) {
  if (error != cudaSuccess) state.last_error = error;
  return error;
}

// What a call returns before it does anything: a failure that the test asked for, or success.
cudaError_t call() {
  if (state.calls_to_failure < 0 || state.calls_to_failure-- > 0) return cudaSuccess;
  state.failed = true;
  return raised(cudaErrorMemoryAllocation);
}

void use_context() {
  if (state.current < 0) state.current = state.selected;
  state.contexts.insert(state.current);
}

int get_current(void** context) {
  *context = state.current < 0 ? nullptr : reinterpret_cast<void*>(intptr_t{state.current} + 1);
  return 0;
}
int set_current_context(void* context) {
  state.current = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return 0;
}
int get_device(int* device) {
  *device = state.current;
  return state.current < 0 ? 201 : 0;
}

}  // namespace

void reset(uint64_t seed, int devices) {
  if (arena == nullptr) {
    arena = static_cast<char*>(
        mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (arena == MAP_FAILED) fatal("mmap failed");
  }
  unpoison(arena, used);
  used = 0;
  state = State{};
  state.random.seed(seed);
  state.devices = devices;
  state.work.push_back({nullptr, {}, true});
}

Access::Access() {
  if (accesses++ == 0) protect(PROT_READ | PROT_WRITE);
}
Access::~Access() {
  if (--accesses == 0) protect(PROT_NONE);
}

void* allocate(size_t bytes, size_t offset) {
  const size_t begin = used + kGuard + offset;
  used = (begin + bytes + kGuard + 255) / 256 * 256;
  if (used > kArena) fatal("out of device memory");
  unpoison(arena + begin - offset - kGuard, kGuard + offset + bytes + kGuard);
  poison(arena + begin - offset - kGuard, kGuard + offset);
  poison(arena + begin + bytes, used - begin - bytes);
  return arena + begin;
}
void write(void* to, const void* from, size_t bytes) {
  const Access access;
  memcpy(to, from, bytes);
}
void read(void* to, const void* from, size_t bytes) { write(to, from, bytes); }

cudaStream_t new_stream(int device) {
  state.streams.push_back(std::make_unique<CUstream_st>());
  state.streams.back()->device = device;
  return state.streams.back().get();
}
void order(cudaStream_t earlier, cudaStream_t later) {
  stream_of(later).after.push_back(stream_of(earlier).last);
}
void enqueue(cudaStream_t stream, std::function<void()> work) {
  append(stream_of(stream), std::move(work));
}

void synchronize() {
  const Access access;
  std::vector<size_t> pending, ready;
  for (size_t i = 0; i < state.work.size(); ++i) {
    if (!state.work[i].done) pending.push_back(i);
  }
  while (!pending.empty()) {
    ready.clear();
    for (const size_t i : pending) {
      const auto& after = state.work[i].after;
      if (std::all_of(after.begin(), after.end(), [](size_t j) { return state.work[j].done; })) {
        ready.push_back(i);
      }
    }
    const size_t chosen = ready[state.random() % ready.size()];
    state.work[chosen].run();
    state.work[chosen].done = true;
    pending.erase(std::find(pending.begin(), pending.end(), chosen));
  }
}

void begin_capture(cudaStream_t stream) { stream->capturing = true; }
Graph end_capture(cudaStream_t stream) {
  stream->capturing = false;
  return std::move(stream->graph);
}
void launch(const Graph& graph, cudaStream_t stream) {
  for (const auto& node : graph) append(stream_of(stream), node);
}

void fail_call(int n) {
  state.calls_to_failure = n;
  state.failed = false;
}
bool failed() { return state.failed; }
std::set<int> contexts() { return state.contexts; }
int current() { return state.current; }
void set_current(int device) {
  state.current = device;
  if (device >= 0) state.contexts.insert(device);
}

cudaError_t launch(Caller caller, Kernel kernel, const void* argument, size_t bytes, dim3 grid,
                   dim3 block, size_t shared, cudaStream_t given) {
  if (const cudaError_t error = call()) return error;
  use_context();
  CUstream_st& stream = stream_of(given);
  if (given == nullptr && anyone_captures()) return raised(cudaErrorStreamCaptureImplicit);
  if (given != nullptr && stream.device != state.current) {
    return raised(cudaErrorInvalidResourceHandle);
  }
  if (grid.x == 0 || block.x == 0 || block.x > 1024 || shared > kShared) {
    return raised(cudaErrorInvalidValue);
  }
  struct alignas(16) Unit {
    char bytes[16];
  };
  const auto kept = std::make_shared<std::vector<Unit>>((bytes + 15) / 16);
  memcpy(kept->data(), argument, bytes);
  const auto thread = [=] { caller(kernel, kept->data()); };
  append(stream, [=] { run_grid(thread, grid, block, shared); });
  return cudaSuccess;
}

}  // namespace stand_in

using stand_in::state;

void __syncthreads() { stand_in::Block::running->barrier(); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = state.devices;
  return stand_in::call();
}
cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = stand_in::call()) return error;
  if (device < 0 || device >= state.devices) return stand_in::raised(cudaErrorInvalidDevice);
  state.current = state.selected = device;
  stand_in::use_context();
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = state.last_error;
  state.last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                      ? "no error"
         : error == cudaErrorMemoryAllocation      ? "out of memory"
         : error == cudaErrorInvalidDevice         ? "invalid device ordinal"
         : error == cudaErrorInvalidResourceHandle ? "invalid resource handle"
         : error == cudaErrorInvalidValue          ? "invalid argument"
                                                   : "capture was refused";
}
// Of device memory, on a stream of any device.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t given) {
  if (const cudaError_t error = stand_in::call()) return error;
  stand_in::use_context();
  if (given == nullptr && stand_in::anyone_captures()) {
    return stand_in::raised(cudaErrorStreamCaptureImplicit);
  }
  stand_in::append(stand_in::stream_of(given), [=] { memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (const cudaError_t error = stand_in::call()) return error;
  if (stream == nullptr && stand_in::anyone_captures()) {
    return stand_in::raised(cudaErrorStreamCaptureImplicit);
  }
  *status = stand_in::stream_of(stream).capturing ? cudaStreamCaptureStatusActive
                                                  : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  const std::string wanted = name;
  *found = wanted == "cuCtxGetCurrent"   ? reinterpret_cast<void*>(&stand_in::get_current)
           : wanted == "cuCtxSetCurrent" ? reinterpret_cast<void*>(&stand_in::set_current_context)
                                         : reinterpret_cast<void*>(&stand_in::get_device);
  return stand_in::call();
}
