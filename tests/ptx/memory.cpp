#include "memory.h"

#include <sys/mman.h>

#include <cstring>

namespace ptx {
namespace {

// For the block or thread of several readers.
constexpr uint32_t kSeveral = UINT32_MAX;
constexpr uint16_t kSeveralThreads = UINT16_MAX;

// Zeros, of which only used pages take memory.
void* reserve(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return at;
}

std::string hex(uint64_t x) {
  char text[32];
  snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

}  // namespace

Space::Space(const char* name, size_t bytes, uint64_t first, bool of_block)
    : name_(name),
      bytes_(bytes),
      of_block_(of_block),
      memory_(static_cast<char*>(reserve(bytes))),
      state_(static_cast<uint8_t*>(reserve(bytes))),
      cells_(static_cast<Cell*>(reserve(bytes / kCellBytes * sizeof(Cell)))) {
  first_ = first != 0 ? first : reinterpret_cast<uint64_t>(memory_);
}

Space::~Space() {
  munmap(memory_, bytes_);
  munmap(state_, bytes_);
  munmap(cells_, bytes_ / kCellBytes * sizeof(Cell));
}

void Space::open(uint64_t address, size_t n, uint64_t random) {
  const size_t begin = address - first_;
  memset(state_ + begin, kUndefined, n);
  for (size_t i = 0; i < n; ++i, random = random * 0x5851f42d4c957f2du + 1) {
    memory_[begin + i] = static_cast<char>(random >> 56);
  }
}

void Space::close(uint64_t address, size_t n) { memset(state_ + (address - first_), kClosed, n); }

void Space::refuse(const char* verb, uint64_t address, size_t n, const char* why) const {
  throw Fault(std::string(verb) + " of " + std::to_string(n) + " bytes at " + hex(address) +
              " in " + name_ + " memory: " + why);
}

size_t Space::at(uint64_t address, size_t n, const char* verb) const {
  const size_t begin = address - first_;
  if (begin >= bytes_ || n > bytes_ - begin) refuse(verb, address, n, "out of bounds");
  for (size_t i = 0; i < n; ++i) {
    if (state_[begin + i] == kClosed) refuse(verb, address, n, "out of bounds");
  }
  return begin;
}

bool Space::races(const Accessor& earlier, const Accessor& now) const {
  if (earlier.epoch != now.epoch) return false;
  if (earlier.block != now.block) return !of_block_;
  return earlier.thread != now.thread && earlier.phase == now.phase;
}

const char* Space::read(uint64_t address, size_t n, const Accessor& by, uint32_t* undefined) {
  const size_t begin = at(address, n, "a read");
  for (size_t i = 0; i < n; ++i) *undefined |= uint32_t{state_[begin + i] != kDefined} << i;
  for (size_t c = begin / kCellBytes; c * kCellBytes < begin + n; ++c) {
    Cell& cell = cells_[c];
    if (races(cell.written, by)) refuse("a read", address, n, "races with another thread's write");
    Accessor& last = cell.read;
    const bool same_block = last.block == by.block;
    if (last.epoch != by.epoch || (same_block ? last.phase < by.phase : of_block_)) {
      last = by;
    } else if (!same_block) {
      last.block = kSeveral;
    } else if (last.thread != by.thread) {
      last.thread = kSeveralThreads;
    }
  }
  return memory_ + begin;
}

char* Space::write(uint64_t address, size_t n, const Accessor& by, uint32_t undefined) {
  const size_t begin = at(address, n, "a write");
  for (size_t i = 0; i < n; ++i) {
    state_[begin + i] = (undefined >> i & 1) != 0 ? kUndefined : kDefined;
  }
  for (size_t c = begin / kCellBytes; c * kCellBytes < begin + n; ++c) {
    Cell& cell = cells_[c];
    if (races(cell.written, by)) refuse("a write", address, n, "races with another thread's write");
    if (races(cell.read, by)) refuse("a write", address, n, "races with another thread's read");
    cell.written = by;
  }
  return memory_ + begin;
}

const char* Space::read_by_host(uint64_t address, size_t n) {
  return memory_ + at(address, n, "a copy");
}

char* Space::write_by_host(uint64_t address, size_t n) {
  const size_t begin = at(address, n, "a copy");
  memset(state_ + begin, kDefined, n);
  return memory_ + begin;
}

}  // namespace ptx
