// Rotary embedding and storing of keys and values, and attention: over blocks, or within packed sequences.
#include "vec.h"
#include "wide.h"

namespace archerfish::LEVEL {
namespace {

constexpr int kAhead = 8;       // rows or keys that are fetched before they are used
constexpr int kDirectRows = 8;  // up to which keys and values are not gathered

INLINE float norm_factor(const float* x, int width, float eps) {
  Floats squares = {};
  float rest = 0;
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Floats v = load(x + i);
    squares += v * v;
  }
  for (; i < width; i++) rest += x[i] * x[i];
  return 1.0f / std::sqrt((sum(squares) + rest) / float(width) + eps);
}

// factor: of the norm; 0: that of this head.
INLINE void turn_head(float* head, const KVStore& args, const float* norm, float factor, const float* cos_sin) {
  const int dim = args.head_dim, half = args.rotary_dim / 2;
  if (norm) {
    if (factor == 0) factor = norm_factor(head, dim, args.eps);
    each(dim, head, head, [&](Floats v, int64_t i) { return v * factor * load_some(norm + i, dim - i); });
  }
  if (!half) return;
  int i = 0;
  for (; args.is_interleaved && i < half; i++) {
    float a = head[2 * i], b = head[2 * i + 1], c = cos_sin[i], s = cos_sin[half + i];
    head[2 * i] = a * c - b * s, head[2 * i + 1] = b * c + a * s;
  }
  for (; i + kLanes <= half; i += kLanes) {
    Floats a = load(head + i), b = load(head + half + i), c = load(cos_sin + i), s = load(cos_sin + half + i);
    store(head + i, a * c - b * s), store(head + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = head[i], b = head[half + i], c = cos_sin[i], s = cos_sin[half + i];
    head[i] = a * c - b * s, head[half + i] = b * c + a * s;
  }
}

// A head as int8 with its scale, which is NaN if a number is not finite.
INLINE void store_bytes(float* head, int dim, int8_t* to) {
  Floats most = {}, lost = {};
  each(dim, head, head, [&](Floats v, int64_t) {
    most = larger(most, magnitude(v)), lost += v * 0.0f;
    return v;
  });
  const float scale = largest(most) / 127.0f + sum(lost), inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
  each(dim, head, head, [&](Floats v, int64_t) {
    v = round_even(v * inverse);
    return choose(v == v, v, Floats{});
  });
  for (int i = 0; i < dim; i++) to[i] = int8_t(head[i]);
  memcpy(to + dim, &scale, sizeof scale);
}

// A tile: up to kQueries rows (a token's query heads that share a KV head, for one or several tokens) against chunks of
// keys.
struct Tile {
  int num_rows;
  int64_t positions[kQueries];  // of each row's token: the last key that it sees
  const float* rows[kQueries];
  float* out[kQueries];
  const float* bias[kQueries];  // from key 0 on; or null
  float sinks[kQueries];        // -inf: none
};

struct Work {  // memory of a thread
  float *queries, *totals, *scores, *keys, *values, *highest, *sums, *factors;
  uint16_t *wide_queries, *wide_keys, *wide_values, *weights;
  Work(char* memory, int dim) {
    char* at = memory;
    auto take = [&](int64_t bytes) {
      char* found = at;
      at += (bytes + kLine - 1) / kLine * kLine;
      return found;
    };
    auto numbers = [&](int64_t count) { return reinterpret_cast<float*>(take(4 * count)); };
    queries = numbers(kQueries * (dim + kBlock)), totals = numbers(kQueries * dim), scores = numbers(kQueries * kChunk);
    keys = numbers(kChunk * (dim + kBlock)), values = numbers(kChunk * dim);
    highest = numbers(kQueries), sums = numbers(kQueries), factors = numbers(kQueries);
    weights = reinterpret_cast<uint16_t*>(take(2 * kQueries * kChunk));
    wide_queries = reinterpret_cast<uint16_t*>(queries), wide_keys = reinterpret_cast<uint16_t*>(keys);
    wide_values = reinterpret_cast<uint16_t*>(values);
  }
};

INLINE void fetch(const void* from, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(from) + i);
}
template <Type T>
INLINE void fetch_at(const void* memory, int64_t place, int64_t count) {
  constexpr int kItem = T == Type::kFloat ? 4 : T == Type::kByte ? 1 : 2;
  fetch(static_cast<const char*>(memory) + place * kItem, count * kItem);
}

// Where the keys of a chunk lie: numbers from the beginning of the memory.
INLINE void find_keys(const Attend& args, int64_t sequence, int kv_head, int64_t first, int64_t count,
                      int64_t* places) {
  const int64_t head = kv_head * head_stride(args.type, args.head_dim);
  if (!args.block_tables) {
    for (int64_t i = 0; i < count; i++) places[i] = (args.starts[sequence] + first + i) * args.key_stride + head;
    return;
  }
  const int64_t* table = args.block_tables + sequence * args.table_width;
  int64_t block = first / args.block_size, inside = first % args.block_size;
  for (int64_t i = 0; i < count; i++) {
    places[i] = (table[block] * args.block_size + inside) * args.key_stride + head;
    if (++inside == args.block_size) inside = 0, block++;
  }
}

// Keys with lanes over keys: keys[d * kChunk + key]; values[key * dim + d].
template <Type T>
INLINE void gather(const Attend& args, const int64_t* places, int64_t count, const Work& work) {
  const int dim = args.head_dim;
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = places[i];
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      Floats key = load_as(T, args.keys, at + d);
      UNROLL for (int l = 0; l < kLanes; l++) work.keys[(d + l) * kChunk + i] = key[l];
      store(work.values + i * dim + d, load_as(T, args.values, at + d));
    }
    for (; d < dim; d++) {
      work.keys[d * kChunk + i] = read_as(T, args.keys, at + d);
      work.values[i * dim + d] = read_as(T, args.values, at + d);
    }
  }
}

// Scores or weights of a chunk, which were computed of int8 numbers, times the scales of these.
INLINE void scale_scores(const void* memory, int dim, const int64_t* places, int64_t count, int num_rows,
                         float* scores) {
  float scales[kChunk] = {};
  for (int64_t i = 0; i < count; i++)
    memcpy(scales + i, static_cast<const int8_t*>(memory) + places[i] + dim, sizeof(float));
  for (int r = 0; r < num_rows; r++, scores += kChunk)
    each(kChunk, scores, scores, [&](Floats v, int64_t i) { return v * load(scales + i); });
}

// The same for a tile of few rows, straight from the memory of keys and values. dim: a multiple of the lanes.
template <Type T, int R>
INLINE void score_direct(const Attend& args, const int64_t* places, int64_t count, const Work& work, int row) {
  const int dim = args.head_dim;
  const float* queries = work.queries + row * dim;
  for (int64_t i = 0; i < count; i++) {
    if (i + 4 < count) fetch_at<T>(args.keys, places[i + 4], 1);
    Floats total[R] = {};
    for (int d = 0; d < dim; d += kLanes) {
      Floats key = load_as(T, args.keys, places[i] + d);
      UNROLL for (int r = 0; r < R; r++) total[r] = multiply_add(key, load(queries + r * dim + d), total[r]);
    }
    UNROLL for (int r = 0; r < R; r++) work.scores[(row + r) * kChunk + i] = sum(total[r]);
  }
}

template <Type T, int R>
INLINE void add_direct(const Attend& args, const int64_t* places, int64_t count, const Work& work, int row) {
  constexpr int kVectors = kParts == 4 ? 4 : 1;
  const int dim = args.head_dim;
  for (int d = 0; d < dim; d += kVectors * kLanes) {
    Floats total[R][kVectors];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < kVectors; v++) total[r][v] =
        load(work.totals + (row + r) * dim + d + v * kLanes);
    for (int64_t i = 0; i < count; i++) UNROLL for (int v = 0; v < kVectors; v++) {
        Floats value = load_as(T, args.values, places[i] + d + v * kLanes);
        UNROLL for (int r = 0; r < R; r++) total[r][v] =
            multiply_add(value, work.scores[(row + r) * kChunk + i], total[r][v]);
      }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < kVectors; v++)
        store(work.totals + (row + r) * dim + d + v * kLanes, total[r][v]);
  }
}

template <int R>
INLINE void score_rows(const float* queries, const float* keys, int dim, float* scores) {
  constexpr int kColumns = kParts == 4 ? 16 : 2 * kLanes, kVectors = kColumns / kLanes;
  for (int c = 0; c < kChunk; c += kColumns) {
    Floats total[R][kVectors] = {};
    for (int d = 0; d < dim; d++) UNROLL for (int v = 0; v < kVectors; v++) {
        Floats key = load(keys + d * kChunk + c + v * kLanes);
        UNROLL for (int r = 0; r < R; r++) total[r][v] = multiply_add(key, queries[r * dim + d], total[r][v]);
      }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < kVectors; v++)
        store(scores + r * kChunk + c + v * kLanes, total[r][v]);
  }
}

template <int R>
INLINE void add_values(const float* scores, const float* values, int dim, int64_t count, float* totals) {
  constexpr int kVectors = kParts == 4 ? 4 : 2;
  int d = 0;
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) {
    Floats total[R][kVectors];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < kVectors; v++) total[r][v] =
        load(totals + r * dim + d + v * kLanes);
    for (int64_t i = 0; i < count; i++) UNROLL for (int v = 0; v < kVectors; v++) {
        Floats value = load(values + i * dim + d + v * kLanes);
        UNROLL for (int r = 0; r < R; r++) total[r][v] = multiply_add(value, scores[r * kChunk + i], total[r][v]);
      }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < kVectors; v++)
        store(totals + r * dim + d + v * kLanes, total[r][v]);
  }
  for (; d < dim; d++)
    for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < count; i++) totals[r * dim + d] += values[i * dim + d] * scores[r * kChunk + i];
}

// ---- tiles of many rows in 16 bits, as products with the keys and with the values; dim: a multiple of 16 ----
struct Factors {
  float keys = 1, values = 1;
};

// What numbers at a place are to be multiplied with.
template <Type T>
INLINE float scale_at(const void* memory, int64_t place, int64_t dim) {
  float scale = 1;
  if constexpr (T == Type::kByte) memcpy(&scale, static_cast<const int8_t*>(memory) + place + dim, sizeof scale);
  return scale;
}

// Panels of 16 keys, and panels of 16 numbers of the values, as `wide_rows` takes them; there are zeros after the last
// value.
template <Type T>
INLINE Factors gather_wide(const Attend& args, const int64_t* places, int64_t count, const Work& work) {
  const int64_t dim = args.head_dim, width = wide_inputs(dim);
  constexpr int64_t kUnit = kWideBfloat ? 2 : 1;  // inputs that lie side by side
  uint16_t row[kMostHeadDim + kWideInputs] = {};
  Factors factors;
  if constexpr (kWideHalf) {
    Floats most_key = {}, most_value = {};
    for (int64_t i = 0; i < count; i++) {
      if (i + kAhead < count)
        fetch_at<T>(args.keys, places[i + kAhead], dim), fetch_at<T>(args.values, places[i + kAhead], dim);
      const float key_scale = scale_at<T>(args.keys, places[i], dim),
                  value_scale = scale_at<T>(args.values, places[i], dim);
      for (int64_t d = 0; d < dim; d += kLanes) {
        most_key = larger(most_key, magnitude(load_as(T, args.keys, places[i] + d) * key_scale));
        most_value = larger(most_value, magnitude(load_as(T, args.values, places[i] + d) * value_scale));
      }
    }
    factors.keys = wide_factor(most_key, 4.0f), factors.values = wide_factor(most_value, 64.0f);
  }
  const float inverse_key = 1.0f / factors.keys, inverse_value = 1.0f / factors.values;
  for (int64_t i = 0; i < count; i++) {
    uint16_t* panel = work.wide_keys + i / kGroup * kGroup * width + i % kGroup * kUnit;
    const float scale = inverse_key * scale_at<T>(args.keys, places[i], dim);
    for (int64_t d = 0; d < dim; d += kLanes) store_wide(row + d, load_as(T, args.keys, places[i] + d) * scale);
    for (int64_t d = 0; d < width; d += kUnit) memcpy(panel + d * kGroup, row + d, 2 * kUnit);
  }
  for (int64_t i = 0; i < wide_inputs(count); i += kUnit) {
    const float scale = i < count ? inverse_value * scale_at<T>(args.values, places[i], dim) : 0;
    const float next_scale = i + 1 < count ? inverse_value * scale_at<T>(args.values, places[i + 1], dim) : 0;
    for (int64_t d = 0; d < dim; d += kLanes) {
      uint16_t* to = work.wide_values + d / kGroup * kGroup * kChunk + i * kGroup + d % kGroup * kUnit;
      const Floats first = i < count ? load_as(T, args.values, places[i] + d) * scale : Floats{};
      if constexpr (kWideBfloat) {
        const Floats second = i + 1 < count ? load_as(T, args.values, places[i + 1] + d) * next_scale : Floats{};
        const Words both = pair_bfloats(first, second);
        memcpy(to, &both, sizeof both);
      } else {
        store_wide(to, first);
      }
    }
  }
  for (int64_t i = 0; i < count; i += kGroup)
    order_panel(work.wide_keys + i * width, 2 * width, work.wide_keys + i * width);
  for (int64_t d = 0; d < dim; d += kGroup)
    order_panel(work.wide_values + d * kChunk, 2 * wide_inputs(count), work.wide_values + d * kChunk);
  return factors;
}

INLINE void add_wide(int num_rows, int64_t dim, int64_t count, float factor, const Work& work) {
  float* products = work.scores;  // which are weights now
  for (int64_t d = 0; d < dim; d += kGroup) {
    wide_rows<kChunk>(num_rows, work.weights, work.wide_values + d * kChunk, wide_inputs(count), products);
    for (int r = 0; r < num_rows; r++) UNROLL for (int p = 0; p < kParts; p++) {
        float* total = work.totals + r * dim + d + p * kLanes;
        store(total, multiply_add(load(products + r * kGroup + p * kLanes), factor, load(total)));
      }
  }
}

template <class F>
INLINE void by_fours(int num_rows, F call) {
  int r = 0;
  for (; r + 4 <= num_rows; r += 4) call(std::integral_constant<int, 4>{}, r);
  if (num_rows - r == 3)
    call(std::integral_constant<int, 3>{}, r);
  else if (num_rows - r == 2)
    call(std::integral_constant<int, 2>{}, r);
  else if (num_rows - r == 1)
    call(std::integral_constant<int, 1>{}, r);
}

// Calls f(scores, place of the first) for vectors of a row's scores. In 16 bits, these lie in groups of 16 keys of all
// rows.
template <bool kIsWide, class F>
INLINE void each_score(float* scores, int r, int64_t count, F call) {
  for (int64_t i = 0; i < count; i += kGroup) {
    float* group = scores + (kIsWide ? (i / kGroup * kQueries + r) * kGroup : r * kChunk + i);
    UNROLL for (int p = 0; p < kParts; p++) call(group + p * kLanes, i + p * kLanes);
  }
}

// Scores of a row become weights, relative to the highest so far; what was added up before is scaled down if there is a
// new one.
template <bool kIsWide>
INLINE void weigh(const Attend& args, const Tile& tile, int r, int64_t first, int64_t count, float scale,
                  const Work& work) {
  const int64_t last = kIsWide ? wide_inputs(count) : kChunk;
  uint16_t* weights = work.weights + r * wide_inputs(count);
  const float* bias = tile.bias[r] ? tile.bias[r] + first : nullptr;
  int64_t from = 0, to = count;
  if (args.is_causal || args.window)
    to = at_least(0, at_most(count, tile.positions[r] - first + (args.is_causal ? 1 : args.window)));
  if (args.window) from = at_most(count, at_least(0, tile.positions[r] - args.window + 1 - first));
  if (from > 0 || to < last || bias || args.softcap != 0) {
    Ints counting;
    for (int l = 0; l < kLanes; l++) counting[l] = l;
    each_score<kIsWide>(work.scores, r, last, [&](float* at, int64_t i) {
      Floats s = load(at) * scale;
      if (args.softcap != 0) s = args.softcap * hyperbolic_tangent(s / args.softcap);
      if (bias && i < count) s += load_some(bias + i, count - i);
      const Ints place = counting + int32_t(i);
      store(at, choose((place >= all_ints(int32_t(from))) & (place < all_ints(int32_t(to))), s, all(-INFINITY)));
    });
    scale = 1;
  }
  Floats most = all(-INFINITY);
  each_score<kIsWide>(work.scores, r, last, [&](float* at, int64_t) { most = larger(most, load(at)); });
  float high = largest(most) * scale, before = work.highest[r];
  if (!(high > -INFINITY)) {
    each_score<kIsWide>(work.scores, r, last, [&](float* at, int64_t i) {
      if constexpr (kIsWide)
        store_wide(weights + i, Floats{});
      else
        store(at, Floats{});
    });
    return;
  }
  high = high > before ? high : before;
  if (high > before) {
    const float factor = before > -INFINITY ? std::exp(before - high) : 0.0f;
    float* totals = work.totals + r * args.head_dim;
    each(args.head_dim, totals, totals, [&](Floats v, int64_t) { return v * factor; });
    work.sums[r] *= factor, work.highest[r] = high;
  }
  Floats total = {};
  each_score<kIsWide>(work.scores, r, last, [&](float* at, int64_t i) {
    const Floats p = exponential(multiply_add(load(at), scale, all(-high)));
    total += p;
    if constexpr (kIsWide)
      store_wide(weights + i, p);
    else
      store(at, p);
  });
  work.sums[r] += sum(total);
}

template <Type T, bool kIsWide>
void attend_tile(const Attend& args, const Tile& tile, int64_t sequence, int kv_head, int64_t num_keys,
                 const Work& work) {
  const int dim = args.head_dim;
  for (int r = 0; r < tile.num_rows; r++) {
    if (r + kAhead < tile.num_rows) fetch(tile.rows[r + kAhead], 4 * dim);
    if constexpr (kIsWide)
      work.factors[r] = widen_row(tile.rows[r], dim, work.wide_queries + r * wide_inputs(dim));
    else
      memcpy(work.queries + r * dim, tile.rows[r], size_t(dim) * 4);
    memset(work.totals + r * dim, 0, size_t(dim) * 4);
    work.highest[r] = tile.sinks[r], work.sums[r] = tile.sinks[r] > -INFINITY ? 1.0f : 0.0f;
  }
  const bool is_direct = tile.num_rows <= kDirectRows && dim % kGroup == 0;
  int64_t first = 0, places[kChunk];
  if (args.window) first = at_least(0, tile.positions[0] - args.window + 1) / kChunk * kChunk;
  for (; first < num_keys; first += kChunk) {
    const int64_t count = at_most(kChunk, num_keys - first);
    find_keys(args, sequence, kv_head, first, count, places);
    if constexpr (kIsWide) {
      const Factors factors = gather_wide<T>(args, places, count, work);
      for (int64_t i = 0; i < count;
           i += kGroup)  // sums of few inputs: an error of a score is one of its weight's exponent
        wide_rows<16>(tile.num_rows, work.wide_queries, work.wide_keys + i * wide_inputs(dim), wide_inputs(dim),
                      work.scores + i * kQueries);
      for (int r = 0; r < tile.num_rows; r++)
        weigh<true>(args, tile, r, first, count, args.scale * work.factors[r] * factors.keys, work);
      add_wide(tile.num_rows, dim, count, factors.values, work);
      continue;
    }
    if (!is_direct) gather<T>(args, places, count, work);
    by_fours(tile.num_rows, [&](auto rows, int r) {
      constexpr int R = decltype(rows)::value;
      if (is_direct)
        score_direct<T, R>(args, places, count, work, r);
      else
        score_rows<R>(work.queries + r * dim, work.keys, dim, work.scores + r * kChunk);
    });
    if (T == Type::kByte) scale_scores(args.keys, dim, places, count, tile.num_rows, work.scores);
    for (int r = 0; r < tile.num_rows; r++) weigh<false>(args, tile, r, first, count, args.scale, work);
    if (T == Type::kByte) scale_scores(args.values, dim, places, count, tile.num_rows, work.scores);
    by_fours(tile.num_rows, [&](auto rows, int r) {
      constexpr int R = decltype(rows)::value;
      if (is_direct)
        add_direct<T, R>(args, places, count, work, r);
      else
        add_values<R>(work.scores + r * kChunk, work.values, dim, count, work.totals + r * dim);
    });
  }
  for (int r = 0; r < tile.num_rows; r++) {
    const float inverse = 1.0f / work.sums[r];
    each(dim, work.totals + r * dim, tile.out[r], [&](Floats v, int64_t) { return v * inverse; });
  }
}

template <class F>
INLINE void with_type(Type type, F call) {
  if (type == Type::kHalf)
    call(std::integral_constant<Type, Type::kHalf>{});
  else if (type == Type::kBfloat)
    call(std::integral_constant<Type, Type::kBfloat>{});
  else if (type == Type::kByte)
    call(std::integral_constant<Type, Type::kByte>{});
  else
    call(std::integral_constant<Type, Type::kFloat>{});
}

}  // namespace

void store_kv(const KVStore& args, const Task& task) {
  const int dim = args.head_dim;
  const int64_t queries = int64_t(args.num_heads) * dim, keys = int64_t(args.num_kv_heads) * dim,
                width = queries + 2 * keys;
  task.share(0, args.num_rows, 4, [&](int64_t first, int64_t last) {
    float head[kMostHeadDim];
    for (int64_t row = first; row < last; row++) {
      const float* from = args.qkv + row * width;
      const float* cos_sin = args.rotary_dim ? args.cos_sin + args.positions[row] * args.rotary_dim : nullptr;
      const float q_factor = args.is_q_norm_whole ? norm_factor(from, int(queries), args.eps) : 0;
      const float k_factor = args.is_k_norm_whole ? norm_factor(from + queries, int(keys), args.eps) : 0;
      if (!args.keys) {
        float* own = args.q + row * width;
        for (int h = 0; h < args.num_heads; h++)
          turn_head(own + h * dim, args, args.q_norm + (q_factor > 0 ? h * dim : 0), q_factor, cos_sin);
        for (int h = 0; h < args.num_kv_heads; h++)
          turn_head(own + queries + h * dim, args, args.k_norm + (k_factor > 0 ? h * dim : 0), k_factor, cos_sin);
        continue;
      }
      memcpy(args.q + row * queries, from, size_t(queries) * 4);
      for (int h = 0; h < args.num_heads; h++)
        turn_head(args.q + row * queries + h * dim, args, args.q_norm + (q_factor > 0 ? h * dim : 0), q_factor,
                  cos_sin);
      if (args.slots[row] < 0) continue;
      for (int h = 0; h < args.num_kv_heads; h++) {
        memcpy(head, from + queries + h * dim, size_t(dim) * 4);
        turn_head(head, args, args.k_norm + (k_factor > 0 ? h * dim : 0), k_factor, cos_sin);
        const int64_t at = (args.slots[row] * args.num_kv_heads + h) * head_stride(args.type, dim);
        if (args.type == Type::kByte) {
          store_bytes(head, dim, static_cast<int8_t*>(args.keys) + at);
          memcpy(head, from + queries + keys + h * dim, size_t(dim) * 4);
          store_bytes(head, dim, static_cast<int8_t*>(args.values) + at);
          continue;
        }
        for (int i = 0; i < dim; i++) {
          write_as(args.type, args.keys, at + i, head[i]);
          write_as(args.type, args.values, at + i, from[queries + keys + h * dim + i]);
        }
      }
    }
  });
}

void attend(const Attend& args, const Task& task) {
  const int shared = args.num_heads / args.num_kv_heads, dim = args.head_dim;
  const int tokens = shared >= kQueries ? 1 : kQueries / shared;  // of a tile
  const int heads = shared >= kQueries ? kQueries : shared;       // query heads of a tile
  const int splits = (shared + heads - 1) / heads;
  constexpr bool kCanBeWide = kWideBfloat || kWideHalf;
  const bool is_finer = kWideBfloat && args.type == Type::kHalf;  // than 16-bit products are
  const bool can_be_wide = kCanBeWide && !is_finer && !args.is_exact && dim % kGroup == 0;
  Work work(task.own, dim);
  if (can_be_wide) begin_wide();
  int64_t before =
      0;  // items of the sequences so far; each thread finds the item it took by walking on from its last one
  int64_t sequence = 0;
  auto tiles_of = [&](int64_t s) { return (args.starts[s + 1] - args.starts[s] + tokens - 1) / tokens; };
  int64_t num_items = 0;
  const int64_t per_tile = int64_t(args.num_kv_heads) * splits;
  for (int64_t s = 0; s < args.num_sequences; s++) num_items += tiles_of(s) * per_tile;
  task.share(0, num_items, 1, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; item++) {
      while (item - before >= tiles_of(sequence) * per_tile) before += tiles_of(sequence) * per_tile, sequence++;
      const int64_t local = item - before, begin = args.starts[sequence], num_new = args.starts[sequence + 1] - begin;
      const int kv_head = int(local % args.num_kv_heads), split = int(local / args.num_kv_heads % splits);
      const int64_t token = local / per_tile * tokens,
                    context = args.context_lens ? args.context_lens[sequence] : num_new;
      Tile tile;
      tile.num_rows = 0;
      for (int64_t t = token; t < at_most(token + tokens, num_new); t++)
        for (int h = split * heads; h < at_most((split + 1) * heads, shared); h++) {
          const int head = kv_head * shared + h, r = tile.num_rows++;
          tile.positions[r] = context - num_new + t;
          tile.rows[r] = args.q + (begin + t) * args.q_stride + head * dim;
          tile.out[r] = args.out + ((begin + t) * args.num_heads + head) * dim;
          tile.bias[r] = args.bias ? args.bias + (int64_t(head) * args.bias_size + t) * args.bias_size : nullptr;
          tile.sinks[r] = args.sinks ? args.sinks[head] : -INFINITY;
        }
      int64_t num_keys = context;
      if (args.is_causal || args.window)
        num_keys = at_most(num_keys, tile.positions[tile.num_rows - 1] + (args.is_causal ? 1 : args.window));
      const bool is_wide = can_be_wide && tile.num_rows > kDirectRows;
      with_type(args.type, [&](auto type) {
        constexpr Type T = decltype(type)::value;
        if constexpr (kCanBeWide)
          if (is_wide) return attend_tile<T, true>(args, tile, sequence, kv_head, num_keys, work);
        attend_tile<T, false>(args, tile, sequence, kv_head, num_keys, work);
      });
    }
  });
  if (can_be_wide) end_wide();
}

}  // namespace archerfish::LEVEL
