// Storage types and their arithmetic types: float16 and bfloat16 compute in float.
#pragma once

#include <cstdint>
#include <cstring>

#include "config.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace spectrain {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class To, class From>
SPECTRAIN_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// The arithmetic type of a storage type. Integers are bits, for copies and swaps.
template <class T>
struct Arithmetic {
  using type = T;
};
template <>
struct Arithmetic<Half> {
  using type = float;
};
template <>
struct Arithmetic<BFloat16> {
  using type = float;
};
template <class T>
using acc_t = typename Arithmetic<T>::type;

SPECTRAIN_HD float widen(BFloat16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// The hardware rounds identically, including subnormals, but to another NaN. It takes one
// instruction for two elements; the integer code below takes 14.
SPECTRAIN_HD BFloat16 narrow_bfloat16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {bits};
#else
  const uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);  // to nearest, ties to even
  const uint32_t nan = u | 0x400000u;
  return {static_cast<uint16_t>((x != x ? nan : rounded) >> 16)};
#endif
}

// Branch-free, so that the host compiler vectorizes it. The GPU's hardware conversion gives the
// same bits except for NaN payloads.
SPECTRAIN_HD float widen(Half x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  // A subnormal is magnitude * 2^-24: append it to the mantissa of 2^-1, then subtract 2^-1. No
  // intermediate is subnormal in float, so flush-to-zero mode does not change the result.
  const float tiny = bit_cast<float>(magnitude | 0x3f000000u) - 0.5f;
  const uint32_t small = bit_cast<uint32_t>(tiny);
  uint32_t u = magnitude < 0x0400u ? small : normal;
  // 0.5 + m*2^-24 is exact: float spacing at 0.5 is 2^-24.
  u = magnitude >= 0x7c00u ? special : u;
  return bit_cast<float>(u | sign);
#endif
}

SPECTRAIN_HD Half narrow_half(float x) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  const uint32_t normal = (a - (112u << 23) + 0x0fffu + ((a >> 13) & 1u)) >> 13;
  // Below 2^-14 the result is subnormal: adding 0.5 rounds at 2^-24 to nearest even.
  const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(a) + 0.5f) - 0x3f000000u;
  uint32_t h = a < 0x38800000u ? small : normal;
  h = a >= 0x477ff000u ? 0x7c00u : h;  // 65520 and above round to infinity
  h = a > 0x7f800000u ? (0x7e00u | ((a >> 13) & 0x03ffu)) : h;
  return {static_cast<uint16_t>(h | sign)};
#endif
}

template <class T>
SPECTRAIN_HD acc_t<T> widen(T x) {
  return x;
}

template <class T>
struct Narrow {
  SPECTRAIN_HD static T from(T x) { return x; }
};
template <>
struct Narrow<Half> {
  SPECTRAIN_HD static Half from(float x) { return narrow_half(x); }
};
template <>
struct Narrow<BFloat16> {
  SPECTRAIN_HD static BFloat16 from(float x) { return narrow_bfloat16(x); }
};

// Explicit fused multiply-add. Both compilers must not contract on their own (-ffp-contract=off,
// -fmad=false), so that host and device round identically.
SPECTRAIN_HD float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SPECTRAIN_HD double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

// Correctly rounded on both sides; nvcc's default for both (-prec-sqrt, -prec-div) is kept.
SPECTRAIN_HD float square_root(float x) { return __builtin_sqrtf(x); }
SPECTRAIN_HD double square_root(double x) { return __builtin_sqrt(x); }

SPECTRAIN_HD float magnitude(float x) { return __builtin_fabsf(x); }
SPECTRAIN_HD double magnitude(double x) { return __builtin_fabs(x); }
SPECTRAIN_HD float with_sign(float x, float of) { return __builtin_copysignf(x, of); }
SPECTRAIN_HD double with_sign(double x, double of) { return __builtin_copysign(x, of); }

// x^n for 0 <= x < 1 and a whole number n >= 0, the same bits on both sides, where math libraries
// differ. Squares an unevaluated sum of two numbers (Dekker, 1971), so that the error is that of
// the last rounding.
SPECTRAIN_HD double power(double x, double n) {
  double high = 1.0, low = 0.0, square = x, rest = 0.0;
  for (auto k = static_cast<uint64_t>(n); k != 0; k >>= 1) {
    if ((k & 1u) != 0) {
      const double product = high * square;
      const double error = multiply_add(high, square, -product) + (high * rest + low * square);
      high = product + error;
      low = error - (high - product);
    }
    const double product = square * square;
    const double error = multiply_add(square, square, -product) + 2.0 * square * rest;
    square = product + error;
    rest = error - (square - product);
  }
  return high;
}

}  // namespace spectrain
