// Work on single rows: norms, lookups, gates, pooling.
#include "vec.h"

namespace archerfish::LEVEL {

void unpack_row(const Matrix& matrix, int64_t output, float* out);

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
      if (args.total) memcpy(args.total + row * width, out, size_t(width) * 4);
      float mean = 0, variance = sum(squares) / float(width);
      if (args.bias) {
        mean = sum(total) / float(width);
        Floats spread = {};
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) { Floats d = load(out + i) - mean; spread += d * d; }
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
      each(width, x + row * 2 * width, out + row * width,
           [&](Floats v, int64_t i) { return activate(activation, v) * load_some(up + i, width - i); });
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
          return args.mode == Pooling::kMax ? larger(v, other) : v + other;
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
      each(width, x + row * width, out + row * width, [&](Floats v, int64_t) { squares += v * v; return v; });
      float length = std::sqrt(sum(squares));
      length = length > 1e-12f ? length : 1e-12f;
      each(width, out + row * width, out + row * width, [&](Floats v, int64_t) { return v / length; });
    }
  });
}

}  // namespace archerfish::LEVEL
