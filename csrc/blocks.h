// Integer formats: blocks of 32 inputs, as they lie in memory, and their products with rows.
//
// Activations become 15-bit integers with a scale for each 32 inputs, in two bytes: with one byte, logits of a model of
// 30 layers are wrong by 3 %. Products of a block are added up as integers, then scaled. A lane holds one output, so
// nothing is added across lanes.
#pragma once
#include "layout.h"
#include "vec.h"

namespace archerfish::LEVEL {
namespace {

template <Format F>
struct Layout {
  static constexpr int kBits = bits_of(F), kNumScales = num_scales(F);
  static constexpr bool kIsSuper = is_super(F), kHasMin = has_min(F);
  static constexpr int kOffset = F == Format::kQ4_0    ? 8
                                 : F == Format::kQ5_0  ? 16
                                 : F == Format::kQ6_K  ? 32
                                 : F == Format::kMxfp4 ? 12
                                                       : 0;
  static constexpr int kStart =
      F == Format::kQ8_0 ? kSignedShift : kOffset;  // times the sum of activations: in the products
  static constexpr int64_t kScaleBytes = scale_bytes(F), kBlockBytes = block_bytes(F), kHeaderBytes = header_bytes(F);
  static constexpr int64_t kSuperBytes = kHeaderBytes + kSuper * kBlockBytes;
};

// Twice the numbers of float4_e2m1, and 12 more.
alignas(16) constexpr uint8_t kFp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Weights as they lie in the file's blocks, unpacked in registers.
template <Format F>
struct Packed {
  using L = Layout<F>;
  static constexpr int kNumScales = L::kNumScales, kStart = L::kStart;
  static constexpr bool kHasMin = L::kHasMin;
  const uint8_t* group;
  const uint8_t* header = nullptr;
  const uint8_t* block = nullptr;

  INLINE void open(int64_t b) {
    if constexpr (L::kIsSuper) {
      header = group + b / kSuper * L::kSuperBytes;
      block = header + L::kHeaderBytes + b % kSuper * L::kBlockBytes;
    } else {
      block = group + b * L::kBlockBytes;
    }
  }
  INLINE Words word(int j, int part) const {  // inputs 4 j to 4 j + 3
    typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes)));
    const uint8_t* codes = block + L::kScaleBytes + part * kVectorBytes;
    if constexpr (L::kBits == 8) return load_words(codes + j * kWordBytes);
    Words w = load_words(codes + (j & 3) * kWordBytes);
    w = j < 4 ? w & all_words(0x0f0f0f0fu) : (Words)((Bytes)w >> 4);
    if constexpr (F == Format::kMxfp4) return look_up(kFp4Codes, w);
    if constexpr (L::kBits == 5) w |= ((load_words(codes + 4 * kWordBytes) >> j) & all_words(0x01010101u)) << 4;
    if constexpr (L::kBits == 6)
      w |= ((load_words(codes + (4 + j / 4) * kWordBytes) >> (2 * (j & 3))) & all_words(0x03030303u)) << 4;
    return w;
  }
  INLINE Floats scale(int which, int part) const {
    int64_t lane = part * kLanes;
    if constexpr (!L::kIsSuper) return load_halves(reinterpret_cast<const uint16_t*>(block) + lane);
    Floats d = load_halves(reinterpret_cast<const uint16_t*>(header) + lane);
    if constexpr (F == Format::kQ6_K)
      return d * load_signed(reinterpret_cast<const int8_t*>(block) + which * kGroup + lane);
    return d * load_bytes(block + lane);
  }
  INLINE Floats min(int part) const {
    int64_t lane = part * kLanes;
    if constexpr (!L::kIsSuper) return load_halves(reinterpret_cast<const uint16_t*>(block) + kGroup + lane);
    return -load_halves(reinterpret_cast<const uint16_t*>(header) + kGroup + lane) * load_bytes(block + kGroup + lane);
  }
};

// ---- activations as bytes ----
constexpr int kTile = kParts == 2 ? 4 : 8;  // rows whose bytes lie side by side: as many as registers hold sums of
constexpr int kLowBits = 7;                 // of a number that the lower byte holds, with a sign

struct ByteBlock {  // 32 inputs of a tile of rows: 128 * upper + lower
  int8_t upper[kTile][kBlock], lower[kTile][kBlock];
  float scales[kTile];
  float weighted[kTile];    // the sum of the numbers, times the scale
  uint32_t sums[kTile][2];  // of the numbers, for each half of the block; nothing meaningful in rows after the last
};
static_assert(sizeof(ByteBlock) <= kTile * kBlock * sizeof(float), "linear_shared_bytes has memory for float32");

INLINE void quantise(const float* x, int64_t num_blocks, ByteBlock* blocks, int row) {
  typedef int8_t Narrow __attribute__((vector_size(kLanes)));
  constexpr int kHalf = 16 / kLanes;  // vectors of half a block
  constexpr float kMost = 127 << kLowBits;
  for (int64_t b = 0; b < num_blocks; b++) {
    ByteBlock& to = blocks[b];
    Floats v[2 * kHalf], most = {}, broken = {};  // broken: NaN if a number is not finite
    UNROLL for (int i = 0; i < 2 * kHalf; i++) {
      v[i] = load(x + b * kBlock + i * kLanes);
      most = larger(most, magnitude(v[i])), broken += v[i] * 0.0f;
    }
    const float highest = largest(most), inverse = highest > 0 ? kMost / highest : 0.0f;
    UNROLL for (int half = 0; half < 2; half++) {
      Ints total = {};
      UNROLL for (int i = half * kHalf; i < (half + 1) * kHalf; i++) {
        const Ints whole = to_ints(round_even(v[i] * inverse)), upper = (whole + (1 << (kLowBits - 1))) >> kLowBits;
        total += whole;
        const Narrow high = __builtin_convertvector(upper, Narrow),
                     low = __builtin_convertvector(whole - (upper << kLowBits), Narrow);
        memcpy(to.upper[row] + i * kLanes, &high, sizeof high);
        memcpy(to.lower[row] + i * kLanes, &low, sizeof low);
      }
      to.sums[row][half] = uint32_t(sum(total));
    }
    to.scales[row] = highest / kMost + sum(broken);
    to.weighted[row] = to.scales[row] * float(int32_t(to.sums[row][0] + to.sums[row][1]));
  }
}

// Adds the products of 16 inputs of R rows, bytes each, with four words of weights.
template <int R, bool kIsSigned>
INLINE void add_products(Ints (&sums)[R], const Words* w, const int8_t (*x)[kBlock], int from) {
#if defined(__ARM_FEATURE_DOTPROD)
  int8x16_t bytes[R];
  UNROLL for (int r = 0; r < R; r++) bytes[r] = vld1q_s8(x[r] + from);
  UNROLL for (int r = 0; r < R; r++) sums[r] = (Ints)vdotq_laneq_s32((int32x4_t)sums[r], (int8x16_t)w[0], bytes[r], 0);
  UNROLL for (int r = 0; r < R; r++) sums[r] = (Ints)vdotq_laneq_s32((int32x4_t)sums[r], (int8x16_t)w[1], bytes[r], 1);
  UNROLL for (int r = 0; r < R; r++) sums[r] = (Ints)vdotq_laneq_s32((int32x4_t)sums[r], (int8x16_t)w[2], bytes[r], 2);
  UNROLL for (int r = 0; r < R; r++) sums[r] = (Ints)vdotq_laneq_s32((int32x4_t)sums[r], (int8x16_t)w[3], bytes[r], 3);
#else
  UNROLL for (int j = 0; j < 4; j++) UNROLL for (int r = 0; r < R; r++) {
    uint32_t four;
    memcpy(&four, x[r] + from + 4 * j, 4);
    sums[r] = kIsSigned ? dot_signed(sums[r], w[j], all_words(four)) : dot_small(sums[r], w[j], all_words(four));
  }
#endif
}

constexpr int64_t kBytesAhead = 2048;  // bytes of weights that are fetched before they are needed

// R rows with P parts of a group, from `part` on: out[r * 16 + lane].
template <int R, int P, Format F>
INLINE void block_tile(Packed<F> source, int64_t num_blocks, int part, const ByteBlock* x, float* out) {
  using L = Layout<F>;
  constexpr bool kIsSigned = F == Format::kQ8_0;
  constexpr int kHalves = 2 / L::kNumScales;  // of a block, that have one scale
  constexpr int kAtOnce = R < 4 ? R : 4;      // rows whose sums do not wait for each other
  Floats total[R][P] = {};
  for (int64_t b = 0; b < num_blocks; b++, x++) {
    source.open(b);
    if constexpr (R <= 2)
      UNROLL for (int64_t i = 0; i < L::kBlockBytes; i += kLine) __builtin_prefetch(source.block + kBytesAhead + i);
    UNROLL for (int which = 0; which < L::kNumScales; which++) UNROLL for (int p = 0; p < P; p++) {
      Words w[4 * kHalves];
      UNROLL for (int j = 0; j < 4 * kHalves; j++) w[j] = source.word(4 * which + j, part + p);
      const Floats scale = source.scale(which, part + p);
      UNROLL for (int row = 0; row < R; row += kAtOnce) {
        Ints sums[kAtOnce] = {};
        UNROLL for (int h = 0; h < kHalves; h++)
            add_products<kAtOnce, kIsSigned>(sums, w + 4 * h, x->upper + row, 16 * (which + h));
        UNROLL for (int r = 0; r < kAtOnce; r++) {
          const uint32_t covered = kHalves == 1 ? x->sums[row + r][which] : x->sums[row + r][0] + x->sums[row + r][1];
          sums[r] = L::kStart ? (sums[r] << kLowBits) - int32_t(L::kStart * covered) : sums[r] << kLowBits;
        }
        UNROLL for (int h = 0; h < kHalves; h++)
            add_products<kAtOnce, kIsSigned>(sums, w + 4 * h, x->lower + row, 16 * (which + h));
        UNROLL for (int r = 0; r < kAtOnce; r++) total[row + r][p] =
            multiply_add(to_floats(sums[r]) * scale, x->scales[row + r], total[row + r][p]);
      }
      if constexpr (L::kHasMin) {
        const Floats min = source.min(part + p);
        UNROLL for (int r = 0; r < R; r++) total[r][p] = multiply_add(min, x->weighted[r], total[r][p]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < P; p++)
      store(out + r * kGroup + (part + p) * kLanes, total[r][p]);
}

template <int R, Format F>
INLINE void group_tile(Packed<F> source, int64_t num_blocks, const ByteBlock* x, float* out) {
  constexpr int P = kParts == 4 ? (R > 2 ? 1 : 4 / R) : 1;
  for (int part = 0; part < kParts; part += P) block_tile<R, P>(source, num_blocks, part, x, out);
}

template <Format F>
INLINE void block_rows(int64_t num_rows, const uint8_t* group, int64_t num_blocks, const ByteBlock* x, float* out) {
  const Packed<F> source{group};
  for (int64_t row = 0; row < num_rows; row += kTile, x += num_blocks, out += kTile * kGroup) {
    switch (num_rows - row) {  // rows after the last have no meaning
      case 1:
        group_tile<1>(source, num_blocks, x, out);
        break;
      case 2:
        group_tile<2>(source, num_blocks, x, out);
        break;
      case 3:
      case 4:
        group_tile<4>(source, num_blocks, x, out);
        break;
      default:
        group_tile<kTile>(source, num_blocks, x, out);
    }
  }
}

}  // namespace
}  // namespace archerfish::LEVEL
