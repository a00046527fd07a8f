// What adapters add to a product: y + B (A x), with the matrices of each row's slot. Rows without an adapter cost a
// look.
#include "vec.h"

namespace archerfish::LEVEL {

namespace {

constexpr int64_t kColumns = 256;  // of a piece of work

int64_t slot_of(const Lora& args, int64_t row) { return args.slots[args.kept ? args.kept[row] : row] - 1; }

// A x: every number of it is a product of two rows, of which four are made at a time.
void shrink(const Lora& args, const float* x, int64_t slot, int64_t rank, float* inner_row) {
  const int64_t width = args.num_inputs;
  const float* down = args.down + slot * args.num_parts * args.max_rank * width;
  for (int64_t part = 0; part < args.num_parts; part++) {
    const float* lines = down + part * args.max_rank * width;
    float* inner = inner_row + part * args.max_rank;
    for (int64_t j = 0; j < rank; j += 4) {
      const int64_t count = at_most(4, rank - j);
      Floats total[4] = {};
      int64_t i = 0;
      for (; i + kLanes <= width; i += kLanes) {
        const Floats v = load(x + i);
        UNROLL for (int64_t n = 0; n < 4; n++) total[n] =
            multiply_add(v, load(lines + (j + (n < count ? n : 0)) * width + i), total[n]);
      }
      for (int64_t n = 0; n < count; n++) {
        float rest = sum(total[n]);
        for (int64_t k = i; k < width; k++) rest += x[k] * lines[(j + n) * width + k];
        inner[j + n] = rest;
      }
    }
  }
}

// B (A x) is added to y, which has `count` outputs from one on.
void add_outputs(const Lora& args, int64_t slot, int64_t rank, const float* inner, int64_t output, int64_t count,
                 float* y) {
  const float* up = args.up + slot * args.max_rank * args.num_outputs + output;
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats total = {};
    for (int64_t j = 0; j < rank; j++)
      total = multiply_add(load_some(up + j * args.num_outputs + i, count - i), all(inner[j]), total);
    store_some(y + i, load_some(y + i, count - i) + total * args.scale, count - i);
  }
}

// It is added to some columns of a row, and what comes after the product is done.
void expand(const Lora& args, int64_t row, int64_t first, int64_t last) {
  const int64_t slot = slot_of(args, row), rank = slot < 0 ? 0 : args.ranks[slot];
  float* y = args.y + row * args.num_outputs;
  if (rank) {
    int64_t begin = 0;
    for (int64_t part = 0; part < args.num_parts; part++) {
      const int64_t end = begin + args.sizes[part], from = begin > first ? begin : first, to = at_most(end, last);
      const float* inner =
          args.ids ? args.down + (slot * args.num_inputs + args.ids[args.kept ? args.kept[row] : row]) * args.max_rank
                   : args.inner + (row * args.num_parts + part) * args.max_rank;
      if (from < to) add_outputs(args, slot, rank, inner, from, to - from, y + from);
      begin = end;
    }
  }
  if (args.activation == Activation::kNone && args.softcap == 0) return;
  each(last - first, y + first, y + first, [&](Floats v, int64_t) {
    v = activate(args.activation, v);
    return args.softcap != 0 ? args.softcap * hyperbolic_tangent(v / args.softcap) : v;
  });
}

}  // namespace

void lora(const Lora& args, const Task& task) {
  if (!args.ids) {
    task.share(0, args.num_rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        const int64_t slot = slot_of(args, row);
        float* inner = args.inner + row * args.num_parts * args.max_rank;
        if (slot >= 0 && args.ranks[slot]) shrink(args, args.x + row * args.num_inputs, slot, args.ranks[slot], inner);
      }
    });
    task.wait();
  }
  const int64_t chunks = (args.num_outputs + kColumns - 1) / kColumns;
  task.share(1, args.num_rows * chunks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; piece++) {
      const int64_t first = piece % chunks * kColumns;
      expand(args, piece / chunks, first, at_most(first + kColumns, args.num_outputs));
    }
  });
}

}  // namespace archerfish::LEVEL
