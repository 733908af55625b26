#include "program.h"

#include <algorithm>
#include <cstring>
#include <regex>
#include <sstream>

#include "memory.h"

namespace ptx {
namespace {

[[noreturn]] void unknown(const std::string& what) { throw Fault("unknown PTX: " + what); }

std::string trimmed(std::string text) {
  const size_t comment = text.find("//");
  if (comment != std::string::npos) text.resize(comment);
  const char* space = " \t\r\n";
  const size_t begin = text.find_first_not_of(space);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(space) - begin + 1);
}

// Splits at commas outside of braces and brackets.
std::vector<std::string> operands_of(const std::string& text) {
  std::vector<std::string> found;
  int depth = 0;
  std::string word;
  for (const char c : text + ",") {
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    if (c == ',' && depth == 0) {
      word = trimmed(word);
      if (!word.empty()) found.push_back(word);
      word.clear();
    } else {
      word += c;
    }
  }
  return found;
}

// Decodes one module, line by line, as nvcc writes one statement a line.
class Parser {
 public:
  std::map<std::string, Program> parse(const std::string& module) {
    std::istringstream text(module);
    for (std::string raw; std::getline(text, raw);) {
      const std::string line = trimmed(raw);
      if (line.size() < 2 || line.front() != '{') {
        if (!line.empty()) statement(line);
        continue;
      }
      // Several statements in braces, as of inline assembly.
      std::istringstream inside(line.substr(1, line.rfind('}') - 1));
      for (std::string one; std::getline(inside, one, ';');) {
        if (!trimmed(one).empty()) statement(trimmed(one) + ";");
      }
    }
    return std::move(kernels_);
  }

 private:
  void statement(const std::string& line) {
    if (line == "{" || line == "(" || line == ")") return;
    if (line == "}") return finish();
    if (line.find(".entry ") != std::string::npos) return begin(line);
    if (line[0] == '.') return directive(line);
    if (line[0] == '$') {
      labels_[line.substr(0, line.find(':'))] = static_cast<uint32_t>(program_.code.size());
      return;
    }
    if (line.back() != ';') unknown(line);
    instruction(line.substr(0, line.size() - 1));
  }

  void begin(const std::string& line) {
    program_ = Program{};
    program_.name = line.substr(line.find(".entry ") + 7);
    program_.name.resize(program_.name.find('('));
    program_.n_registers = kSpecials;
    slots_ = {
        {"%tid.x", kThread}, {"%ntid.x", kThreads}, {"%ctaid.x", kBlock}, {"%nctaid.x", kBlocks}};
    symbols_ = module_symbols_;
    program_.shared_bytes = module_shared_;
    labels_.clear();
    branches_.clear();
    constants_.clear();
    in_kernel_ = true;
  }

  void directive(const std::string& line) {
    static const std::regex threads(R"(\.maxntid (\d+)(, 1, 1)?)");
    static const std::regex registers(R"(\.reg \.\w+\s+%(\w+?)<(\d+)>;)");
    static const std::regex one_register(R"(\.reg \.\w+\s+(\w+);)");
    static const std::regex variable(
        R"((?:\.extern )?\.(\w+) \.align (\d+) \.b8 ([\w$]+)\[(\d*)\],?;?)");
    std::smatch m;
    if (std::regex_match(line, m, threads)) {
      program_.max_threads = static_cast<uint32_t>(std::stoul(m[1]));
    } else if (std::regex_match(line, m, registers)) {
      for (int i = 0; i < std::stoi(m[2]); ++i) {
        slots_["%" + m[1].str() + std::to_string(i)] = program_.n_registers++;
      }
    } else if (std::regex_match(line, m, one_register)) {
      slots_.emplace(m[1], program_.n_registers++);
    } else if (std::regex_match(line, m, variable)) {
      declare(m[1], static_cast<uint32_t>(std::stoul(m[2])), m[3],
              m[4].length() == 0 ? 0 : static_cast<uint32_t>(std::stoul(m[4])));
    } else {
      const std::string word = line.substr(0, line.find_first_of(" \t"));
      for (const char* known :
           {".version", ".target", ".address_size", ".minnctapersm", ".pragma"}) {
        if (word == known) return;
      }
      unknown(line);
    }
  }

  void declare(const std::string& space, uint32_t alignment, const std::string& name,
               uint32_t bytes) {
    if (space == "param") {
      uint32_t& end = program_.parameter_bytes;
      end = (end + alignment - 1) / alignment * alignment;
      symbols_[name] = kParametersAt + end;
      end += bytes;
    } else if (space == "shared") {
      uint32_t& end = in_kernel_ ? program_.shared_bytes : module_shared_;
      end = (end + alignment - 1) / alignment * alignment;
      // An array without a size, which the launch gives, has to be the only one.
      if ((bytes == 0 && end != 0) || (bytes != 0 && dynamic_)) unknown("several shared arrays");
      dynamic_ |= bytes == 0;
      (in_kernel_ ? symbols_ : module_symbols_)[name] = kSharedAt + end;
      end += bytes;
    } else {
      unknown(space + " memory, " + name);
    }
  }

  void instruction(const std::string& text) {
    Instruction made;
    made.line = static_cast<uint32_t>(program_.lines.size());
    program_.lines.push_back(text);
    std::string rest = text;
    if (rest[0] == '@') {
      made.negated = rest[1] == '!';
      const size_t space = rest.find(' ');
      made.guard = slot(rest.substr(made.negated ? 2 : 1, space - (made.negated ? 2 : 1)));
      rest = trimmed(rest.substr(space));
    }
    const size_t space = std::min(rest.find_first_of(" \t"), rest.size());
    const std::string opcode = rest.substr(0, space);
    std::vector<std::string> operands = operands_of(rest.substr(space));
    const Form form = form_of(opcode);
    made.run = form.run;
    made.moves = form.kind == Form::load || form.kind == Form::store;
    const auto to = [&](const std::string& word) { made.n_to = fill(made.to, word); };
    if (form.kind == Form::branch) {
      branches_.emplace_back(program_.code.size(), operands.at(0));
    } else if (form.kind == Form::load) {
      to(operands.at(0));
      address(made, operands.at(1));
    } else if (form.kind == Form::store) {
      address(made, operands.at(0));
      made.n_from = fill(made.from, operands.at(1));
    } else if (opcode == "bar.sync") {
      if (operands != std::vector<std::string>{"0"}) unknown(text);
      program_.has_barrier = true;
    } else if (opcode != "ret") {
      to(operands.at(0));
      for (size_t i = 1; i < operands.size(); ++i) {
        made.n_from += fill(made.from + made.n_from, operands[i]);
        if (made.n_from > 4) unknown(text);
      }
    }
    program_.code.push_back(made);
  }

  uint8_t fill(Slot* slots, const std::string& word) {
    if (word[0] != '{') {
      *slots = slot(word);
      return 1;
    }
    uint8_t n = 0;
    for (const std::string& one : operands_of(word.substr(1, word.size() - 2))) {
      if (n == 4) unknown(word);
      slots[n++] = slot(one);
    }
    return n;
  }

  void address(Instruction& made, const std::string& word) {
    const std::string inside = word.substr(1, word.size() - 2);
    const size_t plus = inside.find('+');
    made.base = slot(trimmed(inside.substr(0, plus)));
    if (plus != std::string::npos) made.offset = std::stoll(inside.substr(plus + 1));
  }

  // The slot of a register, or of a constant: a number or the address of a symbol.
  Slot slot(const std::string& word) {
    const auto known = slots_.find(word);
    if (known != slots_.end()) return known->second;
    if (word[0] == '%') unknown("register " + word);
    const uint64_t value = number(word);
    const auto [at, fresh] = constants_.emplace(value, program_.constants.size());
    if (fresh) program_.constants.push_back(value);
    return kConstant | static_cast<Slot>(at->second);
  }

  uint64_t number(const std::string& word) {
    if (word.compare(0, 2, "0f") == 0 || word.compare(0, 2, "0d") == 0) {
      return std::stoull(word.substr(2), nullptr, 16);
    }
    if (word[0] == '-') return static_cast<uint64_t>(std::stoll(word));
    if (isdigit(word[0])) return std::stoull(word, nullptr, 0);
    const auto symbol = symbols_.find(word);
    if (symbol == symbols_.end()) unknown("symbol " + word);
    return symbol->second;
  }

  // Constants lie after the registers, whose number is known at the end.
  void finish() {
    const auto settle = [&](Slot& s) {
      if (s != kNoSlot && (s & kConstant) != 0) s = program_.n_registers + (s & ~kConstant);
    };
    for (Instruction& i : program_.code) {
      settle(i.base);
      for (Slot& s : i.from) settle(s);
    }
    for (const auto& [at, label] : branches_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) unknown("label " + label);
      program_.code[at].target = found->second;
    }
    program_.executed.resize(program_.code.size());
    in_kernel_ = false;
    kernels_[program_.name] = std::move(program_);
  }

  static constexpr Slot kConstant = 1u << 31;
  std::map<std::string, Program> kernels_;
  Program program_;
  bool in_kernel_ = false;
  uint32_t module_shared_ = 0;
  bool dynamic_ = false;
  std::map<std::string, uint64_t> symbols_, module_symbols_;
  std::map<std::string, Slot> slots_;
  std::map<uint64_t, size_t> constants_;
  std::map<std::string, uint32_t> labels_;
  std::vector<std::pair<size_t, std::string>> branches_;
};

}  // namespace

std::map<std::string, Program> parse(const std::string& module) { return Parser().parse(module); }

std::vector<std::string> findings(const Program& program) {
  static const std::regex generic(R"((ld|st)\.(?!global|shared|param).*)");
  std::vector<std::string> found;
  std::vector<bool> loops(program.code.size());
  for (size_t at = 0; at < program.code.size(); ++at) {
    const Instruction& i = program.code[at];
    if (program.text(i).find("bra") == std::string::npos || i.target > at) continue;
    std::fill(loops.begin() + i.target, loops.begin() + static_cast<ptrdiff_t>(at), true);
  }
  for (size_t at = 0; at < program.code.size(); ++at) {
    const std::string& text = program.text(program.code[at]);
    if (loops[at] && std::regex_match(text, generic)) found.push_back(program.name + ": " + text);
  }
  return found;
}

}  // namespace ptx
