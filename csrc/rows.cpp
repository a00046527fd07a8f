// Work on single rows: norms, lookups, gates, pooling, unpacking.
#include "blocks.h"

namespace archerfish::LEVEL {

namespace {

template <Format F>
INLINE void unpack_word(const Packed<F>& source, int j, int lane, float* to) {
  alignas(64) uint8_t codes[kWordBytes];
  alignas(64) float scales[kGroup], mins[kGroup] = {};
  for (int p = 0; p < kParts; p++) {
    Words w = source.word(j, p);
    memcpy(codes + p * kVectorBytes, &w, sizeof w);
    store(scales + p * kLanes, source.scale(j / 4 * (Layout<F>::kNumScales - 1), p));
    if constexpr (Layout<F>::kHasMin) store(mins + p * kLanes, source.min(p));
  }
  for (int b = 0; b < 4; b++) {
    int code = F == Format::kQ8_0 ? int8_t(codes[4 * lane + b]) : codes[4 * lane + b] - Layout<F>::kOffset;
    to[4 * j + b] = scales[lane] * float(code) + mins[lane];
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
    } else if constexpr (is_plain(F)) {
      for (int64_t k = 0; k < matrix.num_inputs; k++) {
        int64_t place = F == Format::kBfloat ? (k / 2 * kGroup + lane) * 2 + k % 2 : k * kGroup + lane;
        out[k] = read_as(Type(int(F)), group, place);
      }
    } else {
      Packed<F> source{group};
      for (int64_t b = 0; b < matrix.num_inputs / kBlock; b++) {
        source.open(b);
        UNROLL for (int j = 0; j < 8; j++) unpack_word(source, j, lane, out + b * kBlock);
      }
    }
  });
}

void unpack(const Matrix& matrix, float* out) {
  for (int64_t row = 0; row < matrix.num_outputs; row++) unpack_row(matrix, row, out + row * matrix.num_inputs);
}

void norm(const Norm& args, const Task& task) {
  const int64_t width = args.width;
  task.share(0, args.num_rows, 4, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const float* before = args.before ? args.before + row * width : nullptr;
      float* out = args.out + row * width;
      Floats total = {}, squares = {};
      each(width, args.x + row * width, out, [&](Floats v, int64_t i) {
        if (before) v += load_some(before + i, width - i);
        total += v, squares += v * v;
        return v;
      });
      if (!args.weight) continue;
      if (args.total) memcpy(args.total + row * width, out, size_t(width) * 4);
      float mean = 0, variance = sum(squares) / float(width);
      if (args.bias) {
        mean = sum(total) / float(width);
        Floats spread = {};
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) {
          Floats d = load(out + i) - mean;
          spread += d * d;
        }
        float rest = 0;
        for (; i < width; i++) rest += (out[i] - mean) * (out[i] - mean);
        variance = (sum(spread) + rest) / float(width);
      }
      const float factor = 1.0f / std::sqrt(variance + args.eps);
      each(width, out, out, [&](Floats v, int64_t i) {
        Floats y = (v - mean) * factor * load_some(args.weight + i, width - i);
        return args.bias ? y + load_some(args.bias + i, width - i) : y;
      });
    }
  });
}

void tables(const Tables& args, const Task& task) {
  const int64_t width = args.width;
  task.share(0, args.num_rows, 8, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      float* out = args.out + row * width;
      for (int t = 0; t < args.num_tables; t++) {
        const int64_t id = args.ids[t][row] + args.offsets[t];
        if (t == 0 && args.packed) {
          unpack_row(*args.packed, id, out);
          if (args.scale != 1.0f) each(width, out, out, [&](Floats v, int64_t) { return v * args.scale; });
          continue;
        }
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) {
          Floats v = load_as(args.types[t], args.memory[t], id * width + i) * args.scale;
          store(out + i, t ? load(out + i) + v : v);
        }
        for (; i < width; i++) {
          float v = read_as(args.types[t], args.memory[t], id * width + i) * args.scale;
          out[i] = t ? out[i] + v : v;
        }
      }
    }
  });
}

void gated(const float* x, int64_t num_rows, int64_t width, Activation activation, float* out, const Task& task) {
  task.share(0, num_rows, 4, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const float* up = x + row * 2 * width + width;
      each(width, x + row * 2 * width, out + row * width, [&](Floats v, int64_t i) {
        return activate(activation, v) * gated_factor(activation, load_some(up + i, width - i));
      });
    }
  });
}

void pool(const Pool& args, const Task& task) {
  const int64_t width = args.width;
  task.share(0, args.num_sequences, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; s++) {
      const int64_t begin = args.starts[s], end = args.starts[s + 1];
      float* out = args.out + s * width;
      const bool is_one = args.mode == Pooling::kFirst || args.mode == Pooling::kLast;
      memcpy(out, args.x + (args.mode == Pooling::kLast ? end - 1 : begin) * width, size_t(width) * 4);
      for (int64_t row = begin + 1; row < end && !is_one; row++) {
        const float* x = args.x + row * width;
        each(width, out, out, [&](Floats v, int64_t i) {
          Floats other = load_some(x + i, width - i);
          return args.mode == Pooling::kMax ? larger_or_nan(v, other) : v + other;
        });
      }
      const float count = float(end - begin);
      if (args.mode == Pooling::kMean) each(width, out, out, [&](Floats v, int64_t) { return v / count; });
      if (args.mode == Pooling::kSqrt) each(width, out, out, [&](Floats v, int64_t) { return v / std::sqrt(count); });
    }
  });
}

void normalize(const float* x, int64_t num_rows, int64_t width, float* out, const Task& task) {
  task.share(0, num_rows, 4, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      Floats squares = {};
      each(width, x + row * width, out + row * width, [&](Floats v, int64_t) {
        squares += v * v;
        return v;
      });
      float length = std::sqrt(sum(squares));
      length = length > 1e-12f ? length : 1e-12f;
      each(width, out + row * width, out + row * width, [&](Floats v, int64_t) { return v / length; });
    }
  });
}

}  // namespace archerfish::LEVEL
