// Runs cases on the interpreted device, and says what was executed. With --spoil it changes an
// instruction at a time, and counts the changes that cases notice.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>

#include "cases.h"
#include "runtime.h"

namespace {

using ptx::Instruction;
using ptx::Program;

// --- coverage ---

struct Coverage {
  size_t kernels = 0, launched = 0, instructions = 0, executed = 0;
};

Coverage coverage() {
  Coverage c;
  for (const auto& [name, program] : ptx::device().programs) {
    size_t executed = 0;
    for (const uint8_t seen : program.executed) executed += seen;
    ++c.kernels;
    c.launched += executed > 0;
    c.instructions += program.code.size();
    c.executed += executed;
  }
  return c;
}

// --- spoiled instructions ---

constexpr const char* kCommute[] = {"add.", "mul.", "mad.",    "fma.",   "and.",
                                    "or.",  "xor.", "setp.eq", "setp.ne"};

// An opcode that differs by one word, or nothing.
std::string sibling(const std::string& opcode) {
  constexpr const char* pairs[][2] = {{"add.", "sub."}, {".lt.", ".le."}, {".gt.", ".ge."},
                                      {".eq.", ".ne."}, {"and.", "or."},  {"min.", "max."}};
  for (const auto& [one, other] : pairs) {
    for (const auto& [from, to] : {std::pair(one, other), std::pair(other, one)}) {
      const size_t at = opcode.find(from);
      if (at != std::string::npos) return std::string(opcode).replace(at, strlen(from), to);
    }
  }
  return "";
}

// Changes an instruction in one of the ways that suit it. Returns the way, or nothing.
const char* spoil(Instruction& i, const std::string& text, uint64_t random) {
  const std::string opcode = text.substr(0, text.find_first_of(" \t"));
  if (i.base != ptx::kNoSlot && random % 2 == 0) {
    i.offset += (random % 4 == 0 ? 16 : -16);
    return "another address";
  }
  if (i.guard != ptx::kNoSlot) {
    i.negated = !i.negated;
    return "the opposite predicate";
  }
  const std::string other = sibling(opcode);
  if (!other.empty()) {
    try {
      i.run = ptx::form_of(other).run;
      return "another operation";
    } catch (const ptx::Fault&) {  // there is no such instruction
    }
  }
  // Products and sums of two are the same when their operands are exchanged.
  const bool commutes = std::any_of(std::begin(kCommute), std::end(kCommute),
                                    [&](const char* name) { return opcode.rfind(name, 0) == 0; });
  const int first = commutes ? 1 : 0;
  if (i.n_from >= first + 2 && random % 2 == 0 && i.from[first] != i.from[first + 1]) {
    std::swap(i.from[first], i.from[first + 1]);
    return "exchanged operands";
  }
  if (opcode == "ret" || opcode.rfind("cvta", 0) == 0) return nullptr;
  i.run = [](ptx::Thread&, const Instruction&) { return ptx::Next::instruction; };
  return "nothing done";
}

bool fails(const cases::Case& c) {
  try {
    cases::run(c);
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

int spoil_some(const std::vector<cases::Case>& all, size_t wanted, uint64_t seed) {
  ptx::Device& device = ptx::device();
  std::mt19937_64 random(seed);
  device.machine.budget = 1u << 26;  // ends endless loops sooner
  size_t spoiled = 0, noticed = 0;
  while (spoiled < wanted) {
    const cases::Case& c = all[random() % all.size()];
    for (auto& [name, program] : device.programs) {
      std::fill(program.executed.begin(), program.executed.end(), 0);
    }
    device.launched.clear();
    cases::run(c);
    // An instruction that this case has executed.
    std::vector<std::pair<Program*, size_t>> executed;
    for (Program* program : device.launched) {
      for (size_t at = 0; at < program->code.size(); ++at) {
        if (program->executed[at] != 0) executed.emplace_back(program, at);
      }
    }
    if (executed.empty()) continue;
    const auto [program, at] = executed[random() % executed.size()];
    const Instruction kept = program->code[at];
    const char* how = spoil(program->code[at], program->text(kept), random());
    if (how != nullptr) {
      ++spoiled;
      const bool seen = fails(c);
      noticed += seen;
      if (!seen) {
        std::printf("not noticed by %s: %s in %s: %s\n", c.text().c_str(), how,
                    program->name.c_str(), program->text(kept).c_str());
      }
    }
    program->code[at] = kept;
  }
  std::printf("%zu of %zu spoiled instructions noticed\n", noticed, spoiled);
  return 0;
}

int run_all(const std::vector<cases::Case>& all) {
  int failed = 0;
  for (const cases::Case& c : all) {
    try {
      cases::run(c);
    } catch (const std::exception& error) {
      if (++failed <= 20) std::printf("FAILED %s\n", error.what());
    }
  }
  for (const auto& [name, program] : ptx::device().programs) {
    for (const std::string& finding : ptx::findings(program)) {
      std::printf("FAILED a generic access in a loop of %s\n", finding.c_str());
      ++failed;
    }
  }
  const Coverage c = coverage();
  std::printf("%zu cases, %d failed\n%zu of %zu kernels\n%zu of %zu instructions\n", all.size(),
              failed, c.launched, c.kernels, c.executed, c.instructions);
  const ptx::Machine& machine = ptx::device().machine;
  std::printf("%llu launches, %llu instructions run\n",
              static_cast<unsigned long long>(machine.launches),
              static_cast<unsigned long long>(machine.executed));
  return failed == 0 ? 0 : 1;
}

}  // namespace

// interpreted [--seeds N] [--first SEED] [--only WORD] [--spoil N] [--uncovered]
int main(int argc, char** argv) {
  uint64_t first = 0, seeds = 1, spoiled = 0;
  std::string only;
  bool uncovered = false;
  for (int k = 1; k < argc; ++k) {
    const std::string option = argv[k];
    if (option == "--uncovered") {
      uncovered = true;
    } else if (k + 1 == argc) {
      std::fprintf(stderr, "%s: expected a value\n", option.c_str());
      return 2;
    } else if (const char* value = argv[++k]; option == "--only") {
      only = value;
    } else {
      (option == "--first" ? first : option == "--spoil" ? spoiled : seeds) = std::stoull(value);
    }
  }
  std::vector<cases::Case> chosen;
  for (const cases::Case& c : cases::all(first, seeds)) {
    if (c.text().find(only) != std::string::npos) chosen.push_back(c);
  }
  if (spoiled > 0) return spoil_some(chosen, spoiled, first);
  const int status = run_all(chosen);
  if (uncovered) {
    for (const auto& [name, program] : ptx::device().programs) {
      for (size_t at = 0; at < program.code.size(); ++at) {
        if (program.executed[at] == 0) {
          std::printf("%s: %s\n", name.c_str(), program.text(program.code[at]).c_str());
        }
      }
    }
  }
  return status;
}
