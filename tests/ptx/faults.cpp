// Small kernels with a mistake each, which the interpreted device has to notice, and some without.
#include <cstdio>
#include <string>

#include "machine.h"

namespace {

using namespace ptx;

struct Kernel {
  const char* what;
  const char* body;   // %rd1 is an array of 256 bytes of which the first half has values
  const char* fault;  // a part of the message; null: there is none
};

constexpr const char* kOwnElement =
    "mov.u32 %r1, %tid.x;\n"
    "mul.wide.u32 %rd2, %r1, 4;\n"
    "add.s64 %rd3, %rd1, %rd2;\n"
    "mov.b32 %r4, shared;\n"
    "cvt.u32.u64 %r5, %rd2;\n"
    "add.s32 %r5, %r5, %r4;\n"
    "mov.u32 %r2, %ctaid.x;\n"
    "setp.eq.s32 %p1, %r2, 0;\n"
    "setp.eq.s32 %p2, %r1, 0;\n";

// Each is run by two blocks of 16 threads.
constexpr Kernel kKernels[] = {
    {"an element a thread", "@%p1 st.global.u32 [%rd3], %r1;", nullptr},
    {"beyond the end", "@%p1 st.global.u32 [%rd3+200], %r1;", "a write of 4 bytes"},
    {"before the beginning", "ld.global.u32 %r6, [%rd3+-4];", "out of bounds"},
    {"misaligned", "ld.global.u32 %r6, [%rd3+2];", "misaligned"},
    {"a misaligned vector", "ld.global.v2.u32 {%r6, %r7}, [%rd1+4];", "misaligned"},
    {"computing without a value", "ld.global.u32 %r6, [%rd3+128];\nadd.s32 %r6, %r6, 1;",
     "uninitialized"},
    {"deciding without a value", "ld.global.u32 %r6, [%rd3+128];\nsetp.eq.s32 %p1, %r6, 0;",
     "uninitialized"},
    {"copying without a value", "ld.global.u32 %r6, [%rd3+128];\nst.shared.u32 [%r5], %r6;",
     nullptr},
    {"shared memory without a value", "ld.shared.u32 %r6, [%r5];\nadd.s32 %r6, %r6, 1;",
     "uninitialized"},
    {"writes of two threads", "@%p1 st.global.u32 [%rd1], %r1;", "another thread's write"},
    {"writes of two blocks", "@%p2 st.global.u32 [%rd1], %r1;", "another thread's write"},
    {"a write after a read", "ld.global.u32 %r6, [%rd1];\n@%p2 st.global.u32 [%rd1], %r1;",
     "races"},
    {"no barrier", "@%p2 st.shared.u32 [%r4], %r1;\nld.shared.u32 %r6, [%r4];", "races"},
    {"a barrier", "@%p2 st.shared.u32 [%r4], %r1;\nbar.sync 0;\nld.shared.u32 %r6, [%r4];",
     nullptr},
    {"a barrier of some", "@%p2 bar.sync 0;", "do not reach a barrier"},
    {"two barriers", "@%p2 bra $L__2;\nbar.sync 0;\nret;\n$L__2:\nbar.sync 0;",
     "do not reach a barrier"},
    {"a loop without end", "$L__1:\nbra $L__1;", "does not end"},
    {"beyond the parameters", "ld.param.u64 %rd2, [parameters+8];", "beyond the parameters"},
    {"approximate arithmetic", "rcp.approx.ftz.f32 %f1, %f1;", "unknown instruction"},
    {"rounding that is not said", "add.f32 %f1, %f1, %f1;", "unknown instruction"},
    {"local memory", ".local .align 4 .b8 depot[16];", "local memory"},
};

// What the device says of a kernel; nothing if it ends.
std::string fault_of(const Kernel& kernel) {
  const std::string text =
      ".visible .entry k(\n.param .align 8 .b8 parameters[8]\n)\n.maxntid 16, 1, 1\n{\n"
      ".reg .pred %p<3>;\n.reg .f32 %f<2>;\n.reg .b32 %r<8>;\n.reg .b64 %rd<4>;\n"
      ".shared .align 4 .b8 shared[64];\nld.param.u64 %rd1, [parameters];\n" +
      std::string(kOwnElement) + kernel.body + "\nret;\n}\n";
  try {
    auto programs = parse(text);
    Machine machine;
    machine.budget = 10000;
    const uint64_t array = machine.global.first() + 512;
    machine.global.open(array, 256, 1);
    memset(machine.global.write_by_host(array, 128), 0, 128);
    std::vector<char> parameters(sizeof(array));
    memcpy(parameters.data(), &array, sizeof(array));
    machine.run({&programs.at("k"), parameters, 2, 16, 0});
    return "";
  } catch (const Fault& fault) {
    return fault.what();
  }
}

}  // namespace

int main() {
  int wrong = 0;
  for (const Kernel& kernel : kKernels) {
    const std::string said = fault_of(kernel);
    const bool right =
        kernel.fault == nullptr ? said.empty() : said.find(kernel.fault) != std::string::npos;
    wrong += !right;
    if (!right)
      std::printf("%s: expected %s, got %s\n", kernel.what,
                  kernel.fault == nullptr ? "no fault" : kernel.fault,
                  said.empty() ? "none" : said.c_str());
  }
  std::printf("%zu kernels, %d wrong\n", std::size(kKernels), wrong);
  return wrong == 0 ? 0 : 1;
}
