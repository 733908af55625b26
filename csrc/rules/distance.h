// Squared distances between lists of weights, summed in double in a fixed order, so that CPU and
// GPU give the same bits. Each chunk has kLanes running sums (element i is added to lane i %
// kLanes), which are added in a tree; then the same over the chunks of a tensor.
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

// Appends the sum over tensors, in order, to the results of a list.
SPECTRAIN_HD void total_distance(double* result, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += result[i];
  result[n] = total;
}

// Arguments of a distance call. A row's streams are the weights, the compared lists, and last the
// output of the row: out[j * stride] for list j.
struct Distances {
  TableView table;
  uint32_t n_lists;
  double* partial;  // n_lists per chunk
  int64_t stride;
};

}  // namespace spectrain
