// Kernels as programs: PTX text, decoded once.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ptx {

struct Thread;
struct Instruction;

enum class Next : uint8_t { instruction, barrier, end };
using Run = Next (*)(Thread&, const Instruction&);

// Registers, constants and special registers are slots of 64 bits.
using Slot = uint32_t;
constexpr Slot kNoSlot = UINT32_MAX;

struct Instruction {
  Run run = nullptr;
  Slot guard = kNoSlot;  // of the predicate under which it is executed
  bool negated = false;
  uint8_t n_to = 0, n_from = 0;
  Slot to[4] = {}, from[4] = {};
  Slot base = kNoSlot;  // of an address
  int64_t offset = 0;   // of an address
  uint32_t target = 0;  // of a branch
  bool moves = false;   // a load or store, which copies bits without looking at them
  uint32_t line = 0;
};

// What every thread has in its first slots.
enum Special : Slot { kThread, kThreads, kBlock, kBlocks, kSpecials };

// Where kernels find their parameters and shared memory.
constexpr uint64_t kParametersAt = uint64_t{1} << 40;
constexpr uint64_t kSharedAt = 1 << 16;

struct Program {
  std::string name;
  std::vector<Instruction> code;
  std::vector<std::string> lines;   // of the text, for messages
  std::vector<uint64_t> constants;  // the slots after the registers
  Slot n_registers = 0;             // with the special ones
  uint32_t parameter_bytes = 0, shared_bytes = 0, max_threads = 1024;
  bool has_barrier = false;
  std::vector<uint8_t> executed;  // per instruction, whether a thread has

  const std::string& text(const Instruction& i) const { return lines[i.line]; }
};

// Decodes all kernels of a module. Throws Fault for what it does not know, with its text.
std::map<std::string, Program> parse(const std::string& module);

// The instruction of an opcode with its types, such as "add.s32"; throws Fault.
struct Form {
  Run run;
  enum Kind : uint8_t { plain, load, store, branch } kind;
};
Form form_of(const std::string& opcode);

// What a kernel's text says without being executed: an access through a generic address in a loop,
// one finding a line.
std::vector<std::string> findings(const Program&);

}  // namespace ptx
