// Products with a matrix in any format. Few rows: bound by reading the weights. Many rows: bound by arithmetic.
//
// Integer formats: activations become 15-bit integers with a scale for each 32 inputs, in two bytes: with one byte, logits of a
// model of 30 layers are wrong by 3 %. Products of a block are added up as integers, then scaled. A lane holds one output, so
// nothing is added across lanes. Plain formats are multiplied in float32.
#include "bytes.h"
#include "layout.h"
#include "vec.h"
#include "wide.h"

namespace archerfish::LEVEL {
namespace {

// ---- integer formats: how a block of 32 inputs of a group lies in memory ----
template <Format F>
struct Layout {
  static constexpr int kBits = bits_of(F), kNumScales = num_scales(F);
  static constexpr bool kIsSuper = is_super(F), kHasMin = has_min(F);
  static constexpr int kOffset = F == Format::kQ4_0 ? 8 : F == Format::kQ5_0 ? 16 : F == Format::kQ6_K ? 32 : 0;
  static constexpr int kStart = F == Format::kQ8_0 ? kSignedShift : kOffset;  // times the sum of activations: in the products
  static constexpr int64_t kScaleBytes = scale_bytes(F), kBlockBytes = block_bytes(F), kHeaderBytes = header_bytes(F);
  static constexpr int64_t kSuperBytes = kHeaderBytes + kSuper * kBlockBytes;
};

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
  template <int J>
  INLINE Words word(int part) const {  // inputs 4 J to 4 J + 3
    const uint8_t* codes = block + L::kScaleBytes + part * kVectorBytes;
    if constexpr (L::kBits == 8) return load_words(codes + J * kWordBytes);
    Words w = load_words(codes + (J & 3) * kWordBytes);
    w = (J < 4 ? w : w >> 4) & all_words(0x0f0f0f0fu);
    if constexpr (L::kBits == 5) w |= ((load_words(codes + 4 * kWordBytes) >> J) & all_words(0x01010101u)) << 4;
    if constexpr (L::kBits == 6) {
      w |= ((load_words(codes + (4 + J / 4) * kWordBytes) >> (2 * (J & 3))) & all_words(0x03030303u)) << 4;
    }
    return w;
  }
  INLINE Floats scale(int which, int part) const {
    int64_t lane = part * kLanes;
    if constexpr (!L::kIsSuper) return load_halves(reinterpret_cast<const uint16_t*>(block) + lane);
    Floats d = load_halves(reinterpret_cast<const uint16_t*>(header) + lane);
    if constexpr (F == Format::kQ6_K) return d * load_signed(reinterpret_cast<const int8_t*>(block) + which * kGroup + lane);
    return d * load_bytes(block + lane);
  }
  INLINE Floats min(int part) const {
    int64_t lane = part * kLanes;
    if constexpr (!L::kIsSuper) return load_halves(reinterpret_cast<const uint16_t*>(block) + kGroup + lane);
    return -load_halves(reinterpret_cast<const uint16_t*>(header) + kGroup + lane) * load_bytes(block + kGroup + lane);
  }
};

// Weights of a group that were unpacked once for many rows: codes, scales and minima of each block side by side.
template <Format F>
struct Panel {
  using L = Layout<F>;
  static constexpr int kNumScales = L::kNumScales, kStart = L::kStart;
  static constexpr bool kHasMin = L::kHasMin;
  static constexpr int64_t kCodeBytes = kBlock * kGroup;
  static constexpr int64_t kBlockBytes = kCodeBytes + 4 * kGroup * (kNumScales + (kHasMin ? 1 : 0));
  uint8_t* memory;
  const uint8_t* block = nullptr;

  template <int J>
  INLINE void fill_word(const Packed<F>& source, uint8_t* to) {
    for (int p = 0; p < kParts; p++) {
      Words w = source.template word<J>(p);
      memcpy(to + J * kWordBytes + p * kVectorBytes, &w, sizeof w);
    }
  }
  INLINE void fill(const uint8_t* group, int64_t num_blocks) {
    Packed<F> source{group};
    for (int64_t b = 0; b < num_blocks; b++) {
      source.open(b);
      uint8_t* to = memory + b * kBlockBytes;
      fill_word<0>(source, to), fill_word<1>(source, to), fill_word<2>(source, to), fill_word<3>(source, to);
      fill_word<4>(source, to), fill_word<5>(source, to), fill_word<6>(source, to), fill_word<7>(source, to);
      float* number = reinterpret_cast<float*>(to + kCodeBytes);
      for (int s = 0; s < kNumScales; s++)
        for (int p = 0; p < kParts; p++) store(number + s * kGroup + p * kLanes, source.scale(s, p));
      if constexpr (kHasMin)
        for (int p = 0; p < kParts; p++) store(number + kNumScales * kGroup + p * kLanes, source.min(p));
    }
  }
  INLINE void open(int64_t b) { block = memory + b * kBlockBytes; }
  template <int J>
  INLINE Words word(int part) const { return load_words(block + J * kWordBytes + part * kVectorBytes); }
  INLINE Floats number(int which, int part) const {
    return load(reinterpret_cast<const float*>(block + kCodeBytes) + which * kGroup + part * kLanes);
  }
  INLINE Floats scale(int which, int part) const { return number(which, part); }
  INLINE Floats min(int part) const { return number(kNumScales, part); }
};

// ---- activations as bytes ----
constexpr int kTile = kParts == 1 ? 8 : 4;  // rows whose bytes lie side by side

constexpr int kLowBits = 7;                 // of a number that the lower byte holds, with a sign

struct ByteBlock {  // 32 inputs of a tile of rows: 128 * upper + lower
  int8_t upper[kTile][kBlock], lower[kTile][kBlock];
  float scales[kTile];
  float weighted[kTile];    // the sum of the numbers, times the scale
  int32_t sums[kTile][2];   // of the numbers, for each half of the block
};

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
        const Narrow high = __builtin_convertvector(upper, Narrow), low = __builtin_convertvector(whole - (upper << kLowBits), Narrow);
        memcpy(to.upper[row] + i * kLanes, &high, sizeof high);
        memcpy(to.lower[row] + i * kLanes, &low, sizeof low);
      }
      to.sums[row][half] = sum(total);
    }
    to.scales[row] = highest / kMost + sum(broken);
    to.weighted[row] = to.scales[row] * float(to.sums[row][0] + to.sums[row][1]);
  }
}

// 16 bytes of one row, each four of which are multiplied with a word of weights.
struct ByteRow {
#if defined(__ARM_FEATURE_DOTPROD)
  int8x16_t bytes;
  INLINE void load_from(const int8_t* at) { bytes = vld1q_s8(at); }
  template <int J, bool kIsSigned>
  INLINE Ints dot(Ints sums, Words w) const { return (Ints)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)w, bytes, J); }
#else
  const int8_t* from;
  INLINE void load_from(const int8_t* at) { from = at; }
  template <int J, bool kIsSigned>
  INLINE Ints dot(Ints sums, Words w) const {
    uint32_t four;
    memcpy(&four, from + 4 * J, 4);
    return kIsSigned ? dot_signed(sums, w, all_words(four)) : dot_small(sums, w, all_words(four));
  }
#endif
};

template <int R, int P, bool kIsSigned, class Source>
struct Sums {
  Ints upper[R][P], lower[R][P];
  ByteRow upper_rows[R], lower_rows[R];

  template <int J>
  INLINE void add(const Source& source, int part) {
    Words w[P];
    UNROLL for (int p = 0; p < P; p++) w[p] = source.template word<J>(part + p);
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int p = 0; p < P; p++) {
        upper[r][p] = upper_rows[r].template dot<J % 4, kIsSigned>(upper[r][p], w[p]);
        lower[r][p] = lower_rows[r].template dot<J % 4, kIsSigned>(lower[r][p], w[p]);
      }
  }
  template <int kHalf>
  INLINE void add_half(const Source& source, const ByteBlock& x, int part) {
    UNROLL for (int r = 0; r < R; r++) {
      upper_rows[r].load_from(x.upper[r] + 16 * kHalf);
      lower_rows[r].load_from(x.lower[r] + 16 * kHalf);
    }
    add<4 * kHalf>(source, part), add<4 * kHalf + 1>(source, part), add<4 * kHalf + 2>(source, part), add<4 * kHalf + 3>(source, part);
  }
  INLINE void start(const ByteBlock& x, int which) {
    UNROLL for (int r = 0; r < R; r++) {
      int32_t covered = Source::kNumScales == 2 ? x.sums[r][which] : x.sums[r][0] + x.sums[r][1];
      Ints begin = Source::kStart ? all_ints(-Source::kStart * covered) : Ints{};
      UNROLL for (int p = 0; p < P; p++) upper[r][p] = Ints{}, lower[r][p] = begin;
    }
  }
  INLINE void scale_into(Floats (&total)[R][P], const Source& source, const ByteBlock& x, int which, int part) const {
    UNROLL for (int p = 0; p < P; p++) {
      Floats scale = source.scale(which, part + p);
      UNROLL for (int r = 0; r < R; r++)
        total[r][p] = multiply_add(to_floats((upper[r][p] << kLowBits) + lower[r][p]) * scale, x.scales[r], total[r][p]);
    }
  }
};

// R rows with P parts of a group, from `part` on: out[r * 16 + lane].
template <int R, int P, bool kIsSigned, class Source>
INLINE void block_tile(Source source, int64_t num_blocks, int part, const ByteBlock* x, float* out) {
  Floats total[R][P] = {};
  for (int64_t b = 0; b < num_blocks; b++, x++) {
    source.open(b);
    Sums<R, P, kIsSigned, Source> of;
    of.start(*x, 0);
    of.template add_half<0>(source, *x, part);
    if constexpr (Source::kNumScales == 2) of.scale_into(total, source, *x, 0, part), of.start(*x, 1);
    of.template add_half<1>(source, *x, part);
    of.scale_into(total, source, *x, Source::kNumScales - 1, part);
    if constexpr (Source::kHasMin)
      UNROLL for (int p = 0; p < P; p++) {
        Floats min = source.min(part + p);
        UNROLL for (int r = 0; r < R; r++) total[r][p] = multiply_add(min, x->weighted[r], total[r][p]);
      }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int p = 0; p < P; p++) store(out + r * kGroup + (part + p) * kLanes, total[r][p]);
}

template <int R, bool kIsSigned, class Source>
INLINE void group_tile(Source source, int64_t num_blocks, const ByteBlock* x, float* out) {
  constexpr int P = kParts == 4 ? (R > 2 ? 1 : 4 / R) : 1;  // as many as registers hold
  for (int part = 0; part < kParts; part += P) block_tile<R, P, kIsSigned>(source, num_blocks, part, x, out);
}

template <bool kIsSigned, class Source>
INLINE void group_rows(int64_t num_rows, Source source, int64_t num_blocks, const ByteBlock* x, float* out) {
  for (int64_t row = 0; row < num_rows; row += kTile, x += num_blocks, out += kTile * kGroup) {
    switch (num_rows - row) {
      case 1: group_tile<1, kIsSigned>(source, num_blocks, x, out); break;
      case 2: group_tile<2, kIsSigned>(source, num_blocks, x, out); break;
      default: group_tile<kTile, kIsSigned>(source, num_blocks, x, out);  // rows after the last have no meaning
    }
  }
}

// ---- plain formats ----
template <Format F>
struct Plain {
  const uint8_t* group;
  INLINE void pair(int64_t k, int part, Floats& first, Floats& second) const {  // inputs k and k + 1, where k is even
    if constexpr (F == Format::kBfloat) {
      Words w = load_words(group + k / 2 * kWordBytes + part * kVectorBytes);
      first = as_floats(w << 16), second = as_floats(w & all_words(0xffff0000u));
    } else if constexpr (F == Format::kHalf) {
      const uint16_t* at = reinterpret_cast<const uint16_t*>(group) + k * kGroup + part * kLanes;
      first = load_halves(at), second = load_halves(at + kGroup);
    } else {
      const float* at = reinterpret_cast<const float*>(group) + k * kGroup + part * kLanes;
      first = load(at), second = load(at + kGroup);
    }
  }
  INLINE Floats one(int64_t k, int part) const {
    if constexpr (F == Format::kBfloat) return as_floats(load_words(group + k / 2 * kWordBytes + part * kVectorBytes) << 16);
    if constexpr (F == Format::kHalf) return load_halves(reinterpret_cast<const uint16_t*>(group) + k * kGroup + part * kLanes);
    return load(reinterpret_cast<const float*>(group) + k * kGroup + part * kLanes);
  }
};

template <int R, class Source>
INLINE void plain_tile(Source source, int64_t num_inputs, const float* x, float* out) {
  Floats total[R][kParts] = {};
  int64_t k = 0;
  for (; k + 2 <= num_inputs; k += 2) {
    UNROLL for (int p = 0; p < kParts; p++) {
      Floats first, second;
      source.pair(k, p, first, second);
      UNROLL for (int r = 0; r < R; r++) total[r][p] = multiply_add(first, x[r * num_inputs + k], total[r][p]);
      UNROLL for (int r = 0; r < R; r++) total[r][p] = multiply_add(second, x[r * num_inputs + k + 1], total[r][p]);
    }
  }
  if (k < num_inputs)
    UNROLL for (int p = 0; p < kParts; p++)
      UNROLL for (int r = 0; r < R; r++) total[r][p] = multiply_add(source.one(k, p), x[r * num_inputs + k], total[r][p]);
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int p = 0; p < kParts; p++) store(out + r * kGroup + p * kLanes, total[r][p]);
}

constexpr int kPlainRows = kParts == 1 ? 12 : kParts == 2 ? 6 : 4;  // that fill the registers

template <class Source>
INLINE void plain_rows(int64_t num_rows, Source source, int64_t num_inputs, const float* x, float* out) {
  int64_t r = 0;
  for (; r + kPlainRows <= num_rows; r += kPlainRows) plain_tile<kPlainRows>(source, num_inputs, x + r * num_inputs, out + r * kGroup);
  for (; r + 4 <= num_rows; r += 4) plain_tile<4>(source, num_inputs, x + r * num_inputs, out + r * kGroup);
  for (; r + 2 <= num_rows; r += 2) plain_tile<2>(source, num_inputs, x + r * num_inputs, out + r * kGroup);
  for (; r < num_rows; r++) plain_tile<1>(source, num_inputs, x + r * num_inputs, out + r * kGroup);
}

template <Format F>
INLINE void widen(const uint8_t* group, int64_t num_inputs, float* panel) {
  Plain<F> source{group};
  int64_t k = 0;
  for (; k + 2 <= num_inputs; k += 2)
    for (int p = 0; p < kParts; p++) {
      Floats first, second;
      source.pair(k, p, first, second);
      store(panel + k * kGroup + p * kLanes, first), store(panel + (k + 1) * kGroup + p * kLanes, second);
    }
  if (k < num_inputs)
    for (int p = 0; p < kParts; p++) store(panel + k * kGroup + p * kLanes, source.one(k, p));
}

// ---- 16-bit products: the weights of a group as they want them ----
constexpr int kLinearSums = 64;  // inputs that are added up in half precision

constexpr bool can_widen(Format format) {
  if (format == Format::kFloat || format == Format::kInt8) return false;
  if (format <= Format::kBfloat) return format == (kWideHalf ? Format::kHalf : Format::kBfloat) && (kWideBfloat || kWideHalf);
  return kWidensIntegers;
}
// Unpacking integer formats pays from some rows on.
INLINE bool is_wide(const Linear& args) {
  const Format format = args.matrix->format;
  return can_widen(format) && (format <= Format::kBfloat || (args.num_rows > kWideRows && !args.is_deterministic));
}

template <Format F, int J>
INLINE void widen_word(const Packed<F>& source, uint8_t* to) {  // inputs 4 J to 4 J + 3
  constexpr int which = Layout<F>::kNumScales == 2 && J >= 4 ? 1 : 0;
#if defined(WIDE_HALF)
  alignas(64) uint8_t codes[kWordBytes];
  Floats scales[kParts], mins[kParts];
  UNROLL for (int p = 0; p < kParts; p++) {
    const Words w = source.template word<J>(p);
    memcpy(codes + p * kVectorBytes, &w, sizeof w);
    scales[p] = source.scale(which, p);
    if constexpr (Layout<F>::kHasMin) mins[p] = source.min(p);
    else mins[p] = scales[p] * float(-Layout<F>::kOffset);
  }
  store_halves<F == Format::kQ8_0>(codes, scales, mins, reinterpret_cast<uint16_t*>(to + 2 * J * kWordBytes));
#else
  for (int p = 0; p < kParts; p++) {
    const Words w = source.template word<J>(p);
    const Floats scale = source.scale(which, p);
    Floats x[4];
    UNROLL for (int b = 0; b < 4; b++) {
      Ints code = F == Format::kQ8_0 ? (Ints)(w << (24 - 8 * b)) >> 24 : (Ints)((w >> (8 * b)) & all_words(255u)) - Layout<F>::kOffset;
      x[b] = to_floats(code) * scale;
      if constexpr (Layout<F>::kHasMin) x[b] += source.min(p);
    }
    store_pairs(x, to + 2 * J * kWordBytes, p);
  }
#endif
}

template <Format F>
INLINE const uint16_t* wide_panel(const uint8_t* group, int64_t num_inputs, char* memory) {
  const void* panel = memory;
  if constexpr (F <= Format::kBfloat) {
    const int64_t bytes = group_bytes(F, num_inputs);
    if (num_inputs % kWideInputs == 0) panel = group;
    else memcpy(memory, group, size_t(bytes)), memset(memory + bytes, 0, size_t(wide_inputs(num_inputs) * kGroup * 2 - bytes));
  } else {
    Packed<F> source{group};
    uint8_t* to = reinterpret_cast<uint8_t*>(memory);
    for (int64_t b = 0; b < num_inputs / kBlock; b++, to += 16 * kWordBytes) {
      source.open(b);
      widen_word<F, 0>(source, to), widen_word<F, 1>(source, to), widen_word<F, 2>(source, to), widen_word<F, 3>(source, to);
      widen_word<F, 4>(source, to), widen_word<F, 5>(source, to), widen_word<F, 6>(source, to), widen_word<F, 7>(source, to);
    }
  }
  return static_cast<const uint16_t*>(static_cast<const void*>(order_panel(panel, 2 * wide_inputs(num_inputs), memory)));
}

// ---- a whole product ----
// Rows of x in the form in which a product takes them.
struct Prepared {
  const float* floats = nullptr;
  ByteBlock* bytes = nullptr;
  uint16_t* wide = nullptr;
  float* factors = nullptr;  // of wide rows
  uint8_t* encoded = nullptr;
  ByteCode* codes = nullptr;
};

template <class F>
INLINE void with_format(Format format, F call) {
  switch (format) {
    case Format::kFloat: return call(std::integral_constant<Format, Format::kFloat>{});
    case Format::kHalf: return call(std::integral_constant<Format, Format::kHalf>{});
    case Format::kBfloat: return call(std::integral_constant<Format, Format::kBfloat>{});
    case Format::kQ4_0: return call(std::integral_constant<Format, Format::kQ4_0>{});
    case Format::kQ4_1: return call(std::integral_constant<Format, Format::kQ4_1>{});
    case Format::kQ5_0: return call(std::integral_constant<Format, Format::kQ5_0>{});
    case Format::kQ5_1: return call(std::integral_constant<Format, Format::kQ5_1>{});
    case Format::kQ8_0: return call(std::integral_constant<Format, Format::kQ8_0>{});
    case Format::kQ4_K: return call(std::integral_constant<Format, Format::kQ4_K>{});
    case Format::kQ5_K: return call(std::integral_constant<Format, Format::kQ5_K>{});
    case Format::kQ6_K: return call(std::integral_constant<Format, Format::kQ6_K>{});
    case Format::kInt8: return call(std::integral_constant<Format, Format::kInt8>{});
  }
}

// Sums of a group's outputs for `num_rows` rows from `row` on: out[r * 16 + lane].
template <Format F>
void multiply_group(const Matrix& matrix, const uint8_t* group, const Prepared& x, int64_t row, int64_t num_rows,
                    char* panel_memory, float* out) {
  const int64_t num_inputs = matrix.num_inputs;
  if constexpr (can_widen(F)) {
    if (x.wide) {
      const int64_t width = wide_inputs(num_inputs);
      wide_rows<kLinearSums>(num_rows, x.wide + row * width, wide_panel<F>(group, num_inputs, panel_memory), width, out);
      return;
    }
  }
  if constexpr (F == Format::kInt8) {
    byte_products(num_rows, x.encoded + row * byte_inputs(num_inputs), x.codes + row, group, num_inputs, panel_memory, out);
  } else if constexpr (F <= Format::kBfloat) {
    const float* rows = x.floats + row * num_inputs;
    if (F == Format::kFloat || num_rows <= kFewRows) return plain_rows(num_rows, Plain<F>{group}, num_inputs, rows, out);
    float* panel = reinterpret_cast<float*>(panel_memory);
    widen<F>(group, num_inputs, panel);
    return plain_rows(num_rows, Plain<Format::kFloat>{reinterpret_cast<uint8_t*>(panel)}, num_inputs, rows, out);
  } else {
    constexpr bool kIsSigned = F == Format::kQ8_0;
    const int64_t num_blocks = num_inputs / kBlock;
    const ByteBlock* rows = x.bytes + row / kTile * num_blocks;
    if (F == Format::kQ8_0 || num_rows <= kFewRows) return group_rows<kIsSigned>(num_rows, Packed<F>{group}, num_blocks, rows, out);
    Panel<F> panel{reinterpret_cast<uint8_t*>(panel_memory)};
    panel.fill(group, num_blocks);
    group_rows<kIsSigned>(num_rows, panel, num_blocks, rows, out);
  }
}

// x + before, its RMS norm if there is one. Gives where the row stands that is to be multiplied.
const float* prepare_row(const Linear& args, int64_t row, bool writes_total, float* memory) {
  const int64_t width = args.matrix->num_inputs;
  const float* x = args.x + row * width;
  if (!args.norm) return x;
  const float* before = args.before ? args.before + row * width : nullptr;
  Floats squares = {};
  each(width, x, memory, [&](Floats v, int64_t i) {
    if (before) v += load_some(before + i, width - i);
    squares += v * v;
    return v;
  });
  if (args.total && writes_total) memcpy(args.total + row * width, memory, size_t(width) * 4);
  float factor = 1.0f / std::sqrt(sum(squares) / float(width) + args.eps);
  each(width, memory, memory, [&](Floats v, int64_t i) { return v * factor * load_some(args.norm + i, width - i); });
  return memory;
}

// Sums of a tile become numbers: times the factors of its rows, if there are some, plus the bias.
INLINE void add_bias(const Matrix& matrix, const float* factors, int64_t num_rows, int64_t first, float* tile) {
  if (!factors && !matrix.bias) return;
  for (int p = 0; p < kParts; p++) {
    const Floats bias = matrix.bias ? load(matrix.bias + first + p * kLanes) : Floats{};  // which is filled up with zeros
    float* at = tile + p * kLanes;
    for (int64_t r = 0; r < num_rows; r++, at += kGroup) store(at, multiply_add(load(at), factors ? factors[r] : 1.0f, bias));
  }
}

// All that comes after the product of some rows with a group. up: the other half of gated outputs; or null.
INLINE void finish_tile(const Linear& args, const float* factors, int64_t row, int64_t num_rows, int64_t group, float* tile, float* up) {
  const Matrix& matrix = *args.matrix;
  const int64_t width = up ? matrix.num_outputs / 2 : matrix.num_outputs, first = group * kGroup, count = at_most(kGroup, width - first);
  const int64_t size = num_rows * kGroup;
  add_bias(matrix, factors, num_rows, first, tile);
  if (up) add_bias(matrix, factors, num_rows, width + first, up);
  with_activation(args.activation, [&](auto activation) {
    for (int64_t i = 0; i < size; i += kLanes) store(tile + i, activate(decltype(activation)::value, load(tile + i)));
  });
  if (up) for (int64_t i = 0; i < size; i += kLanes) store(tile + i, load(tile + i) * load(up + i));
  for (int64_t r = 0; r < num_rows; r++, tile += kGroup) {
    const int64_t place = (row + r) * width + first;
    for (int64_t lane = 0; lane < count; lane += kLanes) {
      Floats y = load(tile + lane);
      if (args.residual) y += load_some(args.residual + place + lane, count - lane);
      if (args.softcap != 0) y = args.softcap * hyperbolic_tangent(y / args.softcap);
      store_some(args.out + place + lane, y, count - lane);
    }
  }
}

// Few rows: each thread makes its own; many: the threads share the work.
Prepared prepare_rows(const Linear& args, const Task& task, char* own) {
  const Matrix& matrix = *args.matrix;
  const int64_t width = matrix.num_inputs, num_blocks = width / kBlock, wide_width = wide_inputs(width);
  const bool is_shared = args.num_rows > kFewRows, has_wide = is_wide(args), is_encoded = matrix.format == Format::kInt8;
  const bool has_bytes = !has_wide && !is_encoded && !is_plain(matrix.format), has_floats = !has_wide && !is_encoded && !has_bytes;
  const int64_t filled_rows = (args.num_rows + 15) / 16 * 16;
  Prepared x;
  x.floats = args.x;
  if (has_floats && !args.norm) return x;
  char* memory = is_shared ? task.shared : own;
  float* line = reinterpret_cast<float*>(own + linear_shared_bytes(matrix, kFewRows));
  float* rows = reinterpret_cast<float*>(memory);
  if (has_wide) {
    x.wide = reinterpret_cast<uint16_t*>(memory);
    x.factors = reinterpret_cast<float*>(memory + filled_rows * wide_width * 2);
  } else if (is_encoded) {
    x.encoded = reinterpret_cast<uint8_t*>(memory);
    x.codes = reinterpret_cast<ByteCode*>(memory + filled_rows * byte_inputs(width));
  } else if (has_bytes) {
    x.bytes = reinterpret_cast<ByteBlock*>(memory);
  } else {
    x.floats = rows;
  }
  auto prepare = [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const float* from = prepare_row(args, row, is_shared || task.thread == 0, has_floats ? rows + row * width : line);
      if (has_bytes) quantise(from, num_blocks, x.bytes + row / kTile * num_blocks, int(row % kTile));
      if (is_encoded) x.codes[row] = encode_row(from, width, x.encoded + row * byte_inputs(width));
      if (has_wide) x.factors[row] = widen_row(from, width, x.wide + row * wide_width);
    }
  };
  if (is_shared) task.share(0, args.num_rows, 4, prepare), task.wait();
  else prepare(0, args.num_rows);
  return x;
}

}  // namespace

void linear(const Linear& args, const Task& task) {
  const Matrix& matrix = *args.matrix;
  const int64_t num_rows = args.num_rows, num_groups = (matrix.num_outputs + kGroup - 1) / kGroup;
  const int64_t bytes_of_group = group_bytes(matrix.format, matrix.num_inputs), step = args.is_gated ? num_groups / 2 : 0;
  const int64_t num_items = args.is_gated ? step : num_groups;
  float* tile = reinterpret_cast<float*>(task.own);
  char* panel = task.own + 2 * kRowsAtOnce * kGroup * 4;
  const Prepared x = prepare_rows(args, task, panel + linear_panel_bytes(matrix));
  if (x.wide || x.encoded) begin_wide();
  const int64_t num_chunks = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t size = num_rows > kFewRows ? 1 : at_least(1, num_items / (task.num_threads * 8));
  task.share(1, num_chunks * num_items, size, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; item++) {
      const int64_t row = item / num_items * kRowsAtOnce, group = item % num_items, count = at_most(kRowsAtOnce, num_rows - row);
      float* up = args.is_gated ? tile + kRowsAtOnce * kGroup : nullptr;
      with_format(matrix.format, [&](auto format) {
        constexpr Format F = decltype(format)::value;
        multiply_group<F>(matrix, matrix.data + group * bytes_of_group, x, row, count, panel, tile);
        if (up) multiply_group<F>(matrix, matrix.data + (group + step) * bytes_of_group, x, row, count, panel, up);
      });
      finish_tile(args, x.factors ? x.factors + row : nullptr, row, count, group, tile, up);
    }
  });
  if (x.wide || x.encoded) end_wide();
}

namespace {

template <Format F, int J>
INLINE void unpack_word(const Packed<F>& source, int half, int lane, float* to) {
  alignas(64) uint8_t codes[kWordBytes];
  alignas(64) float scales[kGroup], mins[kGroup] = {};
  for (int p = 0; p < kParts; p++) {
    Words w = source.template word<J>(p);
    memcpy(codes + p * kVectorBytes, &w, sizeof w);
    store(scales + p * kLanes, source.scale(half, p));
    if constexpr (Layout<F>::kHasMin) store(mins + p * kLanes, source.min(p));
  }
  for (int b = 0; b < 4; b++) {
    int code = F == Format::kQ8_0 ? int8_t(codes[4 * lane + b]) : codes[4 * lane + b] - Layout<F>::kOffset;
    to[4 * J + b] = scales[lane] * float(code) + mins[lane];
  }
}

}  // namespace

// One row of a packed matrix as float32.
void unpack_row(const Matrix& matrix, int64_t output, float* out) {
  const uint8_t* group = matrix.data + output / kGroup * group_bytes(matrix.format, matrix.num_inputs);
  const int lane = int(output % kGroup);
  with_format(matrix.format, [&](auto format) {
    constexpr Format F = decltype(format)::value;
    if constexpr (F == Format::kInt8) {
      const int8_t* codes = reinterpret_cast<const int8_t*>(group + kByteHeader) + 4 * lane;
      for (int64_t k = 0; k < matrix.num_inputs; k++)
        out[k] = reinterpret_cast<const float*>(group)[lane] * float(codes[k / 4 * kWordBytes + k % 4]);
    } else if constexpr (F <= Format::kBfloat) {
      for (int64_t k = 0; k < matrix.num_inputs; k++) {
        int64_t place = F == Format::kBfloat ? (k / 2 * kGroup + lane) * 2 + k % 2 : k * kGroup + lane;
        out[k] = read_as(Type(int(F)), group, place);
      }
    } else {
      Packed<F> source{group};
      for (int64_t b = 0; b < matrix.num_inputs / kBlock; b++) {
        source.open(b);
        float* to = out + b * kBlock;
        unpack_word<F, 0>(source, 0, lane, to), unpack_word<F, 1>(source, 0, lane, to);
        unpack_word<F, 2>(source, 0, lane, to), unpack_word<F, 3>(source, 0, lane, to);
        constexpr int kLast = Layout<F>::kNumScales - 1;
        unpack_word<F, 4>(source, kLast, lane, to), unpack_word<F, 5>(source, kLast, lane, to);
        unpack_word<F, 6>(source, kLast, lane, to), unpack_word<F, 7>(source, kLast, lane, to);
      }
    }
  });
}

void unpack(const Matrix& matrix, float* out) {
  for (int64_t row = 0; row < matrix.num_outputs; row++) unpack_row(matrix, row, out + row * matrix.num_inputs);
}

}  // namespace archerfish::LEVEL
