// Rotary embedding and storing of keys and values, and attention: over blocks, or within packed sequences.
#include <type_traits>

#include "vec.h"

namespace archerfish::LEVEL {
namespace {

constexpr int kDirectRows = 8;  // up to which keys and values are not gathered

INLINE void turn_head(float* head, const KVStore& args, const float* norm, const float* cos_sin) {
  const int dim = args.head_dim, half = args.rotary_dim / 2;
  if (norm) {
    Floats squares = {};
    each(dim, head, head, [&](Floats v, int64_t) { squares += v * v; return v; });
    const float factor = 1.0f / std::sqrt(sum(squares) / float(dim) + args.eps);
    each(dim, head, head, [&](Floats v, int64_t i) { return v * factor * load_some(norm + i, dim - i); });
  }
  if (!half) return;
  int i = 0;
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
  each(dim, head, head, [&](Floats v, int64_t) { most = larger(most, magnitude(v)), lost += v * 0.0f; return v; });
  const float scale = largest(most) / 127.0f + sum(lost), inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
  each(dim, head, head, [&](Floats v, int64_t) { v = round_even(v * inverse); return choose(v == v, v, Floats{}); });
  for (int i = 0; i < dim; i++) to[i] = int8_t(head[i]);
  memcpy(to + dim, &scale, sizeof scale);
}

// A tile: up to kQueries rows (a token's query heads that share a KV head, for one or several tokens) against chunks of keys.
struct Tile {
  int num_rows;
  int64_t positions[kQueries];  // of each row's token: the last key that it sees
  const float* rows[kQueries];
  float* out[kQueries];
  const float* bias[kQueries];  // from key 0 on; or null
};

struct Work {  // memory of a thread
  float *queries, *totals, *scores, *keys, *values, *highest, *sums;
  Work(char* memory, int dim) {
    float* at = reinterpret_cast<float*>(memory);
    auto take = [&](int64_t count) { float* found = at; at += (count + 15) / 16 * 16; return found; };
    queries = take(kQueries * dim), totals = take(kQueries * dim), scores = take(kQueries * kChunk);
    keys = take(kChunk * dim), values = take(kChunk * dim), highest = take(kQueries), sums = take(kQueries);
  }
};

// Where the keys of a chunk lie: numbers from the beginning of the memory.
INLINE void find_keys(const Attend& args, int64_t sequence, int kv_head, int64_t first, int64_t count, int64_t* places) {
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
INLINE void scale_scores(const void* memory, int dim, const int64_t* places, int64_t count, int num_rows, float* scores) {
  float scales[kChunk] = {};
  for (int64_t i = 0; i < count; i++) memcpy(scales + i, static_cast<const int8_t*>(memory) + places[i] + dim, sizeof(float));
  for (int r = 0; r < num_rows; r++, scores += kChunk)
    each(kChunk, scores, scores, [&](Floats v, int64_t i) { return v * load(scales + i); });
}

// The same for a tile of few rows, straight from the memory of keys and values. dim: a multiple of the lanes.
template <Type T, int R>
INLINE void score_direct(const Attend& args, const int64_t* places, int64_t count, const Work& work, int row) {
  const int dim = args.head_dim;
  const float* queries = work.queries + row * dim;
  constexpr int kItem = T == Type::kFloat ? 4 : T == Type::kByte ? 1 : 2;
  for (int64_t i = 0; i < count; i++) {
    if (i + 4 < count) __builtin_prefetch(static_cast<const char*>(args.keys) + places[i + 4] * kItem);
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
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int v = 0; v < kVectors; v++) total[r][v] = load(work.totals + (row + r) * dim + d + v * kLanes);
    for (int64_t i = 0; i < count; i++)
      UNROLL for (int v = 0; v < kVectors; v++) {
        Floats value = load_as(T, args.values, places[i] + d + v * kLanes);
        UNROLL for (int r = 0; r < R; r++) total[r][v] = multiply_add(value, work.scores[(row + r) * kChunk + i], total[r][v]);
      }
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int v = 0; v < kVectors; v++) store(work.totals + (row + r) * dim + d + v * kLanes, total[r][v]);
  }
}

template <int R>
INLINE void score_rows(const float* queries, const float* keys, int dim, float* scores) {
  constexpr int kColumns = kParts == 4 ? 16 : 2 * kLanes, kVectors = kColumns / kLanes;
  for (int c = 0; c < kChunk; c += kColumns) {
    Floats total[R][kVectors] = {};
    for (int d = 0; d < dim; d++)
      UNROLL for (int v = 0; v < kVectors; v++) {
        Floats key = load(keys + d * kChunk + c + v * kLanes);
        UNROLL for (int r = 0; r < R; r++) total[r][v] = multiply_add(key, queries[r * dim + d], total[r][v]);
      }
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int v = 0; v < kVectors; v++) store(scores + r * kChunk + c + v * kLanes, total[r][v]);
  }
}

template <int R>
INLINE void add_values(const float* scores, const float* values, int dim, int64_t count, float* totals) {
  constexpr int kVectors = kParts == 4 ? 4 : 2;
  int d = 0;
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) {
    Floats total[R][kVectors];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int v = 0; v < kVectors; v++) total[r][v] = load(totals + r * dim + d + v * kLanes);
    for (int64_t i = 0; i < count; i++)
      UNROLL for (int v = 0; v < kVectors; v++) {
        Floats value = load(values + i * dim + d + v * kLanes);
        UNROLL for (int r = 0; r < R; r++) total[r][v] = multiply_add(value, scores[r * kChunk + i], total[r][v]);
      }
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int v = 0; v < kVectors; v++) store(totals + r * dim + d + v * kLanes, total[r][v]);
  }
  for (; d < dim; d++)
    for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < count; i++) totals[r * dim + d] += values[i * dim + d] * scores[r * kChunk + i];
}

template <class F>
INLINE void by_fours(int num_rows, F call) {
  int r = 0;
  for (; r + 4 <= num_rows; r += 4) call(std::integral_constant<int, 4>{}, r);
  if (num_rows - r == 3) call(std::integral_constant<int, 3>{}, r);
  else if (num_rows - r == 2) call(std::integral_constant<int, 2>{}, r);
  else if (num_rows - r == 1) call(std::integral_constant<int, 1>{}, r);
}

// Scores of a row become weights, relative to the highest so far; what was added up before is scaled down if there is a new one.
INLINE void weigh(const Attend& args, const Tile& tile, int r, int64_t first, int64_t count, const Work& work) {
  float* scores = work.scores + r * kChunk;
  int64_t from = 0, to = count;
  if (args.context_lens) {
    to = at_most(count, tile.positions[r] - first + 1);
    if (args.window) from = at_most(count, at_least(0, tile.positions[r] - args.window + 1 - first));
  }
  Floats most = all(-INFINITY);
  const float* bias = tile.bias[r] ? tile.bias[r] + first : nullptr;
  typedef int32_t IntsAt __attribute__((vector_size(kVectorBytes)));
  IntsAt counting;
  for (int l = 0; l < kLanes; l++) counting[l] = l;
  for (int64_t i = 0; i < kChunk; i += kLanes) {
    Floats s = load(scores + i) * args.scale;
    if (args.softcap != 0) s = args.softcap * hyperbolic_tangent(s / args.softcap);
    if (bias && i < count) s += load_some(bias + i, count - i);
    Ints place = counting + int32_t(i);
    Ints seen = (place >= all_ints(int32_t(from))) & (place < all_ints(int32_t(at_least(to, 0))));
    s = choose(seen, s, all(-INFINITY));
    most = larger(most, s);
    store(scores + i, s);
  }
  float high = largest(most), before = work.highest[r];
  if (!(high > -INFINITY)) {
    memset(scores, 0, sizeof(float) * kChunk);
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
  for (int64_t i = 0; i < kChunk; i += kLanes) {
    Floats p = exponential(load(scores + i) - high);
    total += p;
    store(scores + i, p);
  }
  work.sums[r] += sum(total);
}

template <Type T>
void attend_tile(const Attend& args, const Tile& tile, int64_t sequence, int kv_head, int64_t num_keys, const Work& work) {
  const int dim = args.head_dim;
  for (int r = 0; r < tile.num_rows; r++) {
    memcpy(work.queries + r * dim, tile.rows[r], size_t(dim) * 4);
    memset(work.totals + r * dim, 0, size_t(dim) * 4);
    work.highest[r] = -INFINITY, work.sums[r] = 0;
  }
  const bool is_direct = tile.num_rows <= kDirectRows && dim % kGroup == 0;
  int64_t first = 0, places[kChunk];
  if (args.context_lens && args.window) first = at_least(0, tile.positions[0] - args.window + 1) / kChunk * kChunk;
  for (; first < num_keys; first += kChunk) {
    const int64_t count = at_most(kChunk, num_keys - first);
    find_keys(args, sequence, kv_head, first, count, places);
    if (!is_direct) gather<T>(args, places, count, work);
    by_fours(tile.num_rows, [&](auto rows, int r) {
      constexpr int R = decltype(rows)::value;
      if (is_direct) score_direct<T, R>(args, places, count, work, r);
      else score_rows<R>(work.queries + r * dim, work.keys, dim, work.scores + r * kChunk);
    });
    if (T == Type::kByte) scale_scores(args.keys, dim, places, count, tile.num_rows, work.scores);
    for (int r = 0; r < tile.num_rows; r++) weigh(args, tile, r, first, count, work);
    if (T == Type::kByte) scale_scores(args.values, dim, places, count, tile.num_rows, work.scores);
    by_fours(tile.num_rows, [&](auto rows, int r) {
      constexpr int R = decltype(rows)::value;
      if (is_direct) add_direct<T, R>(args, places, count, work, r);
      else add_values<R>(work.scores + r * kChunk, work.values, dim, count, work.totals + r * dim);
    });
  }
  for (int r = 0; r < tile.num_rows; r++) {
    const float inverse = 1.0f / work.sums[r];
    each(dim, work.totals + r * dim, tile.out[r], [&](Floats v, int64_t) { return v * inverse; });
  }
}

}  // namespace

void store_kv(const KVStore& args, const Task& task) {
  const int dim = args.head_dim;
  const int64_t queries = int64_t(args.num_heads) * dim, keys = int64_t(args.num_kv_heads) * dim, width = queries + 2 * keys;
  task.share(0, args.num_rows, 4, [&](int64_t first, int64_t last) {
    float head[kMostHeadDim];
    for (int64_t row = first; row < last; row++) {
      const float* from = args.qkv + row * width;
      const float* cos_sin = args.rotary_dim ? args.cos_sin + args.positions[row] * args.rotary_dim : nullptr;
      memcpy(args.q + row * queries, from, size_t(queries) * 4);
      for (int h = 0; h < args.num_heads; h++) turn_head(args.q + row * queries + h * dim, args, args.q_norm, cos_sin);
      if (args.slots[row] < 0) continue;
      for (int h = 0; h < args.num_kv_heads; h++) {
        memcpy(head, from + queries + h * dim, size_t(dim) * 4);
        turn_head(head, args, args.k_norm, cos_sin);
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
  Work work(task.own, dim);
  int64_t before = 0;  // items of the sequences so far; each thread finds the item it took by walking on from its last one
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
      const int64_t token = local / per_tile * tokens, context = args.context_lens ? args.context_lens[sequence] : num_new;
      Tile tile;
      tile.num_rows = 0;
      for (int64_t t = token; t < at_most(token + tokens, num_new); t++)
        for (int h = split * heads; h < at_most((split + 1) * heads, shared); h++) {
          const int head = kv_head * shared + h, r = tile.num_rows++;
          tile.positions[r] = context - num_new + t;
          tile.rows[r] = args.q + (begin + t) * args.q_stride + head * dim;
          tile.out[r] = args.out + ((begin + t) * args.num_heads + head) * dim;
          tile.bias[r] = args.bias ? args.bias + (int64_t(head) * args.bias_size + t) * args.bias_size : nullptr;
        }
      const int64_t num_keys = args.context_lens ? tile.positions[tile.num_rows - 1] + 1 : num_new;
      if (args.type == Type::kHalf) attend_tile<Type::kHalf>(args, tile, sequence, kv_head, num_keys, work);
      else if (args.type == Type::kBfloat) attend_tile<Type::kBfloat>(args, tile, sequence, kv_head, num_keys, work);
      else if (args.type == Type::kByte) attend_tile<Type::kByte>(args, tile, sequence, kv_head, num_keys, work);
      else attend_tile<Type::kFloat>(args, tile, sequence, kv_head, num_keys, work);
    }
  });
}

}  // namespace archerfish::LEVEL
