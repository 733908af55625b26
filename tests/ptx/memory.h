// Memory of the interpreted device, which remembers for every byte whether it may be accessed and
// has a value, and which threads have accessed it: out-of-bounds accesses, reads of uninitialized
// memory and races are faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ptx {

// What a device would do wrong, or silently.
struct Fault : std::runtime_error {
  using runtime_error::runtime_error;
};

// Who accesses memory. `epoch` is the launch. Accesses of a block's threads in different phases,
// between which is a barrier, do not race.
struct Accessor {
  uint32_t epoch, block;
  uint16_t thread, phase;
};

// A range of addresses with its history.
class Space {
 public:
  // Addresses begin at `first` for kernels; 0: at the memory's own address. `of_block`: each block
  // has its own, in the same place.
  Space(const char* name, size_t bytes, uint64_t first = 0, bool of_block = false);
  ~Space();
  Space(const Space&) = delete;
  Space& operator=(const Space&) = delete;

  bool holds(uint64_t address) const { return address - first_ < bytes_; }
  // Makes bytes accessible, without a value: they have random bits.
  void open(uint64_t address, size_t n, uint64_t random);
  void close(uint64_t address, size_t n);

  // Both check the access and return the bytes' host address. `undefined`: a bit for every byte
  // that has no value, of at most 32 bytes.
  const char* read(uint64_t address, size_t n, const Accessor&, uint32_t* undefined);
  char* write(uint64_t address, size_t n, const Accessor&, uint32_t undefined);
  // The host's accesses: no races, since streams order them.
  const char* read_by_host(uint64_t address, size_t n);
  char* write_by_host(uint64_t address, size_t n);

  uint64_t first() const { return first_; }

 private:
  enum State : uint8_t { kClosed, kUndefined, kDefined };
  // The last accesses to two bytes, the smallest element of an array.
  struct Cell {
    Accessor written, read;
  };
  static constexpr size_t kCellBytes = 2;

  bool races(const Accessor& earlier, const Accessor& now) const;
  size_t at(uint64_t address, size_t n, const char* verb) const;
  [[noreturn]] void refuse(const char* verb, uint64_t address, size_t n, const char* why) const;

  const char* name_;
  size_t bytes_;
  uint64_t first_;
  bool of_block_;
  char* memory_;
  uint8_t* state_;
  Cell* cells_;
};

}  // namespace ptx
