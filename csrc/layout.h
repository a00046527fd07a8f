// How a packed matrix lies in memory, for those who pack it and those who multiply with it.
#pragma once
#include <type_traits>

#include "kernels.h"

namespace archerfish {

constexpr int64_t kWordBytes = 4 * kGroup;  // four inputs of a group as bytes

static_assert(kGroup == 16, "the kernels' loops over a group assume it");
static_assert(int(Format::kFloat) == int(Type::kFloat) && int(Format::kHalf) == int(Type::kHalf) &&
                  int(Format::kBfloat) == int(Type::kBfloat),
              "a plain format is a type");
static_assert(int(Format::kQ6_K) - int(Format::kQ4_K) == 2, "is_super() takes the K formats from first to last");

ALWAYS_INLINE constexpr bool is_plain(Format format) { return format <= Format::kBfloat; }
ALWAYS_INLINE constexpr bool is_super(Format format) { return format >= Format::kQ4_K && format <= Format::kQ6_K; }
ALWAYS_INLINE constexpr bool has_min(Format format) {
  return format == Format::kQ4_1 || format == Format::kQ5_1 || format == Format::kQ4_K || format == Format::kQ5_K;
}
ALWAYS_INLINE constexpr int bits_of(Format format) {
  if (format == Format::kQ8_0) return 8;
  if (format == Format::kQ6_K) return 6;
  return format == Format::kQ5_0 || format == Format::kQ5_1 || format == Format::kQ5_K ? 5 : 4;
}
ALWAYS_INLINE constexpr int num_scales(Format format) { return format == Format::kQ6_K ? 2 : 1; }  // of a block
// A block of a group: scales and minima, then codes. A super-block has scales of its own in front.
ALWAYS_INLINE constexpr int64_t scale_bytes(Format format) {
  return (is_super(format) ? 1 : 2) * kGroup * (num_scales(format) + (has_min(format) ? 1 : 0));
}
ALWAYS_INLINE constexpr int64_t block_bytes(Format format) {
  return scale_bytes(format) + kBlock * kGroup * bits_of(format) / 8;
}
ALWAYS_INLINE constexpr int64_t header_bytes(Format format) {
  return is_super(format) ? 2 * kGroup * (has_min(format) ? 2 : 1) : 0;
}
// Bytes with one scale for each output: scales, the sums of each output's codes, then codes, filled up with zeros.
constexpr int64_t kByteInputs = 64;
constexpr int64_t kByteHeader = 8 * kGroup;
ALWAYS_INLINE constexpr int64_t byte_inputs(int64_t num_inputs) {
  return (num_inputs + kByteInputs - 1) / kByteInputs * kByteInputs;
}
// Plain formats: inputs of a group one after the other, 16 numbers each; bfloat16 has two inputs of an output side by
// side.
ALWAYS_INLINE constexpr int64_t group_bytes(Format format, int64_t num_inputs) {
  if (format == Format::kFloat) return num_inputs * kGroup * 4;
  if (format == Format::kInt8) return kByteHeader + byte_inputs(num_inputs) * kGroup;
  if (is_plain(format)) return (format == Format::kBfloat ? (num_inputs + 1) / 2 * 2 : num_inputs) * kGroup * 2;
  return num_inputs / kBlock * block_bytes(format) + num_inputs / (kBlock * kSuper) * header_bytes(format);
}

// Calls with a format that is known when compiled.
template <class F>
ALWAYS_INLINE void with_format(Format format, F call) {
  switch (format) {
    case Format::kFloat:
      return call(std::integral_constant<Format, Format::kFloat>{});
    case Format::kHalf:
      return call(std::integral_constant<Format, Format::kHalf>{});
    case Format::kBfloat:
      return call(std::integral_constant<Format, Format::kBfloat>{});
    case Format::kQ4_0:
      return call(std::integral_constant<Format, Format::kQ4_0>{});
    case Format::kQ4_1:
      return call(std::integral_constant<Format, Format::kQ4_1>{});
    case Format::kQ5_0:
      return call(std::integral_constant<Format, Format::kQ5_0>{});
    case Format::kQ5_1:
      return call(std::integral_constant<Format, Format::kQ5_1>{});
    case Format::kQ8_0:
      return call(std::integral_constant<Format, Format::kQ8_0>{});
    case Format::kQ4_K:
      return call(std::integral_constant<Format, Format::kQ4_K>{});
    case Format::kQ5_K:
      return call(std::integral_constant<Format, Format::kQ5_K>{});
    case Format::kQ6_K:
      return call(std::integral_constant<Format, Format::kQ6_K>{});
    case Format::kInt8:
      return call(std::integral_constant<Format, Format::kInt8>{});
    case Format::kMxfp4:
      return call(std::integral_constant<Format, Format::kMxfp4>{});
  }
}

}  // namespace archerfish
