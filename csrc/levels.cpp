// Which levels this machine has. A level is a set of instructions that all kernels were compiled for.
#include "levels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace archerfish {

// LEVELS is a list of X(name), from the slowest to the fastest.
#define X(name)                 \
  namespace name {              \
  extern const Kernels kernels; \
  }
LEVELS
#undef X

namespace {

#if defined(__x86_64__)
// AMX needs the kernel's permission, which holds for the whole process.
bool has_amx() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has_tiles = d >> 24 & 1, has_bf16 = d >> 22 & 1, has_int8 = d >> 25 & 1;
  return has_tiles && has_bf16 && has_int8 &&
         syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
#else
  return false;
#endif
}
#endif

bool can_run(const std::string& level) {
  if (level == "portable") return true;
#if defined(__x86_64__)
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (level == "avx2") return has_avx2;
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (level == "avx512") return has_avx512;
  bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  if (level == "avx512_vnni") return has_vnni;
  bool has_bf16 = has_vnni && __builtin_cpu_supports("avx512bf16");
  if (level == "avx512_bf16") return has_bf16;
  if (level == "amx") return has_bf16 && has_amx();
#elif defined(__aarch64__)
  if (level == "neon") return true;
#if defined(__linux__)
  const unsigned long flags = getauxval(AT_HWCAP);
  const bool has_dotprod = flags >> 20 & 1, has_half = flags >> 10 & 1;
  if (level == "dotprod") return has_dotprod;
  if (level == "fp16") return has_dotprod && has_half;
  const unsigned long more = getauxval(AT_HWCAP2);
  if (level == "bf16")
    return has_dotprod && has_half && (more >> 13 & 1) && (more >> 14 & 1);  // and products of int8 matrices
#elif defined(__APPLE__)
  if (level != "bf16") return true;  // every Apple processor since the M1
  for (const char* name : {"hw.optional.arm.FEAT_BF16", "hw.optional.arm.FEAT_I8MM"}) {
    int has = 0;
    size_t size = sizeof has;
    if (sysctlbyname(name, &has, &size, nullptr, 0) != 0 || !has) return false;
  }
  return true;
#endif
#endif
  return false;
}

}  // namespace

std::vector<const Kernels*> usable_levels() {
  std::vector<const Kernels*> found;
#define X(name) \
  if (can_run(#name)) found.push_back(&name::kernels);
  LEVELS
#undef X
  return found;
}

}  // namespace archerfish
