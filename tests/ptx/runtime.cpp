// The CUDA runtime for a device that is interpreted. It has what the launch code and the tests use:
// registration of fat binaries and kernels by nvcc's host stubs, memory, streams, events, graphs.
// Work is done when the host waits, and of several streams in random order.
#include "runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

namespace {

struct Work {
  std::function<void()> run;
  std::function<bool()> ready = [] { return true; };
};

}  // namespace

struct CUstream_st {
  std::deque<Work> waiting;
  bool captures = false;
  std::vector<Work> graph;
};
struct CUevent_st {
  uint64_t recorded = 0, done = 0;
};
struct CUgraph_st {
  std::vector<Work> work;
};
struct CUgraphExec_st {
  std::vector<Work> work;
};

namespace {

using ptx::Fault;

constexpr size_t kGuard = 256;
constexpr size_t kMostParameters = 32764;  // bytes, from compute_70 on

struct State {
  ptx::Device device;
  CUstream_st legacy;
  std::vector<CUstream_st*> streams = {&legacy};
  std::map<const void*, ptx::Program*> kernels;  // by their host functions
  std::map<uint64_t, size_t> allocations;
  size_t used = 0;  // of global memory
  cudaError_t last_error = cudaSuccess;
  std::exception_ptr fault;  // of work that a destructor waited for; the next call throws it
};

State& state() {
  static State one;
  return one;
}

cudaError_t raised(cudaError_t error) { return state().last_error = error; }

CUstream_st& stream_of(cudaStream_t stream) { return stream == nullptr ? state().legacy : *stream; }

cudaError_t append(cudaStream_t to, Work work) {
  CUstream_st& stream = stream_of(to);
  if (stream.captures) {
    stream.graph.push_back(std::move(work));
  } else {
    stream.waiting.push_back(std::move(work));
  }
  return cudaSuccess;
}

// Does the first work of a stream that need not wait, chosen at random. False: there is no work.
bool work_once() {
  std::vector<CUstream_st*> ready;
  bool any = false;
  for (CUstream_st* s : state().streams) {
    any |= !s->waiting.empty();
    if (!s->waiting.empty() && s->waiting.front().ready()) ready.push_back(s);
  }
  if (!any) return false;
  if (ready.empty()) throw Fault("streams wait for one another");
  CUstream_st& chosen = *ready[state().device.machine.random() % ready.size()];
  const Work work = std::move(chosen.waiting.front());
  chosen.waiting.pop_front();
  work.run();
  return true;
}

// Does all enqueued work. After a fault the rest is forgotten.
void drain() {
  if (state().fault) std::rethrow_exception(std::exchange(state().fault, nullptr));
  try {
    while (work_once()) {
    }
  } catch (...) {
    for (CUstream_st* s : state().streams) s->waiting.clear();
    throw;
  }
}

// --- fat binaries ---

struct FatHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct FatEntry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes;
};
constexpr uint32_t kFatMagic = 0xba55ed50;
constexpr uint16_t kPtxText = 1;

// The kernels of the PTX texts, of which there is one: the objects are made for one architecture.
void load_module(const char* fat) {
  FatHeader header;
  memcpy(&header, fat, sizeof(header));
  if (header.magic != kFatMagic) throw Fault("a fat binary of an unknown form");
  const char* at = fat + header.header_bytes;
  for (const char* end = at + header.bytes; at < end;) {
    FatEntry entry;
    memcpy(&entry, at, sizeof(entry));
    const char* text = at + entry.header_bytes;
    at = text + entry.bytes;
    if (entry.kind != kPtxText) continue;
    if (entry.compressed_bytes != 0) throw Fault("compressed PTX: compile with -no-compress");
    for (auto& [name, program] : ptx::parse(std::string(text, strnlen(text, entry.bytes)))) {
      if (!state().device.programs.emplace(name, std::move(program)).second) {
        throw Fault("two kernels " + name);
      }
    }
  }
}

}  // namespace

ptx::Device& ptx::device() { return state().device; }

// --- called by nvcc's host code before main ---

extern "C" {

struct FatWrapper {
  int magic, version;
  const char* data;
  void* file;
};
void** __cudaRegisterFatBinary(void* given) {
  auto* wrapper = static_cast<FatWrapper*>(given);
  load_module(wrapper->data);
  return reinterpret_cast<void**>(given);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  const auto found = state().device.programs.find(name);
  if (found == state().device.programs.end()) throw Fault(std::string("no PTX of ") + name);
  state().kernels[host] = &found->second;
}
// Only <<<>>> would call these.
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // extern "C"

// --- launches ---

cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  const auto found = state().kernels.find(host);
  if (found == state().kernels.end()) return raised(cudaErrorInvalidDeviceFunction);
  ptx::Program& program = *found->second;
  const bool flat = grid.y == 1 && grid.z == 1 && block.y == 1 && block.z == 1;
  if (!flat || grid.x == 0 || block.x == 0 || block.x > program.max_threads ||
      program.parameter_bytes > kMostParameters ||
      program.shared_bytes + shared > ptx::Machine::kShared) {
    return raised(cudaErrorInvalidConfiguration);
  }
  const auto* bytes = static_cast<const char*>(arguments[0]);
  const auto work = std::make_shared<ptx::Grid>(
      ptx::Grid{&program, std::vector<char>(bytes, bytes + program.parameter_bytes), grid.x,
                block.x, static_cast<uint32_t>(shared)});
  return append(stream, {[work] {
                  state().device.launched.insert(work->program);
                  state().device.machine.run(*work);
                }});
}

// --- memory ---

cudaError_t cudaMalloc(void** to, size_t bytes) {
  State& s = state();
  const size_t begin = s.used + kGuard;
  if (begin + bytes + kGuard > ptx::Machine::kMemory) return raised(cudaErrorMemoryAllocation);
  s.used = (begin + bytes + kGuard + 255) / 256 * 256;
  const uint64_t address = s.device.machine.global.first() + begin;
  s.device.machine.global.open(address, bytes, s.device.machine.random());
  s.allocations[address] = bytes;
  *to = reinterpret_cast<void*>(address);
  return cudaSuccess;
}

// Waits for all work, as CUDA's does. When all memory is free, memory and random orders begin anew,
// so that a case does the same alone.
cudaError_t cudaFree(void* at) {
  try {
    drain();
  } catch (const Fault&) {
    if (std::uncaught_exceptions() == 0) state().fault = std::current_exception();
  }
  const auto found = state().allocations.find(reinterpret_cast<uint64_t>(at));
  if (found == state().allocations.end()) return raised(cudaErrorInvalidValue);
  state().device.machine.global.close(found->first, found->second);
  state().allocations.erase(found);
  if (state().allocations.empty()) {
    state().used = 0;
    state().device.machine.random.seed();
  }
  return cudaSuccess;
}

// Memory of the host is copied at once, as of pageable memory.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const auto target = reinterpret_cast<uint64_t>(to), source = reinterpret_cast<uint64_t>(from);
  ptx::Space& memory = state().device.machine.global;
  if (kind == cudaMemcpyHostToDevice) {
    const auto* first = static_cast<const char*>(from);
    return append(stream, {[&memory, target, kept = std::vector<char>(first, first + bytes)] {
                    memcpy(memory.write_by_host(target, kept.size()), kept.data(), kept.size());
                  }});
  }
  if (kind != cudaMemcpyDeviceToHost) return raised(cudaErrorNotSupported);
  return append(stream, {[&memory, to, source, bytes] {
                  memcpy(to, memory.read_by_host(source, bytes), bytes);
                }});
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  drain();
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  drain();
  return error;
}

// --- streams and events ---

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* to, unsigned) {
  *to = new CUstream_st;
  state().streams.push_back(*to);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  drain();
  std::erase(state().streams, stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  drain();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* to, unsigned) {
  *to = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  drain();
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (stream_of(stream).captures) return raised(cudaErrorStreamCaptureUnsupported);
  const uint64_t number = ++event->recorded;
  return append(stream, {[event, number] { event->done = number; }});
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (stream_of(stream).captures) return raised(cudaErrorStreamCaptureUnsupported);
  const uint64_t number = event->recorded;
  return append(stream, {[] {}, [event, number] { return event->done >= number; }});
}

// --- graphs ---

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream->captures = true;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* to) {
  stream->captures = false;
  *to = new CUgraph_st{std::move(stream->graph)};
  stream->graph.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* to) {
  *to = stream_of(stream).captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* to, cudaGraph_t graph, unsigned long long) {
  *to = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  for (const Work& work : graph->work) append(stream, work);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}

// --- devices and errors ---

cudaError_t cudaGetDeviceCount(int* to) {
  *to = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : raised(cudaErrorInvalidDevice);
}
cudaError_t cudaGetLastError() { return std::exchange(state().last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
         : error == cudaErrorMemoryAllocation   ? "out of memory"
                                                : "an error of the interpreted device";
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** to, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  using Result = int;
  constexpr auto get_context = +[](void** context) -> Result {
    *context = &state();
    return 0;
  };
  constexpr auto set_context = +[](void*) -> Result { return 0; };
  constexpr auto get_device = +[](int* device) -> Result { return *device = 0; };
  const std::string wanted = name;
  *to = wanted == "cuCtxGetCurrent"   ? reinterpret_cast<void*>(get_context)
        : wanted == "cuCtxSetCurrent" ? reinterpret_cast<void*>(set_context)
                                      : reinterpret_cast<void*>(get_device);
  return cudaSuccess;
}
