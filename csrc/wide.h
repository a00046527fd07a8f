// Products of many rows in 16 bits, where the machine has instructions for them: AMX, AVX-512 BF16, ARM's bfloat16 or
// half precision.
//
// Rows of x become 16-bit numbers once; the weights of a group, in whatever format, are unpacked to 16 bits once for
// many rows.
#pragma once
#include "vec.h"

namespace archerfish::LEVEL {
namespace {

#if defined(__AMX_BF16__) || defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kWideBfloat = true, kWideHalf = false;
#elif defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define WIDE_HALF
constexpr bool kWideBfloat = false, kWideHalf = true;
#else
constexpr bool kWideBfloat = false, kWideHalf = false;
#endif
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool kWidensIntegers = false;  // products of bytes are quicker there
#else
constexpr bool kWidensIntegers = kWideBfloat || kWideHalf;
#endif
constexpr int64_t kWideRows = kVectorBytes == 16 ? 12 : 48;  // above which integer formats are unpacked to 16 bits
constexpr int64_t kWideInputs = 32;                          // inputs are filled up to a multiple of this with zeros

INLINE int64_t wide_inputs(int64_t num_inputs) { return (num_inputs + kWideInputs - 1) / kWideInputs * kWideInputs; }

#if defined(__AVX512BF16__)
INLINE Words pair_bfloats(Floats first, Floats second) {  // of each lane: the first in the lower half of a word
  const Words places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m512i order = (__m512i)(places | ((places + 16) << 16));
  return (Words)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
#else
INLINE Words round_bfloats(Floats x) {  // in the upper halves of words
  Words bits = as_words(x);
  return bits + all_words(0x7fffu) + ((bits >> 16) & all_words(1u));
}

INLINE Words pair_bfloats(Floats first, Floats second) {
  return (round_bfloats(first) >> 16) | (round_bfloats(second) & all_words(0xffff0000u));
}
#endif

#if !defined(__AMX_BF16__)
INLINE void begin_wide() {}
INLINE void end_wide() {}
#endif

// ---- ARM's products of two rows with two columns of 8 bytes each ----
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
INLINE float32x4_t multiply_pairs(float32x4_t sums, uint8x16_t a, uint8x16_t b) {
  return vbfmmlaq_f32(sums, vreinterpretq_bf16_u8(a), vreinterpretq_bf16_u8(b));
}
INLINE int32x4_t multiply_pairs(int32x4_t sums, uint8x16_t a, uint8x16_t b) {
  return vmmlaq_s32(sums, vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b));
}

// A panel has 4 bytes of each output side by side; these products want 8. from may be to.
INLINE const uint8_t* order_panel(const void* from, int64_t bytes_of_output, void* to) {
  const uint32_t* source = static_cast<const uint32_t*>(from);
  uint32_t* target = static_cast<uint32_t*>(to);
  for (int64_t k = 0; k < bytes_of_output; k += 8, source += 2 * kGroup, target += 2 * kGroup) {
    uint32x4_t first[4], second[4];
    UNROLL for (int p = 0; p < 4; p++) first[p] = vld1q_u32(source + 4 * p),
                                       second[p] = vld1q_u32(source + kGroup + 4 * p);
    UNROLL for (int p = 0; p < 4; p++) {
      vst1q_u32(target + 8 * p, vzip1q_u32(first[p], second[p]));
      vst1q_u32(target + 8 * p + 4, vzip2q_u32(first[p], second[p]));
    }
  }
  return static_cast<const uint8_t*>(to);
}

// out[r * 16 + lane]; R: 1 or even.
template <int R, class Sums, class Number>
INLINE void pair_tile(const uint8_t* x, const uint8_t* panel, int64_t row_bytes, Number* out) {
  constexpr int kPairs = (R + 1) / 2;
  Sums total[kPairs][8] = {};
  for (int64_t k = 0; k < row_bytes; k += 8) {
    uint8x16_t rows[kPairs];
    UNROLL for (int i = 0; i < kPairs; i++) {
      const uint8_t* row = x + 2 * i * row_bytes + k;
      rows[i] = vcombine_u8(vld1_u8(row), vld1_u8(R == 1 ? row : row + row_bytes));
    }
    UNROLL for (int j = 0; j < 8; j++) {
      const uint8x16_t outputs = vld1q_u8(panel + k * kGroup + 16 * j);
      UNROLL for (int i = 0; i < kPairs; i++) total[i][j] = multiply_pairs(total[i][j], rows[i], outputs);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < 8; j++)
      memcpy(out + r * kGroup + 2 * j, reinterpret_cast<const Number*>(&total[r / 2][j]) + r % 2 * 2, 8);
}

template <class Sums, class Number>
INLINE void pair_rows(int64_t num_rows, const void* rows, const uint8_t* panel, int64_t row_bytes, Number* out) {
  const uint8_t* x = static_cast<const uint8_t*>(rows);
  int64_t r = 0;
  for (; r + 4 <= num_rows; r += 4) pair_tile<4, Sums>(x + r * row_bytes, panel, row_bytes, out + r * kGroup);
  for (; r + 2 <= num_rows; r += 2) pair_tile<2, Sums>(x + r * row_bytes, panel, row_bytes, out + r * kGroup);
  for (; r < num_rows; r++) pair_tile<1, Sums>(x + r * row_bytes, panel, row_bytes, out + r * kGroup);
}
#else
INLINE const void* order_panel(const void* from, int64_t, void*) { return from; }
#endif

#if defined(__AMX_BF16__)
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
INLINE void begin_wide() {
  TileConfig config;
  _tile_loadconfig(&config);
}
INLINE void end_wide() { _tile_release(); }

// Sums of rows, a multiple of 16, with a panel of 16 outputs, and with a second one unless that is null: out[r * 16 +
// lane]. Numbers are bytes, or bfloat16 in pairs. Two tiles of rows with two panels: each tile that is loaded is used
// twice.
template <bool kAreBytes>
INLINE void tile_rows(int64_t num_rows, const uint8_t* x, const uint8_t* panel, const uint8_t* second,
                      int64_t row_bytes, void* out, void* second_out) {
#define MULTIPLY(sums, rows, weights)      \
  {                                        \
    if (kAreBytes)                         \
      _tile_dpbusd(sums, rows, weights);   \
    else                                   \
      _tile_dpbf16ps(sums, rows, weights); \
  }
  for (int64_t row = 0; row < num_rows; row += 32) {
    const bool is_pair = row + 16 < num_rows;
    const uint8_t* rows = x + row * row_bytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < row_bytes; k += kLine) {
      _tile_loadd(4, panel + 16 * k, kLine);
      _tile_loadd(6, rows + k, row_bytes);
      MULTIPLY(0, 6, 4)
      if (second) {
        _tile_loadd(5, second + 16 * k, kLine);
        MULTIPLY(1, 6, 5)
      }
      if (!is_pair) continue;
      _tile_loadd(7, rows + 16 * row_bytes + k, row_bytes);
      MULTIPLY(2, 7, 4)
      if (second) MULTIPLY(3, 7, 5)
    }
    const int64_t to = row * kGroup * 4;
    _tile_stored(0, static_cast<char*>(out) + to, kLine);
    if (is_pair) _tile_stored(2, static_cast<char*>(out) + to + 16 * kLine, kLine);
    if (!second) continue;
    _tile_stored(1, static_cast<char*>(second_out) + to, kLine);
    if (is_pair) _tile_stored(3, static_cast<char*>(second_out) + to + 16 * kLine, kLine);
  }
#undef MULTIPLY
}
template <int kHalfSums>
INLINE void wide_rows(int64_t num_rows, const uint16_t* x, const uint16_t* panel, int64_t num_inputs, float* out) {
  const auto bytes = [](const uint16_t* at) { return reinterpret_cast<const uint8_t*>(at); };
  tile_rows<false>(num_rows, bytes(x), bytes(panel), nullptr, 2 * num_inputs, out, nullptr);
}
#elif defined(__AVX512BF16__)

template <int R>
INLINE void wide_tile(const uint16_t* x, const uint16_t* panel, int64_t num_inputs, float* out) {
  __m512 total[R] = {};
  for (int64_t k = 0; k < num_inputs; k += 2) {
    __m512bh w = (__m512bh)_mm512_loadu_si512(panel + k * kGroup);
    UNROLL for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, x + r * num_inputs + k, 4);
      total[r] = _mm512_dpbf16_ps(total[r], w, (__m512bh)_mm512_set1_epi32(pair));
    }
  }
  UNROLL for (int r = 0; r < R; r++) _mm512_storeu_ps(out + r * kGroup, total[r]);
}
template <int kHalfSums>
INLINE void wide_rows(int64_t num_rows, const uint16_t* x, const uint16_t* panel, int64_t num_inputs, float* out) {
  int64_t r = 0;
  for (; r + 12 <= num_rows; r += 12) wide_tile<12>(x + r * num_inputs, panel, num_inputs, out + r * kGroup);
  for (; r + 4 <= num_rows; r += 4) wide_tile<4>(x + r * num_inputs, panel, num_inputs, out + r * kGroup);
  for (; r < num_rows; r++) wide_tile<1>(x + r * num_inputs, panel, num_inputs, out + r * kGroup);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

template <int kHalfSums>
INLINE void wide_rows(int64_t num_rows, const uint16_t* x, const uint16_t* panel, int64_t num_inputs, float* out) {
  pair_rows<float32x4_t>(num_rows, x, reinterpret_cast<const uint8_t*>(panel), 2 * num_inputs, out);
}
#elif defined(WIDE_HALF)

template <int R, int kHalfSums>
INLINE void wide_tile(const uint16_t* x, const uint16_t* panel, int64_t num_inputs, float* out) {
  float32x4_t total[R][4] = {};
  for (int64_t first = 0; first < num_inputs; first += kHalfSums) {
    float16x8_t sums[R][2] = {};
    for (int64_t k = first; k < at_most(first + kHalfSums, num_inputs); k += 8) {
      float16x8_t rows[R];
      UNROLL for (int r = 0; r < R; r++) rows[r] = vreinterpretq_f16_u16(vld1q_u16(x + r * num_inputs + k));
      const uint16_t* w = panel + k * kGroup;
// The compiler would copy every lane into a register of its own, and put sums that wait for each other side by side.
#define MULTIPLY_ADD(sum, w, x, lane) asm volatile("fmla %0.8h, %1.8h, %2.h[" #lane "]" : "+w"(sum) : "w"(w), "x"(x))
#define STEP(lane)                                                                          \
  {                                                                                         \
    uint16x8_t low = vld1q_u16(w + lane * kGroup), high = vld1q_u16(w + lane * kGroup + 8); \
    UNROLL for (int r = 0; r < R; r++) MULTIPLY_ADD(sums[r][0], low, rows[r], lane);        \
    UNROLL for (int r = 0; r < R; r++) MULTIPLY_ADD(sums[r][1], high, rows[r], lane);       \
  }
      STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
#undef STEP
#undef MULTIPLY_ADD
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int half = 0; half < 2; half++) {
      total[r][2 * half] += vcvt_f32_f16(vget_low_f16(sums[r][half]));
      total[r][2 * half + 1] += vcvt_high_f32_f16(sums[r][half]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < 4; p++)
      vst1q_f32(out + r * kGroup + 4 * p, total[r][p]);
}
constexpr int kMostTileRows = 6;  // whose sums and numbers fit into the registers
template <int kHalfSums>          // inputs that are added up in half precision before they go into float32
INLINE void wide_rows(int64_t num_rows, const uint16_t* x, const uint16_t* panel, int64_t num_inputs, float* out) {
  for (int64_t r = 0; r < num_rows;) {  // tiles of nearly the same size: small ones wait for their own sums
    const int64_t left = num_rows - r, num_tiles = (left + kMostTileRows - 1) / kMostTileRows;
    const int64_t count = (left + num_tiles - 1) / num_tiles;
#define TILE(R)                                                                       \
  case R:                                                                             \
    wide_tile<R, kHalfSums>(x + r * num_inputs, panel, num_inputs, out + r * kGroup); \
    break;
    switch (count) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
    r += count;
  }
}
#else
template <int kHalfSums>
INLINE void wide_rows(int64_t, const uint16_t*, const uint16_t*, int64_t, float*) {}  // never called
#endif

#if defined(WIDE_HALF)
INLINE float16x8_t join_halves(Floats low, Floats high) {
  return vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)low), (float32x4_t)high);
}
// Four inputs of a group, whose codes lie side by side for each output, as code * scale + min; factors: scales, then
// minima.
template <bool kIsSigned>
INLINE void store_halves(const Words (&codes)[kParts], const float16x8_t (&factors)[4], uint16_t* to) {
  const auto bytes_of = [&](int part) { return (uint8x16_t)codes[part]; };
  const uint8x16x2_t first = vuzpq_u8(bytes_of(0), bytes_of(1)), second = vuzpq_u8(bytes_of(2), bytes_of(3));
  const uint8x16x2_t even = vuzpq_u8(first.val[0], second.val[0]), odd = vuzpq_u8(first.val[1], second.val[1]);
  const uint8x16_t inputs[4] = {even.val[0], odd.val[0], even.val[1], odd.val[1]};
  // 0x64 above a byte b is 1024 + b in half precision: quicker than instructions that convert.
  const uint8x16_t upper = vdupq_n_u8(0x64), flip = vdupq_n_u8(kIsSigned ? 0x80 : 0);
  const float16x8_t shift = vdupq_n_f16(kIsSigned ? 1152 : 1024);
  UNROLL for (int b = 0; b < 4; b++) {
    const uint8x16_t bytes = veorq_u8(inputs[b], flip);
    const uint8x16_t both[2] = {vzip1q_u8(bytes, upper), vzip2q_u8(bytes, upper)};
    UNROLL for (int half = 0; half < 2; half++) {
      const float16x8_t numbers = vsubq_f16(vreinterpretq_f16_u8(both[half]), shift);
      vst1q_u16(to + b * kGroup + 8 * half,
                vreinterpretq_u16_f16(vfmaq_f16(factors[2 + half], numbers, factors[half])));
    }
  }
}
#endif

// Four inputs of a part of a group, as a panel has them: two pairs of bfloat16 for each output.
INLINE void store_pairs(const Floats (&x)[4], uint8_t* to, int part) {
  UNROLL for (int pair = 0; pair < 2; pair++) {
    const Words both = pair_bfloats(x[2 * pair], x[2 * pair + 1]);
    memcpy(to + pair * 4 * kGroup + part * kVectorBytes, &both, sizeof both);
  }
}

INLINE void store_wide(uint16_t* to, Floats x) {
#if defined(WIDE_HALF)
  vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#elif defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  typedef uint16_t Narrow __attribute__((vector_size(kVectorBytes / 2)));
  Narrow narrow = __builtin_convertvector(round_bfloats(x) >> 16, Narrow);
  memcpy(to, &narrow, sizeof narrow);
#endif
}

// What numbers are divided by so that the largest becomes `most`: half precision has a small range.
INLINE float wide_factor(Floats highest, float most) {
  const float high = kWideHalf ? largest(highest) : 0.0f;
  return high > 0 ? high / most : 1.0f;
}

// A row as 16-bit numbers. Gives what its products are to be multiplied with.
INLINE float widen_row(const float* x, int64_t num_inputs, uint16_t* to) {
  Floats highest = {};
  if constexpr (kWideHalf)
    for (int64_t i = 0; i < num_inputs; i += kLanes)
      highest = larger(highest, magnitude(load_some(x + i, num_inputs - i)));
  const float factor = wide_factor(highest, 64.0f), inverse = 1.0f / factor;
  int64_t i = 0;
  for (; i < num_inputs; i += kLanes) store_wide(to + i, load_some(x + i, num_inputs - i) * inverse);
  for (; i < wide_inputs(num_inputs); i += kLanes) store_wide(to + i, Floats{});
  return factor;
}

}  // namespace
}  // namespace archerfish::LEVEL
