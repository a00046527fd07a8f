// Mixtures of experts: rows choose some of many matrices, and only these are read. Uses the products of linear.cpp.

namespace archerfish::LEVEL {
namespace {

struct Run {  // the rows of one expert, which follow one another in `Route::order`
  int64_t expert, first, count;
  int64_t place;  // where its prepared rows begin: a multiple of kTile
};

// The pieces of work of one product.
struct ExpertProduct {
  const Experts& args;
  const Prepared& x;
  Matrix one;  // an expert's, as far as they have it in common
  float* sums;
  char* panels;

  // Calls finish(matrix, factors, row of the run, number of rows) behind each product of rows of a run with two groups.
  template <class F>
  void multiply(const Run& run, int64_t first, int64_t second, F finish) const {
    const int64_t num_groups = one.num_outputs / kGroup, bytes_of_group = group_bytes(one.format, one.num_inputs);
    Matrix matrix = one;
    if (one.bias) matrix.bias = one.bias + run.expert * one.num_outputs;
    const auto group_at = [&](int64_t group) {
      return group < num_groups ? one.data + (run.expert * num_groups + group) * bytes_of_group : nullptr;
    };
    Pair pair{{group_at(first), group_at(second)}, {}, {sums, sums + kRowsAtOnce * kGroup}};
    with_format(one.format, [&](auto format) {
      constexpr Format kFormat = decltype(format)::value;
      for (int i = 0; i < 2 && pair.groups[i]; i++)
        pair.panels[i] =
            open_group<kFormat>(matrix, pair.groups[i], x, run.count, panels + i * linear_panel_bytes(matrix));
      for (int64_t row = 0; row < run.count; row += kRowsAtOnce) {
        const int64_t count = at_most(kRowsAtOnce, run.count - row);
        multiply_pair<kFormat>(matrix, pair, x, run.place + row, count);
        finish(matrix, x.factors ? x.factors + run.place + row : nullptr, row, count);
      }
    });
  }

  // Where an adapter of row i in the order of runs has its matrices for the expert; negative: it has none.
  int64_t slot_of_place(int64_t i, int64_t expert) const {
    const int64_t slot = slot_of(*args.lora, args.order[i] / args.num_chosen), place = slot * args.num_experts + expert;
    return slot >= 0 && args.lora->ranks[place] ? place : -1;
  }

  float* inner_of(int64_t i, int64_t part) const {
    return args.lora->inner + (i * args.lora->num_parts + part) * args.lora->max_rank;
  }

  // What adapters add to rows of a group, which begins at an output of a part.
  void add_adapters(const Run& run, int64_t row, int64_t count, int64_t part, int64_t output, float* tile) const {
    const Lora& lora = *args.lora;
    for (int64_t i = run.first + row; i < run.first + row + count; i++, tile += kGroup) {
      const int64_t slot = slot_of_place(i, run.expert);
      if (slot >= 0)
        add_outputs(lora, slot, lora.ranks[slot], inner_of(i, part), part * lora.sizes[0] + output, kGroup, tile);
    }
  }

  // Both halves of the outputs of `place`, gated: rows of out in the order of runs.
  void multiply_gated(const Run& run, int64_t place) const {
    multiply(run, place, place + one.num_outputs / (2 * kGroup),
             [&](const Matrix& matrix, const float* factors, int64_t row, int64_t count) {
               Linear end{};
               Matrix bare = matrix;
               if (args.lora) {
                 for (int64_t part = 0; part < 2; part++) {
                   float* tile = sums + part * kRowsAtOnce * kGroup;
                   add_bias(matrix, factors, count, part * one.num_outputs / 2 + place * kGroup, tile);
                   add_adapters(run, row, count, part, place * kGroup, tile);
                 }
                 bare.bias = nullptr, factors = nullptr;
               }
               end.matrix = &bare, end.activation = args.activation, end.out = args.out,
               end.out_width = one.num_outputs / 2;
               finish_tile(end, factors, run.first + row, count, place, sums, sums + kRowsAtOnce * kGroup);
             });
  }

  // Adds what two groups give, times the weights of the rows.
  void add_weighted(const Run& run, int64_t place) const {
    const int64_t width = one.num_outputs;
    multiply(run, 2 * place, 2 * place + 1,
             [&](const Matrix& matrix, const float* factors, int64_t row, int64_t count) {
               for (int64_t group = 2 * place; group < at_most(2 * place + 2, width / kGroup); group++) {
                 float* tile = sums + group % 2 * kRowsAtOnce * kGroup;
                 add_bias(matrix, factors, count, group * kGroup, tile);
                 if (args.lora) add_adapters(run, row, count, 0, group * kGroup, tile);
                 for (int64_t r = 0; r < count; r++, tile += kGroup) {
                   const int64_t chosen = args.order[run.first + row + r];
                   float* out = args.out + chosen / args.num_chosen * width + group * kGroup;
                   for (int64_t lane = 0; lane < kGroup; lane += kLanes)
                     store(out + lane, multiply_add(load(tile + lane), args.weights[chosen], load(out + lane)));
                 }
               }
             });
  }

  // Outputs before anything is added: zeros, or the shared rows, times their gates where logits have one.
  void begin_outputs(int64_t first, int64_t last) const {
    const int64_t width = one.num_outputs, size = last - first;
    for (int64_t row = 0; row < args.num_rows; row++) {
      float* out = args.out + row * width + first;
      if (!args.shared) {
        memset(out, 0, size_t(size) * 4);
        continue;
      }
      const float* logits = args.logits + row * args.num_logits;
      const float gate =
          args.num_logits > args.num_experts ? 1.0f / (1.0f + std::exp(-logits[args.num_experts])) : 1.0f;
      each(size, args.shared + row * width + first, out, [&](Floats v, int64_t) { return v * gate; });
    }
  }
};

void choose_experts(const Route& args, int64_t row, float* scores) {
  const float* logits = args.logits + row * args.num_logits;
  float most = logits[0], total = 0;
  for (int64_t e = 1; e < args.num_experts; e++) most = std::max(most, logits[e]);
  for (int64_t e = 0; e < args.num_experts; e++) {
    scores[e] = args.is_sigmoid ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - most);
    total += scores[e];
  }
  float* compared = scores + args.num_experts;
  for (int64_t e = 0; e < args.num_experts; e++) compared[e] = args.is_sigmoid ? scores[e] : scores[e] /= total;
  if (args.bias)
    for (int64_t e = 0; e < args.num_experts; e++) compared[e] += args.bias[e];
  int32_t* ids = args.ids + row * args.num_chosen;
  float* weights = args.weights + row * args.num_chosen;
  float sum_of_chosen = 0;
  for (int64_t k = 0; k < args.num_chosen; k++) {
    int64_t best = -1;
    for (int64_t e = 0; e < args.num_experts; e++)
      if (compared[e] > -INFINITY && (best < 0 || compared[e] > compared[best])) best = e;
    if (best < 0) best = k;  // logits that are not numbers
    ids[k] = int32_t(best), weights[k] = scores[best], sum_of_chosen += scores[best], compared[best] = -INFINITY;
  }
  const float factor = args.is_normed ? args.scale / sum_of_chosen : args.scale;
  for (int64_t k = 0; k < args.num_chosen; k++) weights[k] *= factor;
}

}  // namespace

void route(const Route& args, const Task& task) {
  task.share(0, args.num_rows, 4, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) choose_experts(args, row, reinterpret_cast<float*>(task.own));
  });
  task.wait();
  if (task.thread != 0) return;
  int64_t* ends =
      reinterpret_cast<int64_t*>(task.own);  // of each expert's places in `order`, then where the next one goes
  const int64_t num_places = args.num_rows * args.num_chosen;
  memset(ends, 0, size_t(args.num_experts + 1) * 8);
  for (int64_t i = 0; i < num_places; i++) ends[args.ids[i] + 1]++;
  for (int64_t e = 0; e < args.num_experts; e++) ends[e + 1] += ends[e];
  for (int64_t i = 0; i < num_places; i++) args.order[ends[args.ids[i]]++] = int32_t(i);
}

void experts(const Experts& args, const Task& task) {
  Matrix one = *args.matrix;
  one.num_outputs /= args.num_experts;
  const int64_t num_places = args.num_rows * args.num_chosen, width = one.num_inputs;
  if (!num_places) return;
  Run* runs = reinterpret_cast<Run*>(task.own);
  int64_t num_runs = 0, num_prepared = 0;
  for (int64_t i = 0; i < num_places; i++) {
    const int64_t expert = args.ids[args.order[i]];
    if (!num_runs || runs[num_runs - 1].expert != expert) {
      num_prepared = (num_prepared + kTile - 1) / kTile * kTile;
      runs[num_runs++] = {expert, i, 0, num_prepared};
    }
    runs[num_runs - 1].count++, num_prepared++;
  }
  float* sums = reinterpret_cast<float*>(task.own + expert_run_bytes(args.num_experts));
  Linear usual{};  // an expert's product, if all had as many rows
  usual.matrix = &one, usual.num_rows = (num_places + num_runs - 1) / num_runs,
  usual.is_deterministic = args.is_deterministic;
  const Prepared x = lay_rows(one, is_wide(usual), num_prepared, task.shared);
  const ExpertProduct product{args, x, one, sums, reinterpret_cast<char*>(sums + 2 * kRowsAtOnce * kGroup)};
  task.share(0, num_places, 4, [&](int64_t first, int64_t last) {
    const Run* run = runs;
    for (int64_t i = first; i < last; i++) {
      while (run->first + run->count <= i) run++;
      const float* row = args.x + (args.weights ? i : args.order[i] / args.num_chosen) * width;
      put_row(x, width, run->place + i - run->first, row);
      const int64_t slot = args.lora ? product.slot_of_place(i, run->expert) : -1;
      if (slot >= 0) shrink(*args.lora, row, slot, args.lora->ranks[slot], product.inner_of(i, 0));
    }
  });
  task.wait();
  if (x.wide || x.encoded) begin_wide();
  const int64_t num_pairs = (one.num_outputs / kGroup + 1) / 2;
  if (!args.weights) {
    const int64_t num_pieces = num_runs * num_pairs;
    task.share(1, num_pieces, at_least(1, num_pieces / (16 * task.num_threads)), [&](int64_t first, int64_t last) {
      for (int64_t piece = first; piece < last; piece++)
        product.multiply_gated(runs[piece / num_pairs], piece % num_pairs);
    });
  } else {  // a thread adds up some outputs of all rows
    const int64_t size = at_least(1, num_pairs / (4 * task.num_threads));
    task.share(1, (num_pairs + size - 1) / size, 1, [&](int64_t first, int64_t last) {
      for (int64_t piece = first; piece < last; piece++) {
        const int64_t begin = piece * size, end = at_most(begin + size, num_pairs);
        product.begin_outputs(2 * kGroup * begin, at_most(2 * kGroup * end, one.num_outputs));
        for (int64_t r = 0; r < num_runs; r++)
          for (int64_t place = begin; place < end; place++) product.add_weighted(runs[r], place);
      }
    });
  }
  if (x.wide || x.encoded) end_wide();
}

}  // namespace archerfish::LEVEL
