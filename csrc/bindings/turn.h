// Allows one call of a plan at a time.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "kernels/cpu/threads.h"

namespace spectrain {

class Turns {
 private:
  friend class Turn;
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_{};
  std::atomic<int> forks_{0};  // when the turn was taken
};

// Holds the turn during its lifetime. Construct it with the GIL (attached to Python); it releases
// the GIL while waiting, because the thread that has the turn may need it.
class Turn {
 public:
  explicit Turn(Turns& turns) : turns_(turns) {
    if (!turns.mutex_.try_lock()) wait();
    turns.forks_ = forks();
    turns.holder_ = std::this_thread::get_id();
  }
  ~Turn() {
    turns_.holder_ = std::thread::id();
    turns_.mutex_.unlock();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  void wait() {
    const std::thread::id holder = turns_.holder_;
    // A holder sets `forks_` before its name. Without a name it is just arriving or leaving.
    if (holder != std::thread::id() && turns_.forks_ != forks()) {  // not of this process
      throw std::runtime_error(
          "this process was forked while another thread used the plan; make a new Plan");
    }
    if (holder == std::this_thread::get_id()) {
      throw std::runtime_error(
          "the plan was called from within one of its own calls (by __dlpack__ or the like of an "
          "argument)");
    }
    const pybind11::gil_scoped_release release;
    turns_.mutex_.lock();
  }

  Turns& turns_;
};

}  // namespace spectrain
