// What a test sees and decides of the stand-in for the CUDA runtime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "cuda_runtime.h"

namespace stand_in {

// Forgets everything: no work, no memory, no context, no error. What may happen in several orders
// happens in one that the seed chooses. Device d has d + 1 multiprocessors.
void reset(uint64_t seed, int devices = 3);

// The device's memory is inaccessible unless a kernel runs or an Access lives, and what is beside
// an allocation always, with the address sanitizer. `offset`: from a 256-byte boundary.
struct Access {
  Access();
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
};
void* allocate(size_t bytes, size_t offset = 0);
void write(void* to, const void* from, size_t bytes);  // at once, whatever is enqueued
void read(void* to, const void* from, size_t bytes);

cudaStream_t new_stream(int device);
// Everything that is enqueued from here on to `later` follows what is enqueued to `earlier` by now.
void order(cudaStream_t earlier, cudaStream_t later);
void enqueue(cudaStream_t, std::function<void()> work);  // host work in a stream's order
// Runs all that is enqueued, in any order that the streams allow.
void synchronize();

using Graph = std::vector<std::function<void()>>;
void begin_capture(cudaStream_t);
Graph end_capture(cudaStream_t);
void launch(const Graph&, cudaStream_t);

// The n-th runtime call from here on (0: the next one) fails. False if that many were not made.
void fail_call(int n);
bool failed();

// Devices that have a context by now, and the one whose context is the thread's; -1: none.
std::set<int> contexts();
int current();
void set_current(int device);

// CPU kernels that are found from here on are of this instruction set; 0 is the baseline.
int instruction_sets();
void choose_instruction_set(int number);

}  // namespace stand_in
