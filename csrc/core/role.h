// The roles of a plan's lists of arrays. Python, plans, rules and kernel keys use the same ones.
#pragma once

#include <cstdint>

namespace spectrain {

enum class Role : uint8_t { params, momentum, grads, stashed, out, second };

}  // namespace spectrain
