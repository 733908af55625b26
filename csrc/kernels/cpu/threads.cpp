#include "threads.h"

#include <pthread.h>

namespace spectrain {
namespace {
int n_forks = 0;
const int registered = pthread_atfork(nullptr, nullptr, [] { ++n_forks; });
}  // namespace

bool threads_are_safe() { return registered == 0 && n_forks == 0; }

int forks() { return n_forks; }

}  // namespace spectrain
