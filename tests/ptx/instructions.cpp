// What the instructions of PTX do that nvcc writes for these kernels. Semantics: "PTX ISA", 9.0.
#include <cmath>
#include <regex>
#include <type_traits>
#include <unordered_map>

#include "machine.h"

namespace ptx {
namespace {

using Half = _Float16;  // the compiler's own conversions, not the project's

template <class T, auto operation>
Next unary(Thread& t, const Instruction& i) {
  t.put(i.to[0], operation(t.get<T>(i.from[0])));
  return Next::instruction;
}
template <class T, auto operation>
Next binary(Thread& t, const Instruction& i) {
  t.put(i.to[0], operation(t.get<T>(i.from[0]), t.get<T>(i.from[1])));
  return Next::instruction;
}
template <class T, auto operation>
Next ternary(Thread& t, const Instruction& i) {
  t.put(i.to[0], operation(t.get<T>(i.from[0]), t.get<T>(i.from[1]), t.get<T>(i.from[2])));
  return Next::instruction;
}

// --- integers: arithmetic wraps ---

template <class T>
using unsigned_t = std::make_unsigned_t<T>;
template <class T>
constexpr auto add = [](T a, T b) { return static_cast<T>(unsigned_t<T>(a) + unsigned_t<T>(b)); };
template <class T>
constexpr auto subtract =
    [](T a, T b) { return static_cast<T>(unsigned_t<T>(a) - unsigned_t<T>(b)); };
template <class T>
constexpr auto multiply_low = [](T a, T b) {
  return static_cast<T>(uint64_t(unsigned_t<T>(a)) * uint64_t(unsigned_t<T>(b)));
};
template <class T, class Wide>
constexpr auto multiply_wide = [](T a, T b) { return static_cast<Wide>(Wide(a) * Wide(b)); };
template <class T>
constexpr auto multiply_add_low = [](T a, T b, T c) { return add<T>(multiply_low<T>(a, b), c); };
template <class T>
constexpr auto smaller = [](T a, T b) { return a < b ? a : b; };
template <class T>
constexpr auto larger = [](T a, T b) { return a > b ? a : b; };

// Shifts by 32 bits or more, whatever the width; beyond the width nothing or the sign is left.
template <class T>
Next shift_left(Thread& t, const Instruction& i) {
  const auto by = t.get<uint32_t>(i.from[1]);
  t.put<T>(i.to[0], by < sizeof(T) * 8 ? static_cast<T>(t.get<T>(i.from[0]) << by) : T(0));
  return Next::instruction;
}
template <class T>
Next shift_right(Thread& t, const Instruction& i) {
  const uint32_t most = sizeof(T) * 8 - 1, by = t.get<uint32_t>(i.from[1]);
  const T a = t.get<T>(i.from[0]);
  t.put<T>(i.to[0], by <= most                     ? static_cast<T>(a >> by)
                    : std::is_signed_v<T> && a < 0 ? T(-1)
                                                   : T(0));
  return Next::instruction;
}

// d = b with `length` bits from `first` on replaced by those of a.
template <class T>
Next insert_bits(Thread& t, const Instruction& i) {
  constexpr uint32_t width = sizeof(T) * 8;
  const T a = t.get<T>(i.from[0]), b = t.get<T>(i.from[1]);
  const uint32_t first = t.get<uint32_t>(i.from[2]) & 255,
                 length = t.get<uint32_t>(i.from[3]) & 255;
  const T low = length >= width ? ~T(0) : static_cast<T>((T(1) << length) - 1);
  t.put<T>(i.to[0],
           first >= width ? b : static_cast<T>((b & ~(low << first)) | (a & low) << first));
  return Next::instruction;
}

// Bytes of {b, a}, chosen by nibbles of c; a set upper bit of a nibble copies the byte's sign.
Next permute_bytes(Thread& t, const Instruction& i) {
  const uint64_t bytes = uint64_t{t.get<uint32_t>(i.from[1])} << 32 | t.get<uint32_t>(i.from[0]);
  const auto selector = t.get<uint32_t>(i.from[2]);
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    const uint32_t nibble = selector >> (4 * k) & 15;
    uint32_t byte = bytes >> (8 * (nibble & 7)) & 255;
    if ((nibble & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
    result |= byte << (8 * k);
  }
  t.put(i.to[0], result);
  return Next::instruction;
}

// --- comparisons: those with a u are also true for NaN ---

constexpr auto nan_of = [](auto a, auto b) { return a != a || b != b; };
template <class T>
constexpr auto equal = [](T a, T b) { return a == b; };
template <class T>
constexpr auto unequal = [](T a, T b) { return a != b && !nan_of(a, b); };
template <class T>
constexpr auto less = [](T a, T b) { return a < b; };
template <class T>
constexpr auto at_most = [](T a, T b) { return a <= b; };
template <class T>
constexpr auto greater = [](T a, T b) { return a > b; };
template <class T>
constexpr auto at_least = [](T a, T b) { return a >= b; };
template <class T, auto compare>
constexpr auto or_nan = [](T a, T b) { return nan_of(a, b) || compare(a, b); };
template <class T>
constexpr auto is_nan = [](T a, T b) { return nan_of(a, b); };

template <class T>
Next select(Thread& t, const Instruction& i) {
  t.put(i.to[0], t.get<bool>(i.from[2]) ? t.get<T>(i.from[0]) : t.get<T>(i.from[1]));
  return Next::instruction;
}

// --- conversions ---

template <class To, class From>
constexpr auto convert = [](From x) { return static_cast<To>(x); };

// To nearest, ties to even: decided by the exact distances of the two neighbours, in double.
constexpr auto to_bfloat16 = [](float x) -> uint16_t {
  if (x != x) return 0x7fff;
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const auto value = [](uint32_t upper) {
    // Beyond the largest finite number the next one would be 2^128.
    if ((upper & 0x7f80u) == 0x7f80u) return std::ldexp((upper & 0x8000u) != 0 ? -1.0 : 1.0, 128);
    const uint32_t all = upper << 16;
    float f;
    memcpy(&f, &all, sizeof(f));
    return static_cast<double>(f);
  };
  const uint32_t down = bits >> 16, up = down + 1;
  if ((down & 0x7f80u) == 0x7f80u) return static_cast<uint16_t>(down);  // infinity
  const double below = std::fabs(double{x} - value(down)), above = std::fabs(value(up) - double{x});
  if (below == above) return static_cast<uint16_t>((down & 1u) == 0 ? down : up);
  return static_cast<uint16_t>(below < above ? down : up);
};
constexpr auto from_bfloat16 = [](uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float f;
  memcpy(&f, &bits, sizeof(f));
  return f;
};

// --- moves ---

template <class T>
constexpr auto itself = [](T x) { return x; };

// Also {a, b} into a wider register, and back; the first is the low part.
template <class T>
Next move(Thread& t, const Instruction& i) {
  if (i.n_to == 1 && i.n_from == 1) return unary<T, itself<T>>(t, i);
  const unsigned parts = i.n_to * i.n_from, bits = 8 * sizeof(T) / parts;
  if (i.n_to == 1) {
    T whole = 0;
    for (unsigned k = 0; k < parts; ++k) {
      const auto part = t.get<uint64_t>(i.from[k]) & ((uint64_t{1} << bits) - 1);
      whole = static_cast<T>(whole | static_cast<T>(part) << (k * bits));
    }
    t.put(i.to[0], whole);
  } else {
    const auto whole = uint64_t{t.get<T>(i.from[0])};
    for (unsigned k = 0; k < parts; ++k) {
      t.put<uint64_t>(i.to[k], whole >> (k * bits) & ((uint64_t{1} << bits) - 1));
    }
  }
  return Next::instruction;
}

// --- memory ---

enum class Where { generic, global, shared, parameters };

template <Where where>
Space& space_of(Thread& t, uint64_t address) {
  Machine& m = t.machine;
  const bool is_shared =
      where == Where::shared || (where == Where::generic && m.shared.holds(address));
  return is_shared ? m.shared : m.global;
}

template <class T>
uint64_t address_of(Thread& t, const Instruction& i, unsigned n) {
  const uint64_t address = t.get<uint64_t>(i.base) + static_cast<uint64_t>(i.offset);
  // n is a power of two.
  if ((address & (sizeof(T) * n - 1)) != 0) throw Fault("misaligned address");
  return address;
}

template <Where where, class T>
Next load(Thread& t, const Instruction& i) {
  const size_t n = i.n_to;
  const uint64_t address = address_of<T>(t, i, i.n_to);
  const char* from = nullptr;
  uint32_t undefined = 0;
  if constexpr (where == Where::parameters) {
    const auto& parameters = t.machine.grid->parameters;
    const uint64_t begin = address - kParametersAt;
    if (begin > parameters.size() || n * sizeof(T) > parameters.size() - begin) {
      throw Fault("beyond the parameters");
    }
    from = parameters.data() + begin;
  } else {
    from = space_of<where>(t, address).read(address, n * sizeof(T), t.self, &undefined);
  }
  for (size_t k = 0; k < n; ++k) {
    T value;
    memcpy(&value, from + k * sizeof(T), sizeof(T));
    // Signed numbers are extended to the register, whatever its width.
    if constexpr (std::is_signed_v<T>) {
      t.put<int64_t>(i.to[k], value);
    } else {
      t.put<T>(i.to[k], value);
    }
    const uint32_t mine = undefined >> (k * sizeof(T)) & ((1u << sizeof(T)) - 1);
    if (mine != 0) t.undefined.emplace_back(i.to[k], mine);
  }
  return Next::instruction;
}

template <Where where, class T>
Next store(Thread& t, const Instruction& i) {
  const size_t n = i.n_from;
  const uint64_t address = address_of<T>(t, i, i.n_from);
  for (size_t k = 0; k < n; ++k) {
    uint32_t undefined = 0;
    for (const auto& [slot, bytes] : t.undefined) undefined |= slot == i.from[k] ? bytes : 0;
    const T value = t.get<T>(i.from[k]);
    const uint64_t to = address + k * sizeof(T);
    memcpy(space_of<where>(t, to).write(to, sizeof(T), t.self, undefined), &value, sizeof(T));
  }
  return Next::instruction;
}

// --- control ---

Next branch(Thread& t, const Instruction& i) {
  t.at = i.target;
  return Next::instruction;
}
Next barrier(Thread&, const Instruction&) { return Next::barrier; }
Next end(Thread&, const Instruction&) { return Next::end; }

using Forms = std::unordered_map<std::string, Run>;

template <class T>
void comparisons(Forms& f, const std::string& type) {
  f["setp.eq." + type] = binary<T, equal<T>>;
  f["setp.ne." + type] = binary<T, unequal<T>>;
  f["setp.lt." + type] = binary<T, less<T>>;
  f["setp.le." + type] = binary<T, at_most<T>>;
  f["setp.gt." + type] = binary<T, greater<T>>;
  f["setp.ge." + type] = binary<T, at_least<T>>;
}

template <class T>
void integers(Forms& f, const std::string& type) {
  f["add." + type] = binary<T, add<T>>;
  f["sub." + type] = binary<T, subtract<T>>;
  f["mul.lo." + type] = binary<T, multiply_low<T>>;
  f["mad.lo." + type] = ternary<T, multiply_add_low<T>>;
  f["min." + type] = binary<T, smaller<T>>;
  f["max." + type] = binary<T, larger<T>>;
  f["neg." + type] = unary<T, [](T x) { return subtract<T>(0, x); }>;
  f["shr." + type] = shift_right<T>;
  comparisons<T>(f, type);
}

template <class T>
void bits(Forms& f, const std::string& width) {
  f["and.b" + width] = binary<T, [](T a, T b) { return static_cast<T>(a & b); }>;
  f["or.b" + width] = binary<T, [](T a, T b) { return static_cast<T>(a | b); }>;
  f["xor.b" + width] = binary<T, [](T a, T b) { return static_cast<T>(a ^ b); }>;
  f["not.b" + width] = unary<T, [](T a) { return static_cast<T>(~a); }>;
  f["shl.b" + width] = shift_left<T>;
  f["setp.eq.b" + width] = binary<T, equal<T>>;
  f["setp.ne.b" + width] = binary<T, unequal<T>>;
  for (const char* type : {"b", "u", "s", "f"}) {
    f["selp." + (type + width)] = select<T>;
    f["mov." + (type + width)] = move<T>;
  }
}

// All arithmetic rounds to nearest: without .rn, or with .ftz, an opcode is unknown.
template <class T>
void floats(Forms& f, const std::string& type) {
  f["add.rn." + type] = binary<T, [](T a, T b) { return a + b; }>;
  f["sub.rn." + type] = binary<T, [](T a, T b) { return a - b; }>;
  f["mul.rn." + type] = binary<T, [](T a, T b) { return a * b; }>;
  f["div.rn." + type] = binary<T, [](T a, T b) { return a / b; }>;
  f["fma.rn." + type] = ternary<T, [](T a, T b, T c) { return std::fma(a, b, c); }>;
  f["sqrt.rn." + type] = unary<T, [](T x) { return std::sqrt(x); }>;
  f["rcp.rn." + type] = unary<T, [](T x) { return 1 / x; }>;
  f["neg." + type] = unary<T, [](T x) { return -x; }>;
  f["abs." + type] = unary<T, [](T x) { return std::fabs(x); }>;
  f["copysign." + type] = binary<T, [](T sign, T x) { return std::copysign(x, sign); }>;
  comparisons<T>(f, type);
  f["setp.equ." + type] = binary<T, or_nan<T, equal<T>>>;
  f["setp.neu." + type] = binary<T, or_nan<T, unequal<T>>>;
  f["setp.ltu." + type] = binary<T, or_nan<T, less<T>>>;
  f["setp.leu." + type] = binary<T, or_nan<T, at_most<T>>>;
  f["setp.gtu." + type] = binary<T, or_nan<T, greater<T>>>;
  f["setp.geu." + type] = binary<T, or_nan<T, at_least<T>>>;
  f["setp.nan." + type] = binary<T, is_nan<T>>;
}

template <class To, class... From>
void conversions(Forms& f, const std::string& to, const char* const (&from)[sizeof...(From)]) {
  size_t k = 0;
  ((f["cvt." + to + "." + from[k++]] = unary<From, convert<To, From>>), ...);
}

template <Where where, class T>
void accesses(Forms& loads, Forms& stores, const std::string& type) {
  const std::string space = where == Where::generic  ? ""
                            : where == Where::global ? "global."
                            : where == Where::shared ? "shared."
                                                     : "param.";
  loads[space + type] = load<where, T>;
  if (where != Where::parameters) stores[space + type] = store<where, T>;
}
template <Where where>
void all_accesses(Forms& l, Forms& s) {
  for (const char* kind : {"u", "b"}) {
    accesses<where, uint8_t>(l, s, kind + std::string("8"));
    accesses<where, uint16_t>(l, s, kind + std::string("16"));
    accesses<where, uint32_t>(l, s, kind + std::string("32"));
    accesses<where, uint64_t>(l, s, kind + std::string("64"));
  }
  accesses<where, int8_t>(l, s, "s8");
  accesses<where, int16_t>(l, s, "s16");
  accesses<where, int32_t>(l, s, "s32");
  accesses<where, int64_t>(l, s, "s64");
  accesses<where, uint32_t>(l, s, "f32");
  accesses<where, uint64_t>(l, s, "f64");
}

struct Tables {
  Forms plain, loads, stores;

  Tables() {
    integers<uint16_t>(plain, "u16");
    integers<int16_t>(plain, "s16");
    integers<uint32_t>(plain, "u32");
    integers<int32_t>(plain, "s32");
    integers<uint64_t>(plain, "u64");
    integers<int64_t>(plain, "s64");
    bits<uint16_t>(plain, "16");
    bits<uint32_t>(plain, "32");
    bits<uint64_t>(plain, "64");
    floats<float>(plain, "f32");
    floats<double>(plain, "f64");
    plain["and.pred"] = binary<bool, [](bool a, bool b) { return a && b; }>;
    plain["or.pred"] = binary<bool, [](bool a, bool b) { return a || b; }>;
    plain["xor.pred"] = binary<bool, [](bool a, bool b) { return a != b; }>;
    plain["not.pred"] = unary<bool, [](bool a) { return !a; }>;
    plain["mov.pred"] = unary<bool, itself<bool>>;
    plain["mul.wide.u16"] = binary<uint16_t, multiply_wide<uint16_t, uint32_t>>;
    plain["mul.wide.s16"] = binary<int16_t, multiply_wide<int16_t, int32_t>>;
    plain["mul.wide.u32"] = binary<uint32_t, multiply_wide<uint32_t, uint64_t>>;
    plain["mul.wide.s32"] = binary<int32_t, multiply_wide<int32_t, int64_t>>;
    plain["bfi.b32"] = insert_bits<uint32_t>;
    plain["bfi.b64"] = insert_bits<uint64_t>;
    plain["prmt.b32"] = permute_bytes;
    conversions<uint16_t, uint32_t, uint64_t>(plain, "u16", {"u32", "u64"});
    conversions<uint32_t, uint8_t, uint16_t, uint64_t>(plain, "u32", {"u8", "u16", "u64"});
    conversions<uint64_t, uint8_t, uint16_t, uint32_t>(plain, "u64", {"u8", "u16", "u32"});
    conversions<int32_t, int8_t, int16_t, int64_t>(plain, "s32", {"s8", "s16", "s64"});
    conversions<int64_t, int8_t, int16_t, int32_t>(plain, "s64", {"s8", "s16", "s32"});
    conversions<double, float>(plain, "f64", {"f32"});
    conversions<float, Half>(plain, "f32", {"f16"});
    conversions<float, double>(plain, "rn.f32", {"f64"});
    conversions<Half, float>(plain, "rn.f16", {"f32"});
    plain["cvt.rn.bf16.f32"] = unary<float, to_bfloat16>;
    plain["cvt.f32.bf16"] = unary<uint16_t, from_bfloat16>;
    // Generic addresses of global memory are its addresses.
    plain["cvta.to.global.u64"] = unary<uint64_t, itself<uint64_t>>;
    plain["cvt.rzi.u64.f64"] =  // of whole numbers that fit
        unary<double, [](double x) { return static_cast<uint64_t>(x); }>;
    plain["bar.sync"] = barrier;
    plain["ret"] = end;
    all_accesses<Where::generic>(loads, stores);
    all_accesses<Where::global>(loads, stores);
    all_accesses<Where::shared>(loads, stores);
    all_accesses<Where::parameters>(loads, stores);
  }
};

}  // namespace

Form form_of(const std::string& opcode) {
  static const Tables tables;
  if (opcode == "bra" || opcode == "bra.uni") return {branch, Form::branch};
  const bool loads = opcode.compare(0, 3, "ld.") == 0, stores = opcode.compare(0, 3, "st.") == 0;
  const Forms& forms = loads ? tables.loads : stores ? tables.stores : tables.plain;
  std::string name = loads || stores ? opcode.substr(3) : opcode;
  if (loads || stores) {
    // The operands say how many elements there are; hints to caches change no result.
    static const std::regex ignored(R"((^|\.)(v2|v4|nc|cs|cg)(?=\.))");
    name = std::regex_replace(name, ignored, "");
    if (name[0] == '.') name.erase(0, 1);
  }
  const auto found = forms.find(name);
  if (found == forms.end()) throw Fault("unknown instruction: " + opcode);
  return {found->second, loads ? Form::load : stores ? Form::store : Form::plain};
}

}  // namespace ptx
