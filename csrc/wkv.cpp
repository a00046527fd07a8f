// RWKV-7: the shift of tokens, and the recurrence with all that stands around it (archerfish/kernels/recurrent.py).
//
// A head's state lies here with keys down and values across: a vector holds one key of some values, so that nothing is
// added across lanes. The values of a head do not meet before its norm. Numbers of a sequence do not depend on how it
// is cut up.
#include "vec.h"

namespace archerfish::LEVEL {
namespace {

constexpr float kDecayScale = -0.6065306597126334f;  // -exp(-0.5)
constexpr float kLeastLength = 1e-12f;               // that a removal key is divided by
constexpr int kWide = 4 * kGroup / kLanes;           // vectors of sums that are kept while a state is read
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTogether = 4;  // vectors of values that are updated together: with 32 registers
#else
constexpr int kTogether = 2;
#endif

// What the recurrence of a head needs of a token, and what comes of it; after the end of each row there are zeros.
struct Token {
  float *receptance, *decay, *key, *value, *removal, *added, *removed, *out;

  Token(char* memory, int64_t head_dim) {
    float* at = reinterpret_cast<float*>(memory);
    float** rows[] = {&receptance, &decay, &key, &value, &removal, &added, &removed, &out};
    for (float** row : rows) *row = at, at += mix_row(head_dim);
  }
};

template <int N>
INLINE Floats load_part(const float* at, int64_t count) {
  if constexpr (N > 1) return load(at);
  return load_some(at, count);
}

// Several vectors at a time, so that none waits for the steps of another.
template <class F>
INLINE void each_of(int64_t dim, const float* in, float* out, F function) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= dim; j += 4 * kLanes) {
    Floats x[4];
    UNROLL for (int n = 0; n < 4; n++) x[n] = function(load(in + j + n * kLanes));
    UNROLL for (int n = 0; n < 4; n++) store(out + j + n * kLanes, x[n]);
  }
  for (; j < dim; j += kLanes) store(out + j, function(load_some(in + j, dim - j)));
}

INLINE Floats decay_of(Floats x) {  // exp(kDecayScale * sigmoid(x)): a series around the middle of what that can be
  Floats t = kDecayScale * (sigmoid(x) - 0.5f), y = all(1.0f / 5040.0f);
  y = y * t + 1.0f / 720.0f;
  y = y * t + 1.0f / 120.0f;
  y = y * t + 1.0f / 24.0f;
  y = y * t + 1.0f / 6.0f;
  y = y * t + 0.5f;
  y = y * t + 1.0f;
  return (y * t + 1.0f) * 0.738403150f;
}

// Sets the inputs of the recurrence; gives the factor of the bonus. place: of a token's head; first: of the head's
// weights.
INLINE float prepare(const MixHeads& args, int64_t place, int64_t first, Token& token) {
  const int64_t dim = args.head_dim;
  Floats squares = {}, bonus = {};
  each_of(dim, args.decay + place, token.decay, [](Floats x) { return decay_of(x); });
  each_of(dim, args.rate + place, token.added, [](Floats x) { return sigmoid(x); });
  if (args.first_value) each_of(dim, args.value_mix + place, token.out, [](Floats x) { return sigmoid(x); });
  for (int64_t j = 0; j < dim; j += kLanes) {
    auto input = [&](const float* rows) { return load_some(rows + place + j, dim - j); };
    auto weight = [&](const float* weights) { return load_some(weights + first + j, dim - j); };
    Floats r = input(args.receptance), k = input(args.key), v = input(args.value), rate = load(token.added + j);
    if (args.first_value) v += (input(args.first_value) - v) * load(token.out + j);
    Floats z = k * weight(args.removal);
    k *= 1.0f + (rate - 1.0f) * weight(args.replacement);
    squares += z * z, bonus += r * k * weight(args.bonus);
    store(token.receptance + j, r), store(token.key + j, k), store(token.value + j, v);
    store(token.removal + j, z), store(token.added + j, z * rate);
  }
  float length = std::sqrt(sum(squares));
  const float factor = 1.0f / (length > kLeastLength ? length : kLeastLength);
  for (int64_t j = 0; j < dim; j += kLanes) {
    store(token.removal + j, load(token.removal + j) * factor), store(token.added + j, load(token.added + j) * factor);
  }
  return sum(bonus);
}

// S z of N vectors of values.
template <int N>
INLINE void read_state(const float* state, int64_t dim, int64_t i, Token& token) {
  Floats sums[N] = {};
  for (int64_t j = 0; j < dim; j++) {
    const float z = token.removal[j];
    UNROLL for (int n = 0; n < N; n++) sums[n] += load_part<N>(state + j * dim + i + n * kLanes, dim - i) * z;
  }
  UNROLL for (int n = 0; n < N; n++) store(token.removed + i + n * kLanes, sums[n]);
}

// S diag(w) - (S z) (z a)^T + v k^T of N vectors of values, and its product with r.
template <int N>
INLINE void update_state(const float* from, float* to, int64_t dim, int64_t i, Token& token) {
  Floats values[N], removed[N], sums[N] = {};
  UNROLL for (int n = 0; n < N; n++) {
    values[n] = load(token.value + i + n * kLanes), removed[n] = load(token.removed + i + n * kLanes);
  }
  for (int64_t j = 0; j < dim; j++) {
    const float w = token.decay[j], added = token.added[j], k = token.key[j], r = token.receptance[j];
    Floats s[N];
    UNROLL for (int n = 0; n < N; n++) s[n] = load_part<N>(from + j * dim + i + n * kLanes, dim - i);
    UNROLL for (int n = 0; n < N; n++) s[n] = s[n] * w - removed[n] * added;
    UNROLL for (int n = 0; n < N; n++) s[n] += values[n] * k, sums[n] += s[n] * r;
    UNROLL for (int n = 0; n < N; n++) {
      if constexpr (N > 1)
        store(to + j * dim + i + n * kLanes, s[n]);
      else
        store_some(to + j * dim + i, s[n], dim - i);
    }
  }
  UNROLL for (int n = 0; n < N; n++) store(token.out + i + n * kLanes, sums[n]);
}

void advance(const float* from, float* to, int64_t dim, Token& token) {
  int64_t i = 0;
  for (; i + kWide * kLanes <= dim; i += kWide * kLanes) read_state<kWide>(from, dim, i, token);
  for (; i < dim; i += kLanes) read_state<1>(from, dim, i, token);
  for (i = 0; i + kTogether * kLanes <= dim; i += kTogether * kLanes) update_state<kTogether>(from, to, dim, i, token);
  for (; i < dim; i += kLanes) update_state<1>(from, to, dim, i, token);
}

// (norm(y) + bonus * v) * gate.
INLINE void finish(const MixHeads& args, int64_t place, int64_t first, float bonus, const Token& token) {
  const int64_t dim = args.head_dim;
  Floats total = {}, spread = {};
  for (int64_t i = 0; i < dim; i += kLanes) total += load(token.out + i);
  const float mean = sum(total) / float(dim);
  for (int64_t i = 0; i < dim; i += kLanes) {
    store(token.out + i, load(token.out + i) - mean);
    Floats y = load_some(token.out + i, dim - i);
    spread += y * y;
  }
  const float factor = 1.0f / std::sqrt(sum(spread) / float(dim) + args.eps);
  for (int64_t i = 0; i < dim; i += kLanes) {
    auto some = [&](const float* rows, int64_t at) { return load_some(rows + at + i, dim - i); };
    Floats y = load(token.out + i) * factor * some(args.norm, first) + some(args.norm_bias, first);
    store_some(args.out + place + i, (y + bonus * load(token.value + i)) * some(args.gate, place), dim - i);
  }
}

}  // namespace

void mix_heads(const MixHeads& args, const Task& task) {
  const int64_t dim = args.head_dim, heads = args.num_heads, width = heads * dim,
                num_tokens = args.starts[args.num_pieces];
  task.share(0, args.num_sequences * heads, 1, [&](int64_t first, int64_t last) {
    Token token(task.own, dim);
    for (int64_t item = first; item < last; item++) {
      const int64_t sequence = item / heads, head = item % heads;
      for (int64_t piece = args.first_pieces[sequence]; piece < args.first_pieces[sequence + 1]; piece++) {
        float* to = args.states + args.targets[piece] * args.state_stride + head * dim * dim;
        const float* from = args.states + args.sources[piece] * args.state_stride + head * dim * dim;
        for (int64_t row = args.starts[piece]; row < args.starts[piece + 1]; row++, from = to) {
          const int64_t place = row * width + head * dim;
          const float bonus = prepare(args, place, head * dim, token);
          advance(from, to, dim, token);
          finish(args, place, head * dim, bonus, token);
        }
      }
    }
  });
  if (task.thread == 0) memset(args.out + num_tokens * width, 0, size_t((args.num_rows - num_tokens) * width) * 4);
}

void shift(const Shift& args, const Task& task) {
  const int64_t width = args.width;
  const bool has_only_ends = args.starts[args.num_pieces] == args.num_pieces;
  task.share(0, args.num_rows, 4, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const int64_t previous = args.previous[row];
      const float* x = args.x + row * width;
      const float* before =
          previous < 0 ? args.inputs + (-1 - previous) * args.input_stride : args.x + previous * width;
      for (int f = 0; f < args.num_factors; f++) {
        const float* factors = args.factors + f * width;
        each(width, x, args.out[f] + row * width, [&](Floats v, int64_t i) {
          return v + (load_some(before + i, width - i) - v) * load_some(factors + i, width - i);
        });
      }
      if (!has_only_ends || row >= args.num_pieces) continue;
      memcpy(args.inputs + args.targets[row] * args.input_stride, x, size_t(width) * 4);
    }
  });
  if (has_only_ends) return;
  task.wait();  // a piece's target may be where its sequence begins from
  task.share(1, args.num_pieces, 4, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; piece++) {
      const float* x = args.x + (args.starts[piece + 1] - 1) * width;
      memcpy(args.inputs + args.targets[piece] * args.input_stride, x, size_t(width) * 4);
    }
  });
}

}  // namespace archerfish::LEVEL
