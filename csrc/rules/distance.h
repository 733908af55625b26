// Squared distances between lists of weights, summed in double in an order that does not depend on
// the machine: kLanes running sums per chunk, element i goes to lane i % kLanes, and a tree over
// the lanes; then the same over the chunks of a tensor. So the CPU and the GPU give the same bits.
#pragma once

#include "core/scalar.h"
#include "core/table.h"

namespace spectrain {

constexpr int kLanes = 256;

template <class T>
SPECTRAIN_HD double add_square(T a, T b, double sum) {
  const double d = static_cast<double>(widen(a)) - static_cast<double>(widen(b));
  return multiply_add(d, d, sum);
}

// Behind the results of one list, their sum in the order of tensors.
SPECTRAIN_HD void total_distance(double* result, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += result[i];
  result[n] = total;
}

// What a distance call works on. A row's streams are the weights, the lists they are compared with,
// and, in the last place, where the row's result goes: out[j * stride] for list j.
struct Distances {
  TableView table;
  uint32_t n_lists;
  double* partial;  // n_lists per chunk
  int64_t stride;
};

}  // namespace spectrain
