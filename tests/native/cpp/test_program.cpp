// Programs: what is computed for placeholders, and that nothing else is touched.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/program.h"

namespace spectrain {
namespace {

std::vector<double> run(const Program& program) {
  std::vector<double> registers(program.view().n_registers());
  evaluate(program.view(), registers.data());
  return registers;
}

}  // namespace

TEST(Program, ReadsEveryTypeAndDoesEveryOperation) {
  const float lr = 0.1F;
  const double momentum = 0.9;
  const int64_t step = (int64_t{1} << 40) + 1;
  Program program;
  program.inputs = {
      {&lr, InputType::float32}, {&momentum, InputType::float64}, {&step, InputType::int64}};
  program.constants = {3.0};
  program.code = {{0, 1, Opcode::add},
                  {0, 1, Opcode::subtract},
                  {4, 5, Opcode::multiply},
                  {2, 3, Opcode::divide},
                  {1, 3, Opcode::power}};
  const double a = lr, b = momentum;
  const std::vector<double> expected = {a,
                                        b,
                                        1099511627777.0,
                                        3.0,
                                        a + b,
                                        a - b,
                                        (a + b) * (a - b),
                                        1099511627777.0 / 3.0,
                                        std::pow(b, 3.0)};
  EXPECT_EQ(run(program), expected);
}

TEST(Program, FillsInPlaceholdersAndNothingElse) {
  const double lr = 0.25;
  Program program;
  program.inputs = {{&lr, InputType::float64}};
  program.constants = {2.0};
  program.code = {{0, 1, Opcode::multiply}};
  const std::vector<double> registers = run(program);

  Setting s;
  s.weight_decay = placeholder(0);
  s.eps = std::numeric_limits<double>::quiet_NaN();
  s.step.gradient = placeholder(2);
  s.n_outs = 2;
  s.out_end[0] = 1;
  s.out_end[1] = 3;
  s.terms[2].root = placeholder(1);
  s.terms[3].keep = placeholder(0);  // behind the last one
  fill_in(s, registers.data());
  EXPECT_EQ(s.weight_decay, 0.25);
  EXPECT_TRUE(std::isnan(s.eps));
  EXPECT_EQ(s.step.gradient, 0.5);
  EXPECT_EQ(s.step.keep, 1.0);
  EXPECT_EQ(s.terms[2].root, 2.0);
  EXPECT_TRUE(is_placeholder(s.terms[3].keep));
}

TEST(Program, NoOrdinaryNumberIsAPlaceholder) {
  using limits = std::numeric_limits<double>;
  for (const double x : {0.0, -0.0, 1.0, -1.0, limits::infinity(), -limits::infinity(),
                         limits::quiet_NaN(), -limits::quiet_NaN(), limits::signaling_NaN(),
                         limits::denorm_min(), limits::max(), std::sqrt(-1.0)}) {
    EXPECT_FALSE(is_placeholder(x)) << x;
  }
  EXPECT_TRUE(is_placeholder(placeholder(0)));
  EXPECT_TRUE(is_placeholder(placeholder(65535)));
  EXPECT_NE(placeholder(7), placeholder(7));  // a NaN: it is no special value of any formula
}

}  // namespace spectrain
