// The table that a kernel processes: rows of equally long streams, divided into chunks.
//
//   row 0   size 10000   chunks 0 1 2     pointers: params, grads, momentum, out 0, out 1
//   row 1   size    37   chunk  3         pointers: ...
//
// A chunk is kChunk elements from the row's first aligned element; the `head` elements before it
// belong to the row's first chunk. Launchers distribute chunks, which balances one long tensor as
// well as a thousand short ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "config.h"
#include "options.h"

namespace spectrain {

struct Row {
  int64_t size;          // elements
  uint32_t first_chunk;  // in the whole table
  uint8_t head;          // elements before every stream is aligned, see aligned_head
  uint8_t flags;         // kAligned, kFirstStep
  uint16_t setting;      // index of its parameter group's setting
};

// A row stores the index of its group's setting in 16 bits.
constexpr int kMaxGroups = 1 << 16;

// If not set, the streams of a row are never aligned together: process single elements.
constexpr unsigned kAligned = 1;
// The tensor has no momentum yet: its buffer becomes the gradient.
constexpr unsigned kFirstStep = 2;

struct Range {
  int64_t begin, end;
};

// A view of a table: of vectors on the host, of kernel parameters or global memory on the device.
struct TableView {
  const Row* rows;
  void* const* pointers;  // n_streams a row
  uint32_t n_rows, n_streams;
  uint32_t chunk_begin, chunk_end;  // the chunks of this launch, which may be part of a long table
  // If a stream is rounded stochastically, the last pointer of a row is its first element's
  // position.
  StepOptions options = {};

  SPECTRAIN_HD void* pointer(uint32_t row, uint32_t stream) const {
    return pointers[static_cast<uint64_t>(row) * n_streams + stream];
  }

  // The position of an element of a row in the call, for stochastic rounding.
  SPECTRAIN_HD uint64_t position(uint32_t row, int64_t element) const {
    const auto first = reinterpret_cast<uintptr_t>(pointer(row, n_streams - 1));
    return static_cast<uint64_t>(first) + static_cast<uint64_t>(element);
  }

  // Finds the row of a chunk by bisection.
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

// Returns the number of elements before `vector` elements of every stream are aligned for one
// access (16 bytes, or their total size if smaller); -1 if that never happens.
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
