// The module `archerfish.kernels.native._native`: matrices, tapes and threads for Python.
#include "module.h"

#include <nanobind/stl/string.h>

#include <chrono>
#include <thread>

#include "levels.h"

namespace archerfish {
namespace {

Level find_level(const std::string& name) {
  auto found = usable_levels();
  if (name.empty()) return {found.back()};
  for (const Kernels* each : found)
    if (name == each->name) return {each};
  throw nb::value_error(("This machine has no level " + name + ".").c_str());
}

void require_packed(Tape& tape, const Matrix& matrix) {
  tape.require([packed = &matrix](const Sizes&, const InputArray*) { check(packed->data, "A matrix is not packed."); });
}

Rows checked_rows(int number) { return checked_enum(number, Rows::kSequences, "There are no such rows."); }

template <class A>
int add_constant(Tape& tape, const A& array, bool is_writable) {
  return tape.constant(start_of<const float>(array), int64_t(array.nbytes()), is_writable);
}

void add_linear(Tape& tape, const OwnedMatrix& matrix, int x, int out, int64_t first, int64_t width, int activation,
                bool is_gated, int residual, float softcap, std::optional<Vector> norm, float eps, int before,
                int total, bool is_deterministic) {
  const Rows rows = tape.rows_of(out);
  const Matrix* packed = &matrix;
  const int64_t num_inputs = matrix.num_inputs, num_outputs = is_gated ? matrix.num_outputs / 2 : matrix.num_outputs;
  check(!is_gated || matrix.num_outputs % (2 * kGroup) == 0, "Gated outputs are no whole groups.");
  checked_size(width, "A product has too few or too many outputs.");
  check(first >= 0 && first <= width - num_outputs, "The outputs of a product do not fit into its rows.");
  const float* factors = floats_of(norm, num_inputs, "A norm has other sizes than the inputs of its product.");
  const Activation function = checked_activation(activation);
  require_packed(tape, matrix);
  tape.add(
      {reads(x, rows, num_inputs), optional(reads(before, rows, num_inputs)), optional(reads(residual, rows, width)),
       optional(writes(total, rows, num_inputs)), writes(out, rows, width)},
      [=](const Frame& frame, const Task& task) {
        Linear args{};
        args.matrix = packed, args.x = frame.at(x), args.num_rows = frame.sizes.of(rows), args.norm = factors;
        args.before = frame.at(before), args.total = frame.at(total), args.eps = eps, args.activation = function;
        args.is_deterministic = is_deterministic, args.is_gated = is_gated, args.softcap = softcap;
        args.residual = residual < 0 ? nullptr : frame.at(residual) + first, args.out = frame.at(out) + first,
        args.out_width = width;
        frame.kernels->linear(args, task);
      },
      [=](const Sizes& sizes) { return linear_shared_bytes(*packed, sizes.of(rows)); }, linear_own_bytes(matrix));
}

// The matrices of all slots of adapters, and the rank of each slot.
using Stack = Typed<float, 3>;
using Ranks = Typed<int64_t, 1>;

Lora lora_of(Tape& tape, const Stack& down, const Stack& up, const Ranks& ranks, const std::vector<int64_t>& sizes,
             bool is_lookup, int64_t num_experts) {
  check(!sizes.empty() && sizes.size() <= size_t(kMostParts), "A product with adapters has too few or too many parts.");
  Lora args{};
  args.num_parts = int64_t(sizes.size());
  std::copy(sizes.begin(), sizes.end(), args.sizes);
  args.down = start_of<const float>(down), args.up = start_of<const float>(up);
  args.ranks = start_of<const int64_t>(ranks);
  args.max_rank = checked_size(int64_t(up.shape(1)), "Adapters have too small or too large a rank.");
  args.num_outputs = checked_size(int64_t(up.shape(2)), "Adapters have too few or too many outputs.");
  args.num_inputs = checked_size(int64_t(down.shape(is_lookup ? 1 : 2)), "Adapters have too few or too many inputs.");
  int64_t num_outputs = 0;
  for (int64_t size : sizes) num_outputs += checked_size(size, "A part has too few or too many outputs.");
  const int64_t num_slots = int64_t(ranks.size()), num_lines = int64_t(down.shape(is_lookup ? 2 : 1));
  check(int64_t(down.shape(0)) == num_slots && int64_t(up.shape(0)) == num_slots && num_slots % num_experts == 0 &&
            num_lines == args.max_rank * args.num_parts && num_outputs == args.num_outputs &&
            (!is_lookup || args.num_parts == 1),
        "The matrices of adapters do not fit together.");
  tape.limit(Input::kAdapters, INT64_MIN, num_slots / num_experts + 1);
  tape.require([=](const Sizes&, const InputArray*) {
    for (int64_t slot = 0; slot < num_slots; slot++)
      check(args.ranks[slot] >= 0 && args.ranks[slot] <= args.max_rank, "An adapter has a rank beyond its memory.");
  });
  return args;
}

// Tokens and kept rows have adapters, sequences have none.
Rows rows_with_adapters(Tape& tape, int value) {
  const Rows rows = tape.rows_of(value);
  check(rows != Rows::kSequences, "Sequences have no adapters.");
  if (rows == Rows::kKept) tape.limit(Input::kKeptRows, 0, INT64_MAX);
  return rows;
}

// The rows of a step, which are `rows`, and their slots.
void fill_lora(Lora& args, const Frame& frame, Rows rows, int inner) {
  args.inner = frame.at(inner), args.num_rows = frame.sizes.of(rows), args.slots = frame.input(Input::kAdapters);
  args.kept = rows == Rows::kKept ? frame.input(Input::kKeptRows) : nullptr;
}

// inner: memory for A x, a row of it for each row. is_lookup: what is looked up are the tokens of the pass. scalars:
// activation, softcap and scale.
void add_lora(Tape& tape, int y, int x, int inner, const Stack& down, const Stack& up, const Ranks& ranks,
              std::vector<int64_t> sizes, bool is_lookup, int activation, float softcap, float scale) {
  Lora args = lora_of(tape, down, up, ranks, sizes, is_lookup, 1);
  args.activation = checked_activation(activation), args.softcap = softcap, args.scale = scale;
  const Rows rows = rows_with_adapters(tape, y);
  std::vector<Use> uses = {writes(y, rows, args.num_outputs)};
  if (is_lookup) {
    tape.limit(Input::kTokenIds, 0, args.num_inputs);
  } else {
    uses.push_back(reads(x, rows, args.num_inputs));
    uses.push_back(writes(inner, rows, args.num_parts * args.max_rank));
  }
  tape.add(uses, [=](const Frame& frame, const Task& task) {
    Lora mine = args;
    fill_lora(mine, frame, rows, is_lookup ? -1 : inner);
    mine.y = frame.at(y), mine.x = is_lookup ? nullptr : frame.at(x);
    mine.ids = is_lookup ? frame.input(Input::kTokenIds) : nullptr;
    frame.kernels->lora(mine, task);
  });
}

void add_norm(Tape& tape, int x, int before, int total, std::optional<Vector> weight, std::optional<Vector> bias,
              float eps, int64_t width, int out) {
  const Rows rows = tape.rows_of(out);
  checked_size(width, "A row has too few or too many numbers.");
  const float* w = floats_of(weight, width, "The weight of a norm has another size than its rows.");
  const float* b = floats_of(bias, width, "The bias of a norm has another size than its rows.");
  tape.add({reads(x, rows, width), optional(reads(before, rows, width)), optional(writes(total, rows, width)),
            writes(out, rows, width)},
           [=](const Frame& frame, const Task& task) {
             frame.kernels->norm(Norm{frame.at(x), frame.at(before), frame.at(total), w, b, eps, frame.sizes.of(rows),
                                      width, frame.at(out)},
                                 task);
           });
}

void add_tables(Tape& tape, std::vector<Array> tables, std::vector<int> types, std::vector<int> inputs,
                std::vector<int64_t> offsets, const OwnedMatrix* packed, float scale, int64_t width, int out) {
  const size_t num_tables = tables.size();
  Tables args{};
  check(num_tables > 0 && num_tables <= sizeof args.ids / sizeof *args.ids, "Too few or too many tables are added up.");
  check(types.size() == num_tables && inputs.size() == num_tables && offsets.size() == num_tables,
        "Each table needs a type, an input and an offset.");
  checked_size(width, "The rows of a table have too few or too many numbers.");
  args.num_tables = int(num_tables), args.packed = packed, args.scale = scale, args.width = width;
  for (size_t t = 0; t < num_tables; t++) {
    args.types[t] = checked_enum(types[t], Type::kBfloat, "There is no such type of a table.");
    args.offsets[t] = offsets[t];
    check(offsets[t] >= -kMostSize && offsets[t] <= kMostSize, "The offset of a table is too large.");
    const Input input = checked_enum(inputs[t], Input::kAdapters, "There is no such input.");
    check(input == Input::kTokenIds || input == Input::kPositions || input == Input::kTypeIds,
          "Tables are read by ids of tokens, positions or types.");
    int64_t num_rows = packed ? packed->num_outputs : 0;
    if (t == 0 && packed) {
      check(packed->num_inputs == width, "The rows of a table have another width.");
      require_packed(tape, *packed);
    } else {
      num_rows = rows_in(tables[t], args.types[t], width * item_bytes(args.types[t]));
      args.memory[t] = tables[t].data();
    }
    tape.limit(input, -offsets[t], num_rows - offsets[t]);
  }
  tape.add({writes(out, Rows::kTokens, width)}, [=](const Frame& frame, const Task& task) {
    Tables mine = args;
    for (size_t t = 0; t < num_tables; t++) mine.ids[t] = frame.input(Input(inputs[t]));
    mine.num_rows = frame.sizes.of(Rows::kTokens), mine.out = frame.at(out);
    frame.kernels->tables(mine, task);
  });
}

struct Heads {
  int queries, keys, dim;

  explicit Heads(const std::vector<int>& heads) {
    check(heads.size() == 3, "Attention takes three numbers of heads.");
    for (int number : heads) check(number > 0 && number <= 1 << 16, "There are too few or too many heads.");
    queries = heads[0], keys = heads[1], dim = heads[2];
    check(dim <= kMostHeadDim, "A head has more dimensions than attention takes.");
    check(queries % keys == 0, "The query heads cannot be divided among the key heads.");
  }
  int64_t query_width() const { return int64_t(queries) * dim; }
  int64_t key_width() const { return int64_t(keys) * dim; }
  int64_t width() const { return query_width() + 2 * key_width(); }
  // How many keys or values an array holds.
  template <class A>
  int64_t rows_of(const A& array, Type type) const {
    return rows_in(array, type, keys * head_stride(type, dim) * item_bytes(type));
  }
};

void add_store_kv(Tape& tape, int qkv, int q, const std::vector<int>& given_heads,
                  std::optional<Typed<float, 2>> cos_sin, int rotary_dim, std::optional<Vector> q_norm,
                  std::optional<Vector> k_norm, float eps, std::optional<WritableArray> keys,
                  std::optional<WritableArray> values, int type, bool is_interleaved) {
  const Heads heads(given_heads);
  KVStore args{};
  args.num_heads = heads.queries, args.num_kv_heads = heads.keys, args.head_dim = heads.dim;
  check(rotary_dim >= 0 && rotary_dim <= heads.dim && rotary_dim % 2 == 0, "A head cannot be rotated so far.");
  args.rotary_dim = rotary_dim, args.eps = eps, args.is_interleaved = is_interleaved;
  if (rotary_dim) {
    check(cos_sin && int64_t(cos_sin->shape(1)) == rotary_dim, "The rotary table has another width.");
    tape.limit(Input::kPositions, 0, int64_t(cos_sin->shape(0)));
  }
  args.cos_sin = start_of<const float>(cos_sin);
  auto norm_of = [&](const std::optional<Vector>& norm, int64_t whole, bool& is_whole) {
    is_whole = norm && int64_t(norm->size()) > heads.dim;
    return floats_of(norm, is_whole ? whole : heads.dim, "The norm of heads has another size.");
  };
  args.q_norm = norm_of(q_norm, heads.query_width(), args.is_q_norm_whole);
  args.k_norm = norm_of(k_norm, heads.key_width(), args.is_k_norm_whole);
  args.type = checked_enum(type, Type::kByte, "There is no such type of keys.");
  check(keys.has_value() == values.has_value(), "Keys are stored together with values.");
  if (keys) {
    const int64_t num_slots = heads.rows_of(*keys, args.type);
    check(heads.rows_of(*values, args.type) == num_slots, "There is other memory for values than for keys.");
    tape.limit(Input::kSlots, INT64_MIN, num_slots);  // negative: the key is not stored
    args.keys = keys->data(), args.values = values->data();
  }
  const int64_t q_width = keys ? heads.query_width() : heads.width();
  tape.add({reads(qkv, Rows::kTokens, heads.width()), writes(q, Rows::kTokens, q_width)},
           [=](const Frame& frame, const Task& task) {
             KVStore mine = args;
             mine.qkv = frame.at(qkv), mine.q = frame.at(q), mine.num_rows = frame.sizes.of(Rows::kTokens);
             mine.positions = frame.input(Input::kPositions), mine.slots = frame.input(Input::kSlots);
             frame.kernels->store_kv(mine, task);
           });
}

// A bias is read for each token of a sequence and each key: it has `table_width` of both.
void require_bias(Tape& tape, int bias, const Heads& heads, bool has_lengths) {
  tape.require([=, &tape](const Sizes& sizes, const InputArray* inputs) {
    const int64_t size = sizes.table_width;
    check(size * size <= kMostBytes && heads.queries * size * size <= tape.constant_bytes(bias) / 4,
          "A bias has other sizes than the step.");
    const int64_t *starts = inputs[int(Input::kStarts)].numbers, *lengths = inputs[int(Input::kContextLens)].numbers;
    for (int64_t s = 0; s < sizes.of(Rows::kSequences); s++)
      check(starts[s + 1] - starts[s] <= size && (!has_lengths || lengths[s] <= size),
            "A sequence is longer than its bias.");
  });
}

void add_attend(Tape& tape, int q, int out, const std::vector<int>& given_heads, float scale, int window, float softcap,
                std::optional<Array> keys, std::optional<Array> values, int type, int bias, bool is_exact,
                bool is_causal, std::optional<Vector> sinks) {
  const Heads heads(given_heads);
  Attend args{};
  args.num_heads = heads.queries, args.num_kv_heads = heads.keys, args.head_dim = heads.dim;
  check(window >= 0, "A window cannot be negative.");
  args.scale = scale, args.window = window, args.softcap = softcap, args.is_exact = is_exact;
  args.is_causal = is_causal;
  args.type = checked_enum(type, Type::kByte, "There is no such type of keys.");
  const int64_t width = heads.query_width(), kv_width = heads.key_width();
  args.sinks = floats_of(sinks, heads.queries, "Each query head has a sink.");
  args.q_stride = keys ? width : heads.width();
  args.key_stride = keys ? args.num_kv_heads * head_stride(args.type, args.head_dim) : args.q_stride;
  tape.limit(Input::kStarts, 0, INT64_MAX);
  check(keys.has_value() == values.has_value(), "Keys come together with values.");
  if (keys) {
    const int64_t num_slots = heads.rows_of(*keys, args.type);
    check(heads.rows_of(*values, args.type) == num_slots, "There is other memory for values than for keys.");
    tape.limit(Input::kContextLens, 0, INT64_MAX), tape.limit(Input::kBlockTables, 0, num_slots);
    args.keys = keys->data(), args.values = values->data();
  } else {
    check(args.type == Type::kFloat, "Keys within a batch are float32.");
  }
  if (bias >= 0) require_bias(tape, bias, heads, keys.has_value());
  tape.add(
      {reads(q, Rows::kTokens, args.q_stride), optional(reads(bias, Rows::kTokens, 0)),
       writes(out, Rows::kTokens, width)},
      [=](const Frame& frame, const Task& task) {
        Attend mine = args;
        mine.q = frame.at(q), mine.out = frame.at(out), mine.num_sequences = frame.sizes.of(Rows::kSequences);
        mine.starts = frame.input(Input::kStarts);
        if (mine.keys) {
          mine.context_lens = frame.input(Input::kContextLens), mine.block_tables = frame.input(Input::kBlockTables);
          mine.table_width = frame.sizes.table_width, mine.block_size = frame.sizes.block_size;
        } else {
          mine.keys = mine.q + width, mine.values = mine.q + width + kv_width;
        }
        mine.bias = frame.at(bias), mine.bias_size = frame.sizes.table_width;
        frame.kernels->attend(mine, task);
      },
      nullptr, attend_own_bytes(args));
}

void add_gated(Tape& tape, int x, int64_t width, int activation, int out) {
  const Rows rows = tape.rows_of(out);
  const Activation function = checked_activation(activation);
  checked_size(width, "A gated row has too few or too many numbers.");
  tape.add({reads(x, rows, 2 * width), writes(out, rows, width)}, [=](const Frame& frame, const Task& task) {
    frame.kernels->gated(frame.at(x), frame.sizes.of(rows), width, function, frame.at(out), task);
  });
}

struct ExpertSizes {
  int64_t num_logits, num_experts, num_chosen;

  explicit ExpertSizes(const std::vector<int64_t>& sizes) {
    check(sizes.size() == 3, "Experts have three sizes.");
    num_logits = checked_size(sizes[0], "There are too few or too many logits.");
    num_experts = sizes[1], num_chosen = sizes[2];
    check(0 < num_chosen && num_chosen <= num_experts && num_experts <= num_logits, "Experts cannot be chosen so.");
  }
};

void add_route(Tape& tape, int logits, const std::vector<int64_t>& given_sizes, bool is_sigmoid, bool is_normed,
               float scale, std::optional<Vector> bias, int ids, int weights, int order) {
  const Rows rows = tape.rows_of(ids);
  const ExpertSizes sizes(given_sizes);
  const float* added = floats_of(bias, sizes.num_experts, "A bias has another size than there are experts.");
  check(ids != weights && ids != order && weights != order, "A routing writes three values.");
  tape.require([=](const Sizes& given, const InputArray*) {
    check(given.of(rows) * sizes.num_chosen <= INT32_MAX, "Too many rows choose experts.");
  });
  tape.add(
      {reads(logits, rows, sizes.num_logits), writes(ids, rows, sizes.num_chosen),
       writes(weights, rows, sizes.num_chosen), writes(order, rows, sizes.num_chosen)},
      [=](const Frame& frame, const Task& task) {
        Route args{frame.at(logits),
                   frame.sizes.of(rows),
                   sizes.num_logits,
                   sizes.num_experts,
                   sizes.num_chosen,
                   is_sigmoid,
                   is_normed,
                   scale,
                   added,
                   frame.ints(ids),
                   frame.at(weights),
                   frame.ints(order)};
        frame.kernels->route(args, task);
      },
      nullptr, expert_run_bytes(sizes.num_experts));
  tape.set_routed(ids, order, sizes.num_experts, sizes.num_chosen);
}

void add_experts(Tape& tape, const OwnedMatrix& matrix, int x, const std::vector<int64_t>& given_sizes, int ids,
                 int order, int activation, int weights, int logits, int shared, bool is_deterministic, int out,
                 std::optional<Stack> down, std::optional<Stack> up, std::optional<Ranks> ranks,
                 std::vector<int64_t> parts, int inner) {
  const bool is_second = weights >= 0, has_lora = down.has_value();
  const Rows rows = has_lora ? rows_with_adapters(tape, out) : tape.rows_of(out);
  const ExpertSizes sizes(given_sizes);
  const Matrix* packed = &matrix;
  const Activation function = checked_activation(activation);
  tape.check_routed(ids, order, sizes.num_experts, sizes.num_chosen);
  check(matrix.num_outputs % (sizes.num_experts * kGroup * (is_second ? 1 : 2)) == 0,
        "The outputs of experts are no whole groups.");
  check(shared < 0 || logits >= 0, "Shared rows need logits.");
  const int64_t own_outputs = matrix.num_outputs / sizes.num_experts, num_inputs = matrix.num_inputs;
  const int64_t num_outputs = is_second ? own_outputs : sizes.num_chosen * own_outputs / 2;
  std::vector<Use> uses = {reads(x, rows, is_second ? sizes.num_chosen * num_inputs : num_inputs),
                           reads(ids, rows, sizes.num_chosen),
                           reads(order, rows, sizes.num_chosen),
                           optional(reads(weights, rows, sizes.num_chosen)),
                           optional(reads(logits, rows, sizes.num_logits)),
                           optional(reads(shared, rows, own_outputs)),
                           writes(out, rows, num_outputs)};
  check(has_lora == up.has_value() && has_lora == ranks.has_value(), "Adapters have two matrices and ranks.");
  Lora lora{};
  if (has_lora) {
    lora = lora_of(tape, *down, *up, *ranks, parts, false, sizes.num_experts);
    check(lora.num_inputs == num_inputs && lora.num_outputs == own_outputs && lora.num_parts == (is_second ? 1 : 2) &&
              lora.sizes[0] * lora.num_parts == own_outputs,
          "The matrices of adapters do not fit the experts.");
    uses.push_back(writes(inner, rows, sizes.num_chosen * lora.num_parts * lora.max_rank));
  }
  require_packed(tape, matrix);
  tape.add(
      uses,
      [=](const Frame& frame, const Task& task) {
        Lora mine = lora;
        Experts args{};
        if (has_lora) fill_lora(mine, frame, rows, inner), args.lora = &mine;
        args.matrix = packed, args.num_rows = frame.sizes.of(rows), args.x = frame.at(x), args.ids = frame.ints(ids),
        args.order = frame.ints(order);
        args.num_logits = sizes.num_logits, args.num_experts = sizes.num_experts, args.num_chosen = sizes.num_chosen,
        args.activation = function;
        args.weights = frame.at(weights), args.logits = frame.at(logits), args.shared = frame.at(shared);
        args.is_deterministic = is_deterministic, args.out = frame.at(out);
        frame.kernels->experts(args, task);
      },
      [=](const Sizes& given) {
        return experts_shared_bytes(*packed, given.of(rows) * sizes.num_chosen, sizes.num_experts);
      },
      experts_own_bytes(matrix, sizes.num_experts));
}

void add_kept_rows(Tape& tape, int x, int64_t row_bytes, int out) {
  tape.limit(Input::kKeptRows, 0, INT64_MAX);
  checked_size(row_bytes, "A row has too few or too many bytes.");
  tape.add({{x, Rows::kTokens, row_bytes}, {out, Rows::kKept, row_bytes, true}},
           [=](const Frame& frame, const Task& task) {
             const int64_t* kept = frame.input(Input::kKeptRows);
             const char* from = reinterpret_cast<const char*>(frame.at(x));
             char* to = reinterpret_cast<char*>(frame.at(out));
             task.share(0, frame.sizes.of(Rows::kKept), 8, [&](int64_t first, int64_t last) {
               for (int64_t row = first; row < last; row++)
                 std::memcpy(to + row * row_bytes, from + kept[row] * row_bytes, size_t(row_bytes));
             });
           });
}

void add_copy(Tape& tape, int x, int out, int64_t row_bytes) {
  const Rows rows = tape.rows_of(out);
  checked_size(row_bytes, "A row has too few or too many bytes.");
  tape.add({{x, rows, row_bytes}, {out, rows, row_bytes, true}}, [=](const Frame& frame, const Task& task) {
    task.share(0, frame.sizes.of(rows), 64, [&](int64_t first, int64_t last) {
      const char* from = reinterpret_cast<const char*>(frame.at(x)) + first * row_bytes;
      std::memcpy(reinterpret_cast<char*>(frame.at(out)) + first * row_bytes, from, size_t((last - first) * row_bytes));
    });
  });
}

void add_pool(Tape& tape, int x, int64_t width, int mode, int out) {
  const Pooling pooling = checked_enum(mode, Pooling::kSqrt, "There is no such pooling.");
  tape.limit(Input::kStarts, 1, INT64_MAX);
  checked_size(width, "A row has too few or too many numbers.");
  tape.add({reads(x, Rows::kTokens, width), writes(out, Rows::kSequences, width)},
           [=](const Frame& frame, const Task& task) {
             Pool args{frame.at(x),  frame.input(Input::kStarts), frame.sizes.of(Rows::kSequences), width, pooling,
                       frame.at(out)};
             frame.kernels->pool(args, task);
           });
}

void add_normalize(Tape& tape, int x, int64_t width, int out) {
  const Rows rows = tape.rows_of(out);
  checked_size(width, "A row has too few or too many numbers.");
  tape.add({reads(x, rows, width), writes(out, rows, width)}, [=](const Frame& frame, const Task& task) {
    frame.kernels->normalize(frame.at(x), frame.sizes.of(rows), width, frame.at(out), task);
  });
}

void run_tape(Tape& tape, Threads& threads, int num_threads, const std::vector<int64_t>& sizes,
              const std::vector<std::optional<Ids>>& inputs, const std::vector<WritableArray>& results) {
  check(sizes.size() == 6, "A step has six sizes.");
  check(inputs.size() <= size_t(Input::kCount), "A step has too many arrays.");
  Sizes found;
  for (int i = 0; i < int(Rows::kCount); i++) found.rows[i] = sizes[size_t(i)];
  found.table_width = sizes[3], found.block_size = sizes[4], found.num_pieces = sizes[5];
  InputArray given[int(Input::kCount)];
  for (size_t i = 0; i < inputs.size(); i++)
    if (inputs[i]) given[i] = {start_of<const int64_t>(*inputs[i]), int64_t(inputs[i]->size())};
  std::vector<char*> places;
  std::vector<int64_t> result_bytes;
  for (auto& result : results) {
    places.push_back(reinterpret_cast<char*>(start_of<float>(result)));
    result_bytes.push_back(int64_t(result.nbytes()));
  }
  tape.check_replay(found, given, result_bytes);
  Released released;
  tape.run(threads, num_threads, found, given, places.data());
}

// Both are guarded by the interpreter lock.
int num_computing = 0;
unsigned long ending_thread = 0;

void await_computing() {
  ending_thread = PyThread_get_thread_ident();
  while (num_computing) {
    nb::gil_scoped_release released;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

Computing::Computing() {
  if (ending_thread && ending_thread != PyThread_get_thread_ident()) {
    PyEval_SaveThread();
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  num_computing++;
}
Computing::~Computing() { num_computing--; }

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // an engine that lives until the process ends is never collected

  m.def(
      "levels",
      [] {
        std::vector<std::string> names;
        for (const Kernels* each : usable_levels()) names.push_back(each->name);
        return names;
      },
      "Levels of instructions that this machine can run, the fastest last.");

  nb::class_<Level>(m, "Level")
      .def(
          "__init__", [](Level* self, const std::string& name) { new (self) Level(find_level(name)); }, "name"_a = "")
      .def_prop_ro("name", [](const Level& level) { return level.kernels->name; });

  nb::class_<Threads>(m, "Threads")
      .def_prop_ro("count", &Threads::count)
      .def(
          "pin",
          [](Threads& threads, const std::vector<int>& cores) {
            for (int core : cores) check(core >= 0 && core < kMostCores, "There is no such core.");
            threads.pin(cores);
          },
          "cores"_a);
  m.def(
      "all_threads",
      [](int num_threads) -> Threads& {
        check(num_threads > 0 && num_threads <= kMostCores, "There are too few or too many threads.");
        return Threads::of(num_threads);
      },
      "num_threads"_a, nb::rv_policy::reference);

  bind_pack(m);

  nb::class_<Tape>(m, "Tape")
      .def("__init__", [](Tape* self, const Level& level) { new (self) Tape(level.kernels); })
      .def_ro("num_replays", &Tape::num_replays)
      .def_ro("num_allocations", &Tape::num_allocations)
      .def("value", [](Tape& tape, int rows, int64_t row_bytes) { return tape.value(checked_rows(rows), row_bytes); })
      .def("result", [](Tape& tape, int rows, int64_t row_bytes) { return tape.result(checked_rows(rows), row_bytes); })
      .def(
          "constant", [](Tape& tape, const WritableArray& array) { return add_constant(tape, array, true); },
          "array"_a.noconvert(), nb::keep_alive<1, 2>())
      .def(
          "constant", [](Tape& tape, const Array& array) { return add_constant(tape, array, false); },
          "array"_a.noconvert(), nb::keep_alive<1, 2>())
      .def("linear", &add_linear, "matrix"_a, "x"_a, "out"_a, "first"_a, "width"_a, "activation"_a = 0,
           "is_gated"_a = false, "residual"_a = -1, "softcap"_a = 0.0f, "norm"_a.noconvert() = nb::none(),
           "eps"_a = 0.0f, "before"_a = -1, "total"_a = -1, "is_deterministic"_a = false, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 11>())
      .def("lora", &add_lora, "y"_a, "x"_a, "inner"_a, "down"_a.noconvert(), "up"_a.noconvert(), "ranks"_a.noconvert(),
           "sizes"_a, "is_lookup"_a, "activation"_a, "softcap"_a, "scale"_a, nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>())
      .def("norm", &add_norm, "x"_a, "before"_a, "total"_a, "weight"_a.noconvert().none(), "bias"_a.noconvert().none(),
           "eps"_a, "width"_a, "out"_a, nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def("tables", &add_tables, "tables"_a.noconvert(), "types"_a, "inputs"_a, "offsets"_a, "packed"_a.none(),
           "scale"_a, "width"_a, "out"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 6>())
      .def("store_kv", &add_store_kv, "qkv"_a, "q"_a, "heads"_a, "cos_sin"_a.noconvert().none(), "rotary_dim"_a,
           "q_norm"_a.noconvert().none(), "k_norm"_a.noconvert().none(), "eps"_a, "keys"_a.noconvert().none(),
           "values"_a.noconvert().none(), "type"_a, "is_interleaved"_a = false, nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 10>(), nb::keep_alive<1, 11>())
      .def("attend", &add_attend, "q"_a, "out"_a, "heads"_a, "scale"_a, "window"_a, "softcap"_a,
           "keys"_a.noconvert().none(), "values"_a.noconvert().none(), "type"_a, "bias"_a, "is_exact"_a, "is_causal"_a,
           "sinks"_a.noconvert() = nb::none(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 14>())
      .def("gated", &add_gated, "x"_a, "width"_a, "activation"_a, "out"_a)
      .def("route", &add_route, "logits"_a, "sizes"_a, "is_sigmoid"_a, "is_normed"_a, "scale"_a,
           "bias"_a.noconvert().none(), "ids"_a, "weights"_a, "order"_a, nb::keep_alive<1, 7>())
      .def("experts", &add_experts, "matrix"_a, "x"_a, "sizes"_a, "ids"_a, "order"_a, "activation"_a, "weights"_a,
           "logits"_a, "shared"_a, "is_deterministic"_a, "out"_a, "down"_a.noconvert() = nb::none(),
           "up"_a.noconvert() = nb::none(), "ranks"_a.noconvert() = nb::none(), "parts"_a = std::vector<int64_t>(),
           "inner"_a = -1, nb::keep_alive<1, 2>(), nb::keep_alive<1, 13>(), nb::keep_alive<1, 14>(),
           nb::keep_alive<1, 15>())
      .def("kept_rows", &add_kept_rows, "x"_a, "row_bytes"_a, "out"_a)
      .def("copy", &add_copy, "x"_a, "out"_a, "row_bytes"_a)
      .def("pool", &add_pool, "x"_a, "width"_a, "mode"_a, "out"_a)
      .def("normalize", &add_normalize, "x"_a, "width"_a, "out"_a)
      .def("run", &run_tape, "threads"_a, "num_threads"_a, "sizes"_a, "inputs"_a, "results"_a.noconvert());

  bind_wkv(m);
  bind_sample(m);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&await_computing));
}

}  // namespace archerfish
