// Products of bytes: weights with one scale for each output, rows with a scale and a zero of their own, made on the
// way.
//
// A row's codes are round(x / scale) + zero, from 0 to 255, less kByteShift; sums over all inputs are exact integers.
#pragma once
#include "layout.h"
#include "vec.h"
#include "wide.h"

namespace archerfish::LEVEL {
namespace {

struct ByteCode {  // of a row
  float scale;
  int32_t zero;  // less kByteShift: what the codes of 0 are
};

INLINE ByteCode encode_row(const float* x, int64_t num_inputs, uint8_t* to) {
  Floats low = {}, high = {}, broken = {};  // broken: NaN if a number is not finite
  for (int64_t i = 0; i < num_inputs; i += kLanes) {
    const Floats v = load_some(x + i, num_inputs - i);
    low = smaller(low, v), high = larger(high, v), broken += v * 0.0f;
  }
  constexpr float kLeast = kByteShift ? 1.0f : 0.0f;  // -128 has no opposite
  const float lowest = -largest(-low), spread = largest(high) - lowest,
              scale = spread > 0 ? spread / (255.0f - kLeast) : 1.0f;
  const float inverse = 1.0f / scale, found = std::nearbyint(kLeast - lowest * inverse);
  const float zero = found >= 0 && found <= 255 ? found : 0.0f;  // numbers may not be finite
  typedef uint8_t Narrow __attribute__((vector_size(kLanes)));
  for (int64_t i = 0; i < num_inputs; i += kLanes) {
    const Floats code = round_even(load_some(x + i, num_inputs - i) * inverse) + zero;
    const Ints whole = to_ints(larger(smaller(code, all(255.0f)), all(kLeast))) - kByteShift;
    const Narrow narrow = __builtin_convertvector(whole, Narrow);
    memcpy(to + i, &narrow, sizeof narrow);  // what lies behind the last input meets weights that are 0
  }
  return {scale + sum(broken), int32_t(zero) - kByteShift};
}

template <int R>
INLINE void byte_tile(const uint8_t* x, const uint8_t* words, int64_t num_inputs, int32_t* out) {
  Ints total[R][kParts] = {};
  for (int64_t k = 0; k < num_inputs; k += 16) {
#if defined(__ARM_FEATURE_DOTPROD)
    int8x16_t rows[R];
    UNROLL for (int r = 0; r < R; r++) rows[r] = vld1q_s8(reinterpret_cast<const int8_t*>(x) + r * num_inputs + k);
#define STEP(lane)                                                                                                    \
  UNROLL for (int p = 0; p < kParts; p++) {                                                                           \
    const Words w = load_words(words + (k + 4 * lane) * kGroup + p * kVectorBytes);                                   \
    UNROLL for (int r = 0; r < R;                                                                                     \
                r++) asm volatile("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(total[r][p]) : "w"(w), "w"(rows[r])); \
  }
    STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
#else
    for (int64_t i = k; i < k + 16; i += 4) UNROLL for (int p = 0; p < kParts; p++) {
        const Words w = load_words(words + i * kGroup + p * kVectorBytes);
        UNROLL for (int r = 0; r < R; r++) {
          uint32_t four;
          memcpy(&four, x + r * num_inputs + i, 4);
          total[r][p] = dot_bytes(total[r][p], all_words(four), w);
        }
      }
#endif
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < kParts; p++)
      memcpy(out + r * kGroup + p * kLanes, &total[r][p], sizeof(Ints));
}

// The sums of a group's outputs: out[r * 16 + lane]. With AMX, `tile_rows` makes them.
INLINE void sum_bytes(int64_t num_rows, const uint8_t* x, const uint8_t* words, int64_t num_inputs, int32_t* out) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return pair_rows<int32x4_t>(num_rows, x, words, num_inputs, out);
#endif
  constexpr int kMany = kParts == 1 ? 12 : 4;
  int64_t r = 0;
  for (; r + kMany <= num_rows; r += kMany) byte_tile<kMany>(x + r * num_inputs, words, num_inputs, out + r * kGroup);
  for (; r < num_rows; r++) byte_tile<1>(x + r * num_inputs, words, num_inputs, out + r * kGroup);
}

// Sums become products.
INLINE void finish_bytes(int64_t num_rows, const ByteCode* codes, const uint8_t* group, float* out) {
  const float* scales = reinterpret_cast<const float*>(group);
  const int32_t* sums = reinterpret_cast<const int32_t*>(group) + kGroup;
  for (int64_t r = 0; r < num_rows; r++, out += kGroup) UNROLL for (int p = 0; p < kParts; p++) {
      Ints found, sum;
      memcpy(&found, out + p * kLanes, sizeof found), memcpy(&sum, sums + p * kLanes, sizeof sum);
      store(out + p * kLanes, to_floats(found - sum * codes[r].zero) * (load(scales + p * kLanes) * codes[r].scale));
    }
}

}  // namespace
}  // namespace archerfish::LEVEL
