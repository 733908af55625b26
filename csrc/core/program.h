// Computes coefficients from numbers in device memory (learning rates, horizons, step counts) when
// a kernel runs. The formulas are written once, in Python (numbers.py, laws.py), which passes the
// trace of one evaluation as a program.
//
// A field of a Setting that a program computes holds a placeholder: a NaN whose payload is a
// register. Numbers from callers are never NaN.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "scalar.h"
#include "setting.h"

namespace spectrain {

enum class InputType : uint8_t { float32, float64, int64 };

struct Input {
  const void* at;
  InputType type;
};

enum class Opcode : uint8_t { add, subtract, multiply, divide, power };

// Registers: the inputs, the constants, then the result of every instruction.
struct Instruction {
  uint16_t a, b;
  Opcode code;
};

// A register is named by 16 bits.
constexpr int kMaxRegisters = 1 << 16;

constexpr uint64_t kPlaceholder = 0x7ffd5e7700000000;  // the register in the lower 16 bits

SPECTRAIN_HD double placeholder(uint16_t reg) { return bit_cast<double>(kPlaceholder | reg); }
SPECTRAIN_HD bool is_placeholder(double x) {
  return (bit_cast<uint64_t>(x) & ~uint64_t{0xffff}) == kPlaceholder;
}

struct ProgramView {
  const Input* inputs;
  const double* constants;
  const Instruction* code;
  uint16_t n_inputs, n_constants, n_code;

  SPECTRAIN_HD int n_registers() const { return n_inputs + n_constants + n_code; }
};

SPECTRAIN_HD double read(const Input& input) {
  switch (input.type) {
    case InputType::float32:
      return *static_cast<const float*>(input.at);
    case InputType::float64:
      return *static_cast<const double*>(input.at);
    case InputType::int64:
      break;
  }
  return static_cast<double>(*static_cast<const int64_t*>(input.at));
}

// The host's pow() is Python's **. A GPU's may differ in the last bits of a double, which rarely
// changes a float32 coefficient.
SPECTRAIN_HD void evaluate(const ProgramView& program, double* registers) {
  double* next = registers;
  for (int i = 0; i < program.n_inputs; ++i) *next++ = read(program.inputs[i]);
  for (int i = 0; i < program.n_constants; ++i) *next++ = program.constants[i];
  SPECTRAIN_NO_UNROLL
  for (int i = 0; i < program.n_code; ++i) {
    const Instruction instruction = program.code[i];
    const double a = registers[instruction.a], b = registers[instruction.b];
    switch (instruction.code) {
      case Opcode::add:
        *next++ = a + b;
        break;
      case Opcode::subtract:
        *next++ = a - b;
        break;
      case Opcode::multiply:
        *next++ = a * b;
        break;
      case Opcode::divide:
        *next++ = a / b;
        break;
      case Opcode::power:
        *next++ = pow(a, b);
    }
  }
}

SPECTRAIN_HD void fill_in(double& field, const double* registers) {
  if (is_placeholder(field)) field = registers[bit_cast<uint64_t>(field) & 0xffff];
}

// For extrapolation: one term and no outputs.
SPECTRAIN_HD int used_terms(const Setting& s) { return s.n_outs > 0 ? s.n_terms() : 1; }

// Replaces placeholders by numbers.
SPECTRAIN_HD void fill_in(Setting& s, const double* registers) {
  const auto fill = [&](const char* /*name*/, double& x) { fill_in(x, registers); };
  each_number(s, fill);
  each_number(s.step, fill);
  const int n = used_terms(s);
  for (int i = 0; i < n; ++i) each_number(s.terms[i], fill);
}

// A program on the host.
struct Program {
  std::vector<Input> inputs;
  std::vector<double> constants;
  std::vector<Instruction> code;

  ProgramView view() const {
    return {inputs.data(),
            constants.data(),
            code.data(),
            static_cast<uint16_t>(inputs.size()),
            static_cast<uint16_t>(constants.size()),
            static_cast<uint16_t>(code.size())};
  }
};

}  // namespace spectrain
