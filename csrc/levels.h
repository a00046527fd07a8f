#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace archerfish {

// Levels that were compiled and that this machine can run, the fastest last.
std::vector<const Kernels*> usable_levels();

}  // namespace archerfish
