// Which levels this machine has. A level is a set of instructions that all kernels were compiled for.
#include "levels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace archerfish {

// LEVELS is a list of X(name), from the slowest to the fastest.
#define X(name) namespace name { extern const Kernels kernels; }
LEVELS
#undef X

namespace {

bool can_run(const std::string& level) {
  if (level == "portable") return true;
#if defined(__x86_64__)
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (level == "avx2") return has_avx2;
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (level == "avx512") return has_avx512;
  if (level == "avx512_vnni") return has_avx512 && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
  if (level == "neon") return true;
#if defined(__linux__)
  if (level == "dotprod") return getauxval(AT_HWCAP) >> 20 & 1;
#else
  if (level == "dotprod") return true;  // every Apple processor since the M1
#endif
#endif
  return false;
}

}  // namespace

std::vector<const Kernels*> usable_levels() {
  std::vector<const Kernels*> found;
#define X(name) if (can_run(#name)) found.push_back(&name::kernels);
  LEVELS
#undef X
  return found;
}

}  // namespace archerfish
