#include "threads.h"

#include <pthread.h>

namespace spectrain {
namespace {
bool forked = false;
const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
}  // namespace

bool threads_are_safe() { return registered == 0 && !forked; }

}  // namespace spectrain
