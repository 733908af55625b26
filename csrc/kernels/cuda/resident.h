// A table that stays on the device, and what makes it: for lists longer than a kernel's parameters
// hold, and for numbers that are read when the kernel runs.
#pragma once

#include "core/program.h"
#include "kernels/kernels.h"

namespace spectrain {

// In one piece of device memory: rows, pointers, arguments of every group.
struct ResidentLayout {
  size_t rows_bytes, pointers_bytes, arguments_at, bytes;

  ResidentLayout(const TableView& view, int n_settings, int argument_bytes)
      : rows_bytes(view.n_rows * sizeof(Row)),
        pointers_bytes(static_cast<size_t>(view.n_rows) * view.n_streams * sizeof(void*)),
        arguments_at((rows_bytes + pointers_bytes + 15) / 16 * 16),
        bytes((arguments_at + static_cast<size_t>(n_settings) * argument_bytes + 15) / 16 * 16) {}
};

struct PrepareRequest {
  Operation operation;
  DType weights;
  Settings settings;
  ProgramView program;
  void* to;
  size_t stride;  // from one group's arguments to the next one's
};

// Both return null or what is wrong, and count their launches. `to` is 16-byte aligned and has room
// for whole 16 bytes.
const char* enqueue_write(void* to, const void* from, size_t n, void* stream, int* launches);
const char* enqueue_prepare(const PrepareRequest&, void* stream, int* launches);

}  // namespace spectrain
