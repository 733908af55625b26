// Elements of arrays in tests: drawn, written in a type, and compared.
#pragma once

#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>

#include "core/scalar.h"
#include "kernels/kernels.h"

namespace elements {

using spectrain::DType;

// Writes a number as an element of a type.
inline void store(char* to, DType type, double x) {
  const auto as_float = static_cast<float>(x);
  const uint16_t narrow = type == DType::float16 ? spectrain::narrow_half(as_float).bits
                                                 : spectrain::narrow_bfloat16(as_float).bits;
  const void* from = &narrow;
  if (type == DType::float32) from = &as_float;
  if (type == DType::float64) from = &x;
  memcpy(to, from, spectrain::size_of(type));
}

template <class T>
bool holds_nan(const char* from) {
  T x;
  memcpy(&x, from, sizeof(x));
  const auto wide = spectrain::widen(x);
  return wide != wide;
}
inline bool is_nan(const char* from, DType type) {
  return type == DType::float64   ? holds_nan<double>(from)
         : type == DType::float32 ? holds_nan<float>(from)
         : type == DType::float16 ? holds_nan<spectrain::Half>(from)
                                  : holds_nan<spectrain::BFloat16>(from);
}

// Whether two elements have the same bits, or both are NaN.
inline bool agree(const char* one, const char* other, DType type) {
  return memcmp(one, other, spectrain::size_of(type)) == 0 ||
         (is_nan(one, type) && is_nan(other, type));
}

// A number, or with `special` one of twelve an infinity, NaN, a zero, a subnormal, a large one.
inline double number(std::mt19937_64& random, bool special) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr double specials[] = {infinity, -infinity, NAN,   0.0,   -0.0, 65504.0, 65520.0,
                                 1e-7,     -3e-8,     1e-41, 1e-45, 1e20, 3.4e38,  -1e-320};
  if (special && random() % 12 == 0) return specials[random() % std::size(specials)];
  return std::normal_distribution<double>()(random);
}

}  // namespace elements
