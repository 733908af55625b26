// The interpreted device: runs a grid of a program, its blocks and threads in random order.
#pragma once

#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "memory.h"
#include "program.h"

namespace ptx {

struct Machine;

// A thread of a block, until its next barrier.
struct Thread {
  Machine& machine;
  uint64_t* slots;
  Accessor self;
  uint32_t at = 0;  // the next instruction
  // Registers with bytes that came from memory without a value, a bit for each. They may be copied
  // back to memory, as padding is.
  std::vector<std::pair<Slot, uint32_t>> undefined;

  template <class T>
  T get(Slot slot) const {
    if constexpr (std::is_same_v<T, bool>) return (slots[slot] & 1) != 0;
    T value;
    memcpy(&value, &slots[slot], sizeof(value));
    return value;
  }
  template <class T>
  void put(Slot slot, T value) {
    slots[slot] = 0;
    memcpy(&slots[slot], &value, sizeof(value));
  }
};

struct Grid {
  Program* program;
  std::vector<char> parameters;
  uint32_t blocks, threads, shared_bytes;
};

struct Machine {
  static constexpr size_t kMemory = size_t{1} << 28, kShared = 48 * 1024;

  Space global{"global", kMemory};
  Space shared{"shared", kShared, kSharedAt, true};
  std::mt19937_64 random;
  uint64_t executed = 0;       // instructions, in all
  uint64_t budget = 1u << 30;  // of a launch, which must end
  uint64_t launches = 0;

  // Runs to the end. Throws Fault, which says the kernel, the thread and the instruction.
  void run(const Grid&);

  const Grid* grid = nullptr;  // that runs

 private:
  void run_block(uint32_t block);
  Next run_thread(Thread&);
  uint32_t epoch_ = 0;
  uint64_t left_ = 0;
  std::vector<uint64_t> slots_;  // of the threads of a block
};

}  // namespace ptx
