// The table a kernel is driven over: rows of equally long streams, cut into chunks.
//
//   row 0   size 10000   chunks 0 1 2     pointers: params, grads, momentum, out 0, out 1
//   row 1   size    37   chunk  3         pointers: ...
//
// A chunk is kChunk elements counted from the row's first aligned element; the `head` elements
// before it belong to the row's first chunk. Launchers walk chunks, so that one long tensor and a
// thousand short ones are balanced alike.
#pragma once

#include <cstddef>
#include <cstdint>

#include "config.h"
#include "options.h"

namespace spectrain {

struct Row {
  int64_t size;          // elements
  uint32_t first_chunk;  // of the whole table
  uint8_t head;          // elements before every stream is aligned, see aligned_head
  uint8_t flags;         // kAligned, kFirstStep
  uint16_t setting;      // which of the launch's settings applies: its parameter group's
};

// A row names its group's setting by 16 bits.
constexpr int kMaxGroups = 1 << 16;

// Without it the streams of a row are never aligned together: go element by element.
constexpr unsigned kAligned = 1;
// This tensor has no momentum yet: its buffer becomes the gradient.
constexpr unsigned kFirstStep = 2;

struct Range {
  int64_t begin, end;
};

// A view of a table: on the host of vectors, on the device of kernel parameters or global memory.
struct TableView {
  const Row* rows;
  void* const* pointers;  // n_streams a row
  uint32_t n_rows, n_streams;
  uint32_t chunk_begin, chunk_end;  // what to work on; a launch may hold a part of a long table
  // Where rounding is stochastic, the last pointer of a row is its first element's position.
  StepOptions options = {};

  SPECTRAIN_HD void* pointer(uint32_t row, uint32_t stream) const {
    return pointers[static_cast<uint64_t>(row) * n_streams + stream];
  }

  // The generator's state at the element of a row, where rounding is stochastic.
  SPECTRAIN_HD uint64_t random_state(uint32_t row, int64_t element) const {
    const auto first = reinterpret_cast<uintptr_t>(pointer(row, n_streams - 1));
    return options.rounding.state(static_cast<uint64_t>(first) + static_cast<uint64_t>(element));
  }

  // The row a chunk belongs to, by bisection: the last one whose first chunk is not behind it.
  SPECTRAIN_HD uint32_t find_row(uint32_t chunk) const {
    uint32_t low = 0, high = n_rows;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      if (rows[middle].first_chunk <= chunk) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  SPECTRAIN_HD Range range(const Row& row, uint32_t chunk) const {
    const int64_t k = chunk - row.first_chunk;
    const int64_t begin = k == 0 ? 0 : row.head + k * kChunk;
    const int64_t end = row.head + (k + 1) * kChunk;
    return {begin, end < row.size ? end : row.size};
  }
};

// Elements until `vector` elements of every stream are aligned to what one access of them takes, 16
// bytes or all that they are; or -1 if they never are together. A vector is the period.
inline int aligned_head(void* const* pointers, const int* widths, size_t n_streams, int vector) {
  for (int head = 0; head < vector; ++head) {
    bool aligned = true;
    for (size_t s = 0; s < n_streams; ++s) {
      const int bytes = vector * widths[s] < 16 ? vector * widths[s] : 16;
      const auto at = reinterpret_cast<uintptr_t>(pointers[s]) +
                      static_cast<uintptr_t>(head) * static_cast<uintptr_t>(widths[s]);
      aligned = aligned && at % static_cast<uintptr_t>(bytes) == 0;
    }
    if (aligned) return head;
  }
  return -1;
}

inline uint32_t chunks_of(int64_t size, int head) {
  const int64_t body = size - head;
  return body <= 0 ? 1u : static_cast<uint32_t>((body + kChunk - 1) / kChunk);
}

}  // namespace spectrain
