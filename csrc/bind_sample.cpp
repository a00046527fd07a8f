// Sampling for Python: rows of logits with the parameters of a SamplingBatch.
#include "module.h"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace archerfish {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<int64_t, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<double, nb::c_contig, nb::device::cpu>;

// Arrays of a SamplingBatch in the order in which NativeSampling gives them. Integers have 8 bytes but for kCounts with
// 4, the others are doubles.
enum Part : int {
  kTemperature,
  kIsGreedy,
  kKeys,
  kPositions,
  kMinP,
  kCutRows,
  kTopK,
  kTopP,
  kBiasRows,
  kBiasIds,
  kBiasValues,
  kBannedRows,
  kBannedIds,
  kMaskRows,
  kMaskBits,
  kFirst,
  kEnd,
  kOffset,
  kPenaltyRows,
  kSlots,
  kCounts,
  kCountedIds,
  kNumCounted,
  kRepetition,
  kPresence,
  kFrequency,
  kNumParts
};

struct Parts {
  const std::vector<std::optional<Array>>& arrays;

  bool has(Part which) const { return arrays[size_t(which)].has_value(); }
  int64_t size(Part which) const { return has(which) ? int64_t(arrays[size_t(which)]->shape(0)) : 0; }
  int64_t width(Part which) const { return int64_t(arrays[size_t(which)]->shape(1)); }
  template <class T>
  const T* of(Part which) const {
    if (has(which) && arrays[size_t(which)]->dtype() != nb::dtype<T>())
      throw std::invalid_argument("An array has the wrong type.");
    return static_cast<const T*>(address(arrays[size_t(which)]));
  }
  const int64_t* ids(Part which) const { return of<int64_t>(which); }
  const double* numbers(Part which) const { return of<double>(which); }
};

// `sampling.uniform`: splitmix64 of a key and a position.
double uniform(int64_t key, int64_t position) {
  uint64_t word = uint64_t(key) + (uint64_t(position) + 1) * 0x9E3779B97F4A7C15u;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return double((word ^ (word >> 31)) >> 11) * 0x1p-53;
}

void set_temperature(SampleRow& row, double temperature, double min_p) {
  row.temperature =
      float(std::min(std::max(temperature, 1e-30), 3e38));  // 1 / temperature must be neither 0 nor infinite
  row.min_p = float(std::min(min_p, 1.0));
}

void set_rows(std::vector<SampleRow>& rows, const Parts& parts, int64_t vocab_size) {
  const int64_t num_rows = int64_t(rows.size());
  for (Part part : {kTemperature, kIsGreedy, kKeys, kPositions, kMinP, kFirst, kEnd, kOffset})
    if (parts.has(part) && parts.size(part) < num_rows)
      throw std::invalid_argument("There are more logits than parameters.");
  if (parts.has(kMaskBits) && parts.width(kMaskBits) * 64 < vocab_size)
    throw std::invalid_argument("Masks are too narrow.");
  for (int64_t r = 0; r < num_rows; r++) {
    SampleRow& row = rows[size_t(r)];
    row.end = vocab_size;
    if (parts.has(kFirst)) {
      row.first = std::max<int64_t>(parts.ids(kFirst)[r], 0), row.offset = parts.ids(kOffset)[r];
      row.end = std::max(std::min(parts.ids(kEnd)[r], vocab_size), row.first);
    }
    if (!parts.has(kTemperature) || (parts.has(kIsGreedy) && parts.ids(kIsGreedy)[r])) continue;
    set_temperature(row, parts.numbers(kTemperature)[r], parts.has(kMinP) ? parts.numbers(kMinP)[r] : 0);
    row.number = uniform(parts.ids(kKeys)[r], parts.ids(kPositions)[r]);
  }
  for (int64_t i = 0; i < parts.size(kCutRows); i++) {
    SampleRow& row = rows.at(size_t(parts.ids(kCutRows)[i]));
    row.top_k = parts.ids(kTopK)[i], row.top_p = parts.numbers(kTopP)[i];
  }
  for (int64_t i = 0; i < parts.size(kMaskRows); i++)
    rows.at(size_t(parts.ids(kMaskRows)[i])).bits = parts.ids(kMaskBits) + i * parts.width(kMaskBits);
  for (int64_t i = 0; i < parts.size(kPenaltyRows); i++) {
    SampleRow& row = rows.at(size_t(parts.ids(kPenaltyRows)[i]));
    const int64_t slot = parts.ids(kSlots)[i];
    if (slot < 0 || slot >= parts.size(kCounts))
      throw std::out_of_range("Penalties have a row that the counts do not have.");
    row.counts = parts.of<int32_t>(kCounts) + slot * parts.width(kCounts);
    row.counted = parts.ids(kCountedIds) + slot * parts.width(kCountedIds),
    row.num_counted = parts.ids(kNumCounted)[slot];
    if (parts.has(kRepetition)) row.repetition = float(parts.numbers(kRepetition)[i]);
    if (parts.has(kPresence)) row.presence = float(parts.numbers(kPresence)[i]);
    if (parts.has(kFrequency)) row.frequency = float(parts.numbers(kFrequency)[i]);
  }
}

// Gives each row its biases, then its banned tokens.
void set_changes(std::vector<SampleRow>& rows, const Parts& parts, std::vector<Change>& changes) {
  for (Part part : {kBiasRows, kBannedRows})
    for (int64_t i = 0; i < parts.size(part); i++) rows.at(size_t(parts.ids(part)[i])).num_changes++;
  changes.resize(size_t(parts.size(kBiasRows) + parts.size(kBannedRows)));
  Change* next = changes.data();
  for (SampleRow& row : rows) row.changes = next, next += row.num_changes, row.num_changes = 0;
  for (Part part : {kBiasRows, kBannedRows})
    for (int64_t i = 0; i < parts.size(part); i++) {
      SampleRow& row = rows[size_t(parts.ids(part)[i])];
      const float value = part == kBiasRows ? float(parts.numbers(kBiasValues)[i]) : -INFINITY;
      changes[size_t(row.changes - changes.data() + row.num_changes++)] = {parts.ids(Part(part + 1))[i], value};
    }
}

// Runs kernels that share rows among threads. Memory is kept from call to call; one call at a time.
class Sampler {
 public:
  explicit Sampler(const Level& level) : kernels_(level.kernels) {}
  int64_t num_calls = 0, num_allocations = 0, num_bytes = 0;

  void sample(Threads& threads, int num_threads, Logits logits, std::vector<std::optional<Array>> arrays,
              Words report) {
    if (logits.stride(1) != 1) throw nb::value_error("Rows of logits must be contiguous.");
    if (arrays.size() != kNumParts) throw nb::value_error("Arrays are missing.");
    Parts parts{arrays};
    Released released;  // before the lock, which another thread may hold that waits for the interpreter
    std::lock_guard<std::mutex> lock(lock_);
    const int64_t num_rows = int64_t(logits.shape(0)), vocab_size = int64_t(logits.shape(1));
    rows_.assign(size_t(num_rows), SampleRow{});
    for (int64_t r = 0; r < num_rows; r++) rows_[size_t(r)].logits = logits.data() + r * logits.stride(0);
    set_rows(rows_, parts, vocab_size);
    set_changes(rows_, parts, changes_);
    run(threads, num_threads, num_rows, vocab_size, [&](const Task& task) {
      kernels_->sample(rows_.data(), num_rows, report.data(), report.data() + num_rows, task);
    });
  }

  void score(Threads& threads, int num_threads, Logits logits, Ids token_ids, std::optional<Ids> rows, Doubles logprobs,
             Words ranks, Words top_ids, Doubles top_logprobs) {
    if (logits.stride(1) != 1) throw nb::value_error("Rows of logits must be contiguous.");
    const int64_t num_rows = int64_t(token_ids.shape(0)), size = int64_t(logits.shape(1)),
                  num_top = int64_t(top_ids.shape(1));
    std::vector<ScoreRow> wanted;
    for (int64_t r = 0; r < num_rows; r++) {
      const int64_t row = rows ? rows->data()[r] : r, token = token_ids.data()[r];
      if (row < 0 || row >= int64_t(logits.shape(0))) throw nb::index_error("There is no such row.");
      if (token < 0 || token >= size) throw nb::index_error("There is no such token.");
      wanted.push_back({logits.data() + row * logits.stride(0), size, token, num_top, logprobs.data() + r,
                        ranks.data() + r, top_ids.data() + r * num_top, top_logprobs.data() + r * num_top});
    }
    Released released;
    std::lock_guard<std::mutex> lock(lock_);
    run(threads, num_threads, num_rows, size,
        [&](const Task& task) { kernels_->score(wanted.data(), num_rows, task); });
  }

  // One row: the token and the outcome.
  std::pair<int64_t, int64_t> draw(Row logits, double temperature, int64_t top_k, double top_p, double number) {
    SampleRow row{};
    row.logits = logits.data(), row.end = int64_t(logits.shape(0)), row.top_p = top_p, row.number = number;
    if (temperature > 0) set_temperature(row, temperature, 0);
    if (top_k > 0) row.top_k = top_k;
    Released released;
    std::lock_guard<std::mutex> lock(lock_);
    int64_t token = 0, outcome = 0;
    kernels_->sample(&row, 1, &token, &outcome, Task{0, 1, nullptr, nullptr, nullptr, room(0, row.end)});
    return {token, outcome};
  }

 private:
  char* room(int thread, int64_t row_size) {
    if (int(own_.size()) <= thread) own_.resize(size_t(thread) + 1);
    const int64_t before = own_[size_t(thread)].size();
    char* found = own_[size_t(thread)].room(sample_own_bytes(row_size));
    num_bytes += own_[size_t(thread)].size() - before;
    return found;
  }
  template <class F>
  void run(Threads& threads, int num_threads, int64_t num_rows, int64_t row_size, F work) {
    num_calls++;
    const int64_t before = num_bytes;
    num_threads = int(std::max<int64_t>(1, std::min<int64_t>({num_threads, threads.count(), num_rows})));
    for (int thread = 0; thread < num_threads; thread++) room(thread, row_size);
    num_allocations += num_bytes > before;
    Counter counters[2] = {};
    Barrier barrier;
    threads.run(num_threads, [&](int thread) {
      work(Task{thread, num_threads, counters, &barrier, nullptr, room(thread, row_size)});
    });
  }

  const Kernels* kernels_;
  std::mutex lock_;
  std::vector<SampleRow> rows_;
  std::vector<Change> changes_;
  std::vector<Memory> own_;
};

}  // namespace

void bind_sample(nb::module_& m) {
  nb::class_<Sampler>(m, "Sampler")
      .def(nb::init<const Level&>(), "level"_a)
      .def_ro("num_calls", &Sampler::num_calls)
      .def_ro("num_allocations", &Sampler::num_allocations)
      .def_ro("num_bytes", &Sampler::num_bytes)
      .def("sample", &Sampler::sample, "threads"_a, "num_threads"_a, "logits"_a, "arrays"_a, "report"_a)
      .def("score", &Sampler::score, "threads"_a, "num_threads"_a, "logits"_a, "token_ids"_a, "rows"_a.none(),
           "logprobs"_a, "ranks"_a, "top_ids"_a, "top_logprobs"_a)
      .def("draw", &Sampler::draw, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "number"_a);
}

}  // namespace archerfish
