// All kernels of one level: this file is compiled once for each, with that level's instructions.
#include "attention.cpp"
#include "linear.cpp"
#include "lora.cpp"
#include "experts.cpp"
#include "rows.cpp"
#include "sample.cpp"
#include "wkv.cpp"

#define STRING_OF(name) #name
#define NAME_OF(name) STRING_OF(name)

namespace archerfish::LEVEL {

extern const Kernels kernels;
const Kernels kernels = {NAME_OF(LEVEL), linear,    route,  experts, norm,      tables, gated, store_kv, attend,
                         pool,           normalize, unpack, shift,   mix_heads, sample, score, lora};

}  // namespace archerfish::LEVEL
