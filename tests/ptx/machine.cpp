#include "machine.h"

#include <algorithm>
#include <numeric>

namespace ptx {
namespace {

std::vector<uint32_t> shuffled(uint32_t n, std::mt19937_64& random) {
  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

// Registers without a value may be copied to memory, but decide and compute nothing.
void check_defined(Thread& t, const Instruction& i) {
  const auto has = [&](Slot slot) {
    return std::any_of(t.undefined.begin(), t.undefined.end(),
                       [&](const auto& one) { return one.first == slot; });
  };
  if ((i.guard != kNoSlot && has(i.guard)) || (i.base != kNoSlot && has(i.base)) ||
      (!i.moves && std::any_of(i.from, i.from + i.n_from, has))) {
    throw Fault("uses a value of uninitialized memory");
  }
  for (int k = 0; k < i.n_to; ++k) {
    std::erase_if(t.undefined, [&](const auto& one) { return one.first == i.to[k]; });
  }
}

}  // namespace

void Machine::run(const Grid& given) {
  grid = &given;
  left_ = budget;
  ++launches;
  Program& program = *given.program;
  const size_t stride = program.n_registers + program.constants.size();
  slots_.resize(stride * (program.has_barrier ? given.threads : 1));
  for (size_t at = 0; at < slots_.size(); at += stride) {
    std::copy(program.constants.begin(), program.constants.end(),
              slots_.begin() + static_cast<ptrdiff_t>(at + program.n_registers));
  }
  ++epoch_;
  for (const uint32_t block : shuffled(given.blocks, random)) run_block(block);
}

void Machine::run_block(uint32_t block) {
  Program& program = *grid->program;
  const size_t stride = program.n_registers + program.constants.size();
  const uint32_t n = grid->threads;
  shared.close(kSharedAt, kShared);
  shared.open(kSharedAt, program.shared_bytes + grid->shared_bytes, random());
  std::vector<Thread> threads;
  threads.reserve(n);
  for (uint32_t k = 0; k < n; ++k) {
    uint64_t* slots = slots_.data() + (program.has_barrier ? k * stride : 0);
    threads.push_back({*this, slots, {epoch_, block, static_cast<uint16_t>(k), 0}, 0, {}});
  }
  std::vector<uint32_t> waiting = shuffled(n, random);
  const uint64_t garbage = random();
  for (uint16_t phase = 0; !waiting.empty(); ++phase) {
    std::vector<uint32_t> arrived;
    for (const uint32_t k : waiting) {
      Thread& t = threads[k];
      t.self.phase = phase;
      if (phase == 0) {
        // Registers have garbage until they are written.
        memset(t.slots, static_cast<int>(garbage + k), program.n_registers * sizeof(uint64_t));
        t.put(kThread, k);
        t.put(kThreads, n);
        t.put(kBlock, block);
        t.put(kBlocks, grid->blocks);
      }
      if (run_thread(t) == Next::barrier) arrived.push_back(k);
    }
    const bool apart = std::any_of(arrived.begin(), arrived.end(), [&](uint32_t k) {
      return threads[k].at != threads[arrived[0]].at;
    });
    if (!arrived.empty() && (arrived.size() != n || apart)) {
      throw Fault(program.name + ": some threads of block " + std::to_string(block) +
                  " do not reach a barrier where others wait");
    }
    waiting = std::move(arrived);
    std::shuffle(waiting.begin(), waiting.end(), random);
  }
}

Next Machine::run_thread(Thread& t) {
  Program& program = *grid->program;
  const Instruction* code = program.code.data();
  uint8_t* seen = program.executed.data();
  uint64_t steps = 0;
  const Instruction* i = code;
  try {
    while (true) {
      if (t.at >= program.code.size()) throw Fault("runs beyond its end");
      i = &code[t.at];
      if (++steps > left_) throw Fault("does not end");
      seen[t.at++] = 1;
      if (!t.undefined.empty()) check_defined(t, *i);
      if (i->guard != kNoSlot && t.get<bool>(i->guard) == i->negated) continue;
      const Next next = i->run(t, *i);
      if (next == Next::instruction) continue;
      executed += steps;
      left_ -= steps;
      return next;
    }
  } catch (const Fault& fault) {
    throw Fault(std::string(fault.what()) + "\n  in thread " + std::to_string(t.self.thread) +
                " of block " + std::to_string(t.self.block) + " of " + program.name + "\n  at " +
                program.text(*i));
  }
}

}  // namespace ptx
