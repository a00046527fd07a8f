// Products with a matrix in any format. Few rows: bound by reading the weights. Many rows: bound by arithmetic.
// Plain formats are multiplied in float32, unless there are 16-bit products (wide.h).
#include "blocks.h"
#include "bytes.h"
#include "wide.h"

namespace archerfish::LEVEL {
namespace {

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
    if constexpr (F == Format::kBfloat)
      return as_floats(load_words(group + k / 2 * kWordBytes + part * kVectorBytes) << 16);
    if constexpr (F == Format::kHalf)
      return load_halves(reinterpret_cast<const uint16_t*>(group) + k * kGroup + part * kLanes);
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
    UNROLL for (int p = 0; p < kParts; p++) UNROLL for (int r = 0; r < R; r++) total[r][p] =
        multiply_add(source.one(k, p), x[r * num_inputs + k], total[r][p]);
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < kParts; p++)
      store(out + r * kGroup + p * kLanes, total[r][p]);
}

constexpr int kPlainRows = kParts == 1 ? 12 : kParts == 2 ? 6 : 4;  // that fill the registers

template <class Source>
INLINE void plain_rows(int64_t num_rows, Source source, int64_t num_inputs, const float* x, float* out) {
  int64_t r = 0;
  for (; r + kPlainRows <= num_rows; r += kPlainRows)
    plain_tile<kPlainRows>(source, num_inputs, x + r * num_inputs, out + r * kGroup);
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
  if (is_plain(format)) return format == (kWideHalf ? Format::kHalf : Format::kBfloat) && (kWideBfloat || kWideHalf);
  return kWidensIntegers;
}
// Unpacking integer formats pays from some rows on.
INLINE bool is_wide(const Linear& args) {
  const Format format = args.matrix->format;
  return can_widen(format) && (is_plain(format) || (args.num_rows > kWideRows && !args.is_deterministic));
}

template <Format F>
INLINE void widen_block(const Packed<F>& source, uint8_t* to) {
  using L = Layout<F>;
  Floats scales[L::kNumScales][kParts],
      mins[L::kNumScales][kParts];  // read once: the compiler cannot know that `to` is elsewhere
  UNROLL for (int i = 0; i < L::kNumScales * kParts; i++) {
    const int which = i / kParts, p = i % kParts;
    scales[which][p] = source.scale(which, p);
    if constexpr (L::kHasMin)
      mins[which][p] = source.min(p);
    else
      mins[which][p] = scales[which][p] * float(-L::kOffset);
  }
#if defined(WIDE_HALF)
  float16x8_t halves[L::kNumScales][4];
  UNROLL for (int which = 0; which < L::kNumScales; which++) UNROLL for (int i = 0; i < 4; i++) {
    const Floats* from = i < 2 ? scales[which] + 2 * i : mins[which] + 2 * i - 4;
    halves[which][i] = join_halves(from[0], from[1]);
  }
#endif
  UNROLL for (int j = 0; j < 8; j++) {  // inputs 4 j to 4 j + 3
    const int which = L::kNumScales == 2 && j >= 4 ? 1 : 0;
    Words codes[kParts];
    UNROLL for (int p = 0; p < kParts; p++) codes[p] = source.word(j, p);
#if defined(WIDE_HALF)
    store_halves<F == Format::kQ8_0>(codes, halves[which], reinterpret_cast<uint16_t*>(to + 2 * j * kWordBytes));
#else
    UNROLL for (int p = 0; p < kParts; p++) {
      Floats x[4];
      UNROLL for (int b = 0; b < 4; b++) {
        const Ints code = F == Format::kQ8_0 ? (Ints)(codes[p] << (24 - 8 * b)) >> 24
                                             : (Ints)((codes[p] >> (8 * b)) & all_words(255u));
        x[b] = multiply_add(to_floats(code), scales[which][p], mins[which][p]);
      }
      store_pairs(x, to + 2 * j * kWordBytes, p);
    }
#endif
  }
}

template <Format F>
INLINE const uint8_t* wide_panel(const uint8_t* group, int64_t num_inputs, char* memory) {
  const void* panel = memory;
  if constexpr (is_plain(F)) {
    const int64_t bytes = group_bytes(F, num_inputs);
    if (num_inputs % kWideInputs == 0)
      panel = group;
    else
      memcpy(memory, group, size_t(bytes)),
          memset(memory + bytes, 0, size_t(wide_inputs(num_inputs) * kGroup * 2 - bytes));
  } else {
    Packed<F> source{group};
    uint8_t* to = reinterpret_cast<uint8_t*>(memory);
    for (int64_t b = 0; b < num_inputs / kBlock; b++, to += 16 * kWordBytes) {
      source.open(b);
      widen_block(source, to);
    }
  }
  return static_cast<const uint8_t*>(order_panel(panel, 2 * wide_inputs(num_inputs), memory));
}

// ---- a whole product ----
// Rows of x in the form in which a product takes them.
struct Prepared {
  const float* floats = nullptr;
  float* rows = nullptr;  // room for floats
  ByteBlock* bytes = nullptr;
  uint16_t* wide = nullptr;
  float* factors = nullptr;  // of wide rows
  uint8_t* encoded = nullptr;
  ByteCode* codes = nullptr;
};

// A group as its products take it: unpacked into `memory`, or as it is.
template <Format F>
const uint8_t* open_group(const Matrix& matrix, const uint8_t* group, const Prepared& x, int64_t num_rows,
                          char* memory) {
  const int64_t num_inputs = matrix.num_inputs;
  if constexpr (can_widen(F))
    if (x.wide) return wide_panel<F>(group, num_inputs, memory);
  if constexpr (is_plain(F) && F != Format::kFloat)
    if (num_rows > kFewRows) {
      widen<F>(group, num_inputs, reinterpret_cast<float*>(memory));
      return reinterpret_cast<const uint8_t*>(memory);
    }
  if constexpr (F == Format::kInt8)
    return static_cast<const uint8_t*>(order_panel(group + kByteHeader, byte_inputs(num_inputs), memory));
  return group;
}

// Sums of a group's outputs for `num_rows` rows from `row` on: out[r * 16 + lane]. panel: what open_group gave.
template <Format F>
void multiply_group(const Matrix& matrix, const uint8_t* group, const uint8_t* panel, const Prepared& x, int64_t row,
                    int64_t num_rows, float* out) {
  const int64_t num_inputs = matrix.num_inputs;
  if constexpr (can_widen(F)) {
    if (x.wide) {
      const int64_t width = wide_inputs(num_inputs);
      wide_rows<kLinearSums>(num_rows, x.wide + row * width, reinterpret_cast<const uint16_t*>(panel), width, out);
      return;
    }
  }
  if constexpr (F == Format::kInt8) {
    const int64_t width = byte_inputs(num_inputs);
    sum_bytes(num_rows, x.encoded + row * width, panel, width, reinterpret_cast<int32_t*>(out));
    finish_bytes(num_rows, x.codes + row, group, out);
  } else if constexpr (is_plain(F)) {
    const float* rows = x.floats + row * num_inputs;
    if (panel == group)
      plain_rows(num_rows, Plain<F>{group}, num_inputs, rows, out);
    else
      plain_rows(num_rows, Plain<Format::kFloat>{panel}, num_inputs, rows, out);
  } else {
    const int64_t num_blocks = num_inputs / kBlock;
    block_rows<F>(num_rows, group, num_blocks, x.bytes + row / kTile * num_blocks, out);
  }
}

// Two groups, or one, with the same rows.
struct Pair {
  const uint8_t *groups[2], *panels[2];  // the second: null if there is one only
  float* sums[2];
};

template <Format F>
void multiply_pair(const Matrix& matrix, const Pair& pair, const Prepared& x, int64_t row, int64_t num_rows) {
#if defined(__AMX_BF16__)
  const bool are_tiles = F == Format::kInt8 || x.wide;
  if (are_tiles) {
    const int64_t width = F == Format::kInt8 ? byte_inputs(matrix.num_inputs) : 2 * wide_inputs(matrix.num_inputs);
    const uint8_t* rows = F == Format::kInt8 ? x.encoded : reinterpret_cast<const uint8_t*>(x.wide);
    tile_rows<F == Format::kInt8>(num_rows, rows + row * width, pair.panels[0], pair.panels[1], width, pair.sums[0],
                                  pair.sums[1]);
    if constexpr (F == Format::kInt8)
      for (int i = 0; i < 2 && pair.groups[i]; i++) finish_bytes(num_rows, x.codes + row, pair.groups[i], pair.sums[i]);
    return;
  }
#endif
  for (int i = 0; i < 2 && pair.groups[i]; i++)
    multiply_group<F>(matrix, pair.groups[i], pair.panels[i], x, row, num_rows, pair.sums[i]);
}

// The RMS norm of x + before; without a norm, x itself. Gives where the row stands that is to be multiplied.
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
    const Floats bias =
        matrix.bias ? load(matrix.bias + first + p * kLanes) : Floats{};  // which is filled up with zeros
    float* at = tile + p * kLanes;
    for (int64_t r = 0; r < num_rows; r++, at += kGroup)
      store(at, multiply_add(load(at), factors ? factors[r] : 1.0f, bias));
  }
}

// All that comes after the product of some rows with a group. up: the other half of gated outputs; or null.
INLINE void finish_tile(const Linear& args, const float* factors, int64_t row, int64_t num_rows, int64_t group,
                        float* tile, float* up) {
  const Matrix& matrix = *args.matrix;
  const int64_t width = up ? matrix.num_outputs / 2 : matrix.num_outputs, first = group * kGroup,
                count = at_most(kGroup, width - first);
  const int64_t size = num_rows * kGroup;
  add_bias(matrix, factors, num_rows, first, tile);
  if (up) add_bias(matrix, factors, num_rows, width + first, up);
  with_activation(args.activation, [&](auto activation) {
    for (int64_t i = 0; i < size; i += kLanes) store(tile + i, activate(decltype(activation)::value, load(tile + i)));
  });
  if (up)
    for (int64_t i = 0; i < size; i += kLanes)
      store(tile + i, load(tile + i) * gated_factor(args.activation, load(up + i)));
  for (int64_t r = 0; r < num_rows; r++, tile += kGroup) {
    const int64_t place = (row + r) * args.out_width + first;
    for (int64_t lane = 0; lane < count; lane += kLanes) {
      Floats y = load(tile + lane);
      if (args.residual) y += load_some(args.residual + place + lane, count - lane);
      if (args.softcap != 0) y = args.softcap * hyperbolic_tangent(y / args.softcap);
      store_some(args.out + place + lane, y, count - lane);
    }
  }
}

// Room for rows in the form in which products take them.
Prepared lay_rows(const Matrix& matrix, bool has_wide, int64_t num_rows, char* memory) {
  const int64_t filled_rows = (num_rows + 15) / 16 * 16;
  Prepared x;
  if (has_wide) {
    x.wide = reinterpret_cast<uint16_t*>(memory);
    x.factors = reinterpret_cast<float*>(memory + filled_rows * wide_inputs(matrix.num_inputs) * 2);
  } else if (matrix.format == Format::kInt8) {
    x.encoded = reinterpret_cast<uint8_t*>(memory);
    x.codes = reinterpret_cast<ByteCode*>(memory + filled_rows * byte_inputs(matrix.num_inputs));
  } else if (!is_plain(matrix.format)) {
    x.bytes = reinterpret_cast<ByteBlock*>(memory);
  } else {
    x.rows = reinterpret_cast<float*>(memory), x.floats = x.rows;
  }
  return x;
}

void put_row(const Prepared& x, int64_t width, int64_t row, const float* from) {
  if (x.bytes)
    quantise(from, width / kBlock, x.bytes + row / kTile * (width / kBlock), int(row % kTile));
  else if (x.encoded)
    x.codes[row] = encode_row(from, width, x.encoded + row * byte_inputs(width));
  else if (x.wide)
    x.factors[row] = widen_row(from, width, x.wide + row * wide_inputs(width));
  else if (from != x.rows + row * width)
    memcpy(x.rows + row * width, from, size_t(width) * 4);
}

// Few rows: each thread makes its own; many: the threads share the work.
Prepared prepare_rows(const Linear& args, const Task& task, char* own) {
  const Matrix& matrix = *args.matrix;
  const int64_t width = matrix.num_inputs;
  const bool is_shared = args.num_rows > kFewRows;
  Prepared x = lay_rows(matrix, is_wide(args), args.num_rows, is_shared ? task.shared : own);
  if (x.rows && !args.norm) {
    x.floats = args.x;
    return x;
  }
  float* line = reinterpret_cast<float*>(own + linear_shared_bytes(matrix, kFewRows));
  auto prepare = [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
      put_row(x, width, row,
              prepare_row(args, row, is_shared || task.thread == 0, x.rows ? x.rows + row * width : line));
  };
  if (is_shared)
    task.share(0, args.num_rows, 4, prepare), task.wait();
  else
    prepare(0, args.num_rows);
  return x;
}

}  // namespace

void linear(const Linear& args, const Task& task) {
  const Matrix& matrix = *args.matrix;
  const int64_t num_rows = args.num_rows, num_groups = (matrix.num_outputs + kGroup - 1) / kGroup;
  const int64_t bytes_of_group = group_bytes(matrix.format, matrix.num_inputs), num_pairs = (num_groups + 1) / 2;
  float* sums = reinterpret_cast<float*>(task.own);
  char* panels = task.own + 2 * kRowsAtOnce * kGroup * 4;
  const Prepared x = prepare_rows(args, task, panels + 2 * linear_panel_bytes(matrix));
  if (x.wide || x.encoded) begin_wide();
  // A piece of work: a pair of groups, with rows that stay in the cache; where groups are unpacked, with as many as
  // leave eight pieces to each thread.
  const int64_t num_chunks = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t chunks =
      is_plain(matrix.format) || x.encoded ? 1 : at_least(1, num_chunks * num_pairs / (8 * task.num_threads));
  const int64_t rows_of_piece = chunks * kRowsAtOnce,
                num_pieces = (num_rows + rows_of_piece - 1) / rows_of_piece * num_pairs;
  const int64_t size = num_rows > kFewRows ? 1 : at_least(1, num_pairs / (task.num_threads * 8));
  task.share(1, num_pieces, size, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; piece++) {
      const int64_t first_row = piece / num_pairs * rows_of_piece,
                    last_row = at_most(first_row + rows_of_piece, num_rows), place = piece % num_pairs;
      const int64_t first = args.is_gated ? place : 2 * place, second = args.is_gated ? place + num_pairs : first + 1;
      const auto group_at = [&](int64_t group) {
        return group < num_groups ? matrix.data + group * bytes_of_group : nullptr;
      };
      Pair pair{{group_at(first), group_at(second)}, {}, {sums, sums + kRowsAtOnce * kGroup}};
      with_format(matrix.format, [&](auto format) {
        constexpr Format F = decltype(format)::value;
        for (int i = 0; i < 2 && pair.groups[i]; i++)
          pair.panels[i] = open_group<F>(matrix, pair.groups[i], x, num_rows, panels + i * linear_panel_bytes(matrix));
        for (int64_t row = first_row; row < last_row; row += kRowsAtOnce) {
          const int64_t count = at_most(kRowsAtOnce, last_row - row);
          const float* factors = x.factors ? x.factors + row : nullptr;
          multiply_pair<F>(matrix, pair, x, row, count);
          finish_tile(args, factors, row, count, first, pair.sums[0], args.is_gated ? pair.sums[1] : nullptr);
          if (!args.is_gated && pair.groups[1]) finish_tile(args, factors, row, count, second, pair.sums[1], nullptr);
        }
      });
    }
  });
  if (x.wide || x.encoded) end_wide();
}

}  // namespace archerfish::LEVEL
