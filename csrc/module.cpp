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

void add_linear(Tape& tape, const OwnedMatrix& matrix, int x, int out, int64_t first, int64_t width, int activation,
                bool is_gated, int residual, float softcap, std::optional<Array> norm, float eps, int before, int total,
                bool is_deterministic) {
  Rows rows = tape.rows_of(out);
  const float* factors = floats(norm);
  const Matrix* packed = &matrix;
  tape.add(
      {x, before, residual, total, out},
      [=](const Frame& frame, const Task& task) {
        Linear args{};
        args.matrix = packed, args.x = frame.at(x), args.num_rows = frame.sizes.of(rows), args.norm = factors;
        args.before = frame.at(before), args.total = frame.at(total), args.eps = eps,
        args.activation = Activation(activation);
        args.is_deterministic = is_deterministic, args.is_gated = is_gated, args.softcap = softcap;
        args.residual = residual < 0 ? nullptr : frame.at(residual) + first, args.out = frame.at(out) + first,
        args.out_width = width;
        frame.kernels->linear(args, task);
      },
      [=](const Sizes& sizes) { return linear_shared_bytes(*packed, sizes.of(rows)); }, linear_own_bytes(matrix));
}

Lora lora_of(Array down, Array up, Array ranks, const std::vector<int64_t>& sizes, bool is_lookup) {
  if (sizes.size() > size_t(kMostParts)) throw nb::value_error("A product with adapters has too many parts.");
  Lora args{};
  args.down = static_cast<const float*>(down.data()), args.up = static_cast<const float*>(up.data());
  args.ranks = static_cast<const int64_t*>(ranks.data()), args.max_rank = int64_t(up.shape(1)),
  args.num_outputs = int64_t(up.shape(2));
  args.num_inputs = int64_t(down.shape(is_lookup ? 1 : 2)), args.num_parts = int64_t(sizes.size());
  std::copy(sizes.begin(), sizes.end(), args.sizes);
  return args;
}

// The rows of a step, which are `rows`, and their slots.
void fill_lora(Lora& args, const Frame& frame, Rows rows, int inner) {
  args.inner = frame.at(inner), args.num_rows = frame.sizes.of(rows), args.slots = frame.input(Input::kAdapters);
  args.kept = rows == Rows::kKept ? frame.input(Input::kKeptRows) : nullptr;
}

// inner: memory for A x, a row of it for each row. is_lookup: what is looked up are the tokens of the pass. scalars:
// activation, softcap and scale.
void add_lora(Tape& tape, int y, int x, int inner, Array down, Array up, Array ranks, std::vector<int64_t> sizes,
              bool is_lookup, int activation, float softcap, float scale) {
  Lora args = lora_of(down, up, ranks, sizes, is_lookup);
  args.activation = Activation(activation), args.softcap = softcap, args.scale = scale;
  Rows rows = tape.rows_of(y);
  tape.add({y, x, inner}, [=](const Frame& frame, const Task& task) {
    Lora mine = args;
    fill_lora(mine, frame, rows, inner);
    mine.y = frame.at(y), mine.x = frame.at(x), mine.ids = is_lookup ? frame.input(Input::kTokenIds) : nullptr;
    frame.kernels->lora(mine, task);
  });
}

void add_norm(Tape& tape, int x, int before, int total, std::optional<Array> weight, std::optional<Array> bias,
              float eps, int64_t width, int out) {
  Rows rows = tape.rows_of(out);
  const float *w = floats(weight), *b = floats(bias);
  tape.add({x, before, total, out}, [=](const Frame& frame, const Task& task) {
    frame.kernels->norm(
        Norm{frame.at(x), frame.at(before), frame.at(total), w, b, eps, frame.sizes.of(rows), width, frame.at(out)},
        task);
  });
}

void add_tables(Tape& tape, std::vector<Array> tables, std::vector<int> types, std::vector<int> inputs,
                std::vector<int64_t> offsets, const OwnedMatrix* packed, float scale, int64_t width, int out) {
  Rows rows = tape.rows_of(out);
  Tables args{};
  args.num_tables = int(inputs.size()), args.packed = packed, args.scale = scale, args.width = width;
  for (size_t t = 0; t < inputs.size(); t++) {
    if (t < tables.size()) args.memory[t] = tables[t].data();
    args.types[t] = Type(types[t]), args.offsets[t] = offsets[t];
  }
  tape.add({out}, [=](const Frame& frame, const Task& task) {
    Tables mine = args;
    for (size_t t = 0; t < inputs.size(); t++) mine.ids[t] = frame.input(Input(inputs[t]));
    mine.num_rows = frame.sizes.of(rows), mine.out = frame.at(out);
    frame.kernels->tables(mine, task);
  });
}

void check_head(int head_dim) {
  if (head_dim > kMostHeadDim) throw nb::value_error("A head has more dimensions than attention takes.");
}

void add_store_kv(Tape& tape, int qkv, int q, std::vector<int> heads, std::optional<Array> cos_sin, int rotary_dim,
                  std::optional<Array> q_norm, std::optional<Array> k_norm, float eps,
                  std::optional<WritableArray> keys, std::optional<WritableArray> values, int type,
                  bool is_interleaved) {
  check_head(heads[2]);
  KVStore args{};
  args.num_heads = heads[0], args.num_kv_heads = heads[1], args.head_dim = heads[2], args.rotary_dim = rotary_dim;
  args.cos_sin = floats(cos_sin), args.q_norm = floats(q_norm), args.k_norm = floats(k_norm), args.eps = eps;
  auto is_whole = [&](const std::optional<Array>& norm) { return norm && int(norm->shape(0)) > args.head_dim; };
  args.is_q_norm_whole = is_whole(q_norm), args.is_k_norm_whole = is_whole(k_norm),
  args.is_interleaved = is_interleaved;
  args.type = Type(type), args.keys = keys ? keys->data() : nullptr, args.values = values ? values->data() : nullptr;
  tape.add({qkv, q}, [=](const Frame& frame, const Task& task) {
    KVStore mine = args;
    mine.qkv = frame.at(qkv), mine.q = frame.at(q), mine.num_rows = frame.sizes.of(Rows::kTokens);
    mine.positions = frame.input(Input::kPositions), mine.slots = frame.input(Input::kSlots);
    frame.kernels->store_kv(mine, task);
  });
}

void add_attend(Tape& tape, int q, int out, std::vector<int> heads, float scale, int window, float softcap,
                std::optional<Array> keys, std::optional<Array> values, int type, int bias, bool is_exact,
                bool is_causal, std::optional<Array> sinks) {
  check_head(heads[2]);
  Attend args{};
  args.num_heads = heads[0], args.num_kv_heads = heads[1], args.head_dim = heads[2];
  args.scale = scale, args.window = window, args.softcap = softcap, args.type = Type(type), args.is_exact = is_exact,
  args.is_causal = is_causal;
  const int64_t width = int64_t(args.num_heads) * args.head_dim, kv_width = int64_t(args.num_kv_heads) * args.head_dim;
  args.keys = address(keys), args.values = address(values), args.sinks = floats(sinks);
  args.q_stride = keys ? width : width + 2 * kv_width;
  args.key_stride = keys ? args.num_kv_heads * head_stride(args.type, args.head_dim) : args.q_stride;
  tape.add(
      {q, bias, out},
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
  Rows rows = tape.rows_of(out);
  tape.add({x, out}, [=](const Frame& frame, const Task& task) {
    frame.kernels->gated(frame.at(x), frame.sizes.of(rows), width, Activation(activation), frame.at(out), task);
  });
}

void add_route(Tape& tape, int logits, std::vector<int64_t> sizes, bool is_sigmoid, bool is_normed, float scale,
               std::optional<Array> bias, int ids, int weights, int order) {
  Rows rows = tape.rows_of(ids);
  const float* added = floats(bias);
  tape.add(
      {logits, ids, weights, order},
      [=](const Frame& frame, const Task& task) {
        Route args{frame.at(logits),
                   frame.sizes.of(rows),
                   sizes[0],
                   sizes[1],
                   sizes[2],
                   is_sigmoid,
                   is_normed,
                   scale,
                   added,
                   frame.ints(ids),
                   frame.at(weights),
                   frame.ints(order)};
        frame.kernels->route(args, task);
      },
      nullptr, expert_run_bytes(sizes[1]));
}

void add_experts(Tape& tape, const OwnedMatrix& matrix, int x, std::vector<int64_t> sizes, int ids, int order,
                 int activation, int weights, int logits, int shared, bool is_deterministic, int out,
                 std::optional<Array> down, std::optional<Array> up, std::optional<Array> ranks,
                 std::vector<int64_t> parts, int inner) {
  Rows rows = tape.rows_of(out);
  const Matrix* packed = &matrix;
  const bool has_lora = down.has_value();
  const Lora lora = has_lora ? lora_of(*down, *up, *ranks, parts, false) : Lora{};
  tape.add(
      {x, ids, order, weights, logits, shared, out, inner},
      [=](const Frame& frame, const Task& task) {
        Lora mine = lora;
        Experts args{};
        if (has_lora) fill_lora(mine, frame, rows, inner), args.lora = &mine;
        args.matrix = packed, args.num_rows = frame.sizes.of(rows), args.x = frame.at(x), args.ids = frame.ints(ids),
        args.order = frame.ints(order);
        args.num_logits = sizes[0], args.num_experts = sizes[1], args.num_chosen = sizes[2],
        args.activation = Activation(activation);
        args.weights = frame.at(weights), args.logits = frame.at(logits), args.shared = frame.at(shared);
        args.is_deterministic = is_deterministic, args.out = frame.at(out);
        frame.kernels->experts(args, task);
      },
      [=](const Sizes& given) { return experts_shared_bytes(*packed, given.of(rows) * sizes[2], sizes[1]); },
      experts_own_bytes(matrix, sizes[1]));
}

void add_kept_rows(Tape& tape, int x, int64_t row_bytes, int out) {
  tape.add({x, out}, [=](const Frame& frame, const Task& task) {
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
  Rows rows = tape.rows_of(out);
  tape.add({x, out}, [=](const Frame& frame, const Task& task) {
    task.share(0, frame.sizes.of(rows), 64, [&](int64_t first, int64_t last) {
      const char* from = reinterpret_cast<const char*>(frame.at(x)) + first * row_bytes;
      std::memcpy(reinterpret_cast<char*>(frame.at(out)) + first * row_bytes, from, size_t((last - first) * row_bytes));
    });
  });
}

void add_pool(Tape& tape, int x, int64_t width, int mode, int out) {
  tape.add({x, out}, [=](const Frame& frame, const Task& task) {
    Pool args{frame.at(x),  frame.input(Input::kStarts), frame.sizes.of(Rows::kSequences), width, Pooling(mode),
              frame.at(out)};
    frame.kernels->pool(args, task);
  });
}

void add_normalize(Tape& tape, int x, int64_t width, int out) {
  Rows rows = tape.rows_of(out);
  tape.add({x, out}, [=](const Frame& frame, const Task& task) {
    frame.kernels->normalize(frame.at(x), frame.sizes.of(rows), width, frame.at(out), task);
  });
}

void run_tape(Tape& tape, Threads& threads, int num_threads, std::vector<int64_t> sizes,
              std::vector<std::optional<Ids>> inputs, std::vector<WritableArray> results) {
  Sizes found;
  for (int i = 0; i < int(Rows::kCount); i++) found.rows[i] = sizes[size_t(i)];
  found.table_width = sizes[3], found.block_size = sizes[4], found.num_pieces = sizes[5];
  std::vector<const int64_t*> given(size_t(Input::kCount), nullptr);
  for (size_t i = 0; i < inputs.size(); i++) given[i] = inputs[i] ? inputs[i]->data() : nullptr;
  std::vector<char*> places;
  for (auto& result : results) places.push_back(static_cast<char*>(result.data()));
  Released released;
  tape.run(threads, num_threads, found, given.data(), places.data());
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

  nb::class_<Threads>(m, "Threads").def_prop_ro("count", &Threads::count).def("pin", &Threads::pin, "cores"_a);
  m.def("all_threads", &Threads::of, "num_threads"_a, nb::rv_policy::reference);

  bind_pack(m);

  nb::class_<Tape>(m, "Tape")
      .def("__init__", [](Tape* self, const Level& level) { new (self) Tape(level.kernels); })
      .def_ro("num_replays", &Tape::num_replays)
      .def_ro("num_allocations", &Tape::num_allocations)
      .def("value", [](Tape& tape, int rows, int64_t row_bytes) { return tape.value(Rows(rows), row_bytes); })
      .def("result", [](Tape& tape, int rows, int64_t row_bytes) { return tape.result(Rows(rows), row_bytes); })
      .def(
          "constant", [](Tape& tape, Array array) { return tape.constant(array.data()); }, "array"_a.noconvert(),
          nb::keep_alive<1, 2>())
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
      .def("run", &run_tape, "threads"_a, "num_threads"_a, "sizes"_a, "inputs"_a, "results"_a);

  bind_wkv(m);
  bind_sample(m);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&await_computing));
}

}  // namespace archerfish
