// What the driver of the tests sees of the runtime in runtime.cpp: the interpreted device.
#pragma once

#include <map>
#include <set>
#include <string>

#include "machine.h"

namespace ptx {

struct Device {
  Machine machine;
  std::map<std::string, Program> programs;  // of all modules of this executable
  std::set<Program*> launched;              // since the last clear()
};

// The device, whose modules are the fat binaries of the linked objects.
Device& device();

}  // namespace ptx
