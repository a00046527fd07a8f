// Sampling for Python: rows of logits with the parameters of a SamplingBatch.
#include "module.h"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cmath>

namespace archerfish {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
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

bool is_number(Part which) {
  return which == kTemperature || which == kMinP || which == kTopP || which == kBiasValues || which >= kRepetition;
}
bool is_table(Part which) { return which == kMaskBits || which == kCounts || which == kCountedIds; }

struct Parts {
  const std::vector<std::optional<Array>>& arrays;

  bool has(Part which) const { return arrays[size_t(which)].has_value(); }
  int64_t size(Part which) const { return has(which) ? int64_t(arrays[size_t(which)]->shape(0)) : 0; }
  int64_t width(Part which) const { return int64_t(arrays[size_t(which)]->shape(1)); }
  template <class T>
  const T* of(Part which) const {
    return start_of<const T>(arrays[size_t(which)]);
  }
  const int64_t* ids(Part which) const { return of<int64_t>(which); }
  const double* numbers(Part which) const { return of<double>(which); }

  // Checks that there are all arrays of a group if there is the first one, with as many rows as that.
  void check_group(Part first, std::initializer_list<Part> others, int64_t num_rows = -1) const {
    if (!has(first)) return;
    check(num_rows < 0 || size(first) >= num_rows, "There are more logits than parameters.");
    for (Part other : others)
      check(size(other) >= (num_rows < 0 ? size(first) : num_rows), "An array has too few rows.");
  }

  void check_all(int64_t num_rows, int64_t vocab_size) const {
    check(arrays.size() == kNumParts, "Arrays are missing.");
    for (int i = 0; i < kNumParts; i++) {
      const Part part = Part(i);
      if (!has(part)) continue;
      const nb::dlpack::dtype type = is_number(part)   ? nb::dtype<double>()
                                     : part == kCounts ? nb::dtype<int32_t>()
                                                       : nb::dtype<int64_t>();
      check(arrays[size_t(i)]->dtype() == type, "An array has the wrong type.");
      check(arrays[size_t(i)]->ndim() == (is_table(part) ? 2u : 1u), "An array has the wrong number of dimensions.");
    }
    check_group(kTemperature, {kKeys, kPositions}, num_rows), check_group(kFirst, {kEnd, kOffset}, num_rows);
    check_group(kIsGreedy, {}, num_rows), check_group(kMinP, {}, num_rows);
    check_group(kCutRows, {kTopK, kTopP}), check_group(kBiasRows, {kBiasIds, kBiasValues});
    check_group(kBannedRows, {kBannedIds}), check_group(kMaskRows, {kMaskBits});
    check_group(kPenaltyRows, {kSlots});
    for (Part factors : {kRepetition, kPresence, kFrequency})
      if (has(factors)) check_group(kPenaltyRows, {factors});
    check(!has(kMaskRows) || width(kMaskBits) * 64 >= vocab_size, "Masks are too narrow.");
    if (has(kPenaltyRows)) {
      check(has(kCounts) && width(kCounts) >= vocab_size, "There are fewer counts than tokens.");
      check_group(kCounts, {kCountedIds, kNumCounted});
    }
  }
};

// The row that an entry names.
SampleRow& row_at(std::vector<SampleRow>& rows, int64_t row) {
  check(row >= 0 && row < int64_t(rows.size()), "There is no such row of logits.");
  return rows[size_t(row)];
}

// `sampling.uniform`: splitmix64 of a key and a position.
double uniform(int64_t key, int64_t position) {
  uint64_t word = uint64_t(key) + (uint64_t(position) + 1) * 0x9E3779B97F4A7C15u;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return double((word ^ (word >> 31)) >> 11) * 0x1p-53;
}

void set_temperature(SampleRow& row, double temperature, double min_p) {
  check(!std::isnan(temperature) && !std::isnan(min_p), "A parameter of sampling is not a number.");
  row.temperature =
      float(std::min(std::max(temperature, 1e-30), 3e38));  // 1 / temperature must be neither 0 nor infinite
  row.min_p = float(std::min(min_p, 1.0));
}

void set_rows(std::vector<SampleRow>& rows, const Parts& parts, int64_t vocab_size) {
  const int64_t num_rows = int64_t(rows.size());
  for (int64_t r = 0; r < num_rows; r++) {
    SampleRow& row = rows[size_t(r)];
    row.end = vocab_size;
    if (parts.has(kFirst)) {
      row.first = std::min(std::max<int64_t>(parts.ids(kFirst)[r], 0), vocab_size);
      row.offset = parts.ids(kOffset)[r];
      check(row.offset >= -kMostSize && row.offset <= kMostSize, "An offset of tokens is too large.");
      row.end = std::max(std::min(parts.ids(kEnd)[r], vocab_size), row.first);
    }
    if (!parts.has(kTemperature) || (parts.has(kIsGreedy) && parts.ids(kIsGreedy)[r])) continue;
    set_temperature(row, parts.numbers(kTemperature)[r], parts.has(kMinP) ? parts.numbers(kMinP)[r] : 0);
    row.number = uniform(parts.ids(kKeys)[r], parts.ids(kPositions)[r]);
  }
  for (int64_t i = 0; i < parts.size(kCutRows); i++) {
    SampleRow& row = row_at(rows, parts.ids(kCutRows)[i]);
    row.top_k = parts.ids(kTopK)[i], row.top_p = parts.numbers(kTopP)[i];
    check(row.top_k > 0 && !std::isnan(row.top_p), "top_k must be above 0, and top_p a number.");
  }
  for (int64_t i = 0; i < parts.size(kMaskRows); i++)
    row_at(rows, parts.ids(kMaskRows)[i]).bits = parts.ids(kMaskBits) + i * parts.width(kMaskBits);
  for (int64_t i = 0; i < parts.size(kPenaltyRows); i++) {
    SampleRow& row = row_at(rows, parts.ids(kPenaltyRows)[i]);
    const int64_t slot = parts.ids(kSlots)[i];
    check(slot >= 0 && slot < parts.size(kCounts), "Penalties have a row that the counts do not have.");
    row.counts = parts.of<int32_t>(kCounts) + slot * parts.width(kCounts);
    row.counted = parts.ids(kCountedIds) + slot * parts.width(kCountedIds),
    row.num_counted = parts.ids(kNumCounted)[slot];
    check(row.num_counted >= 0 && row.num_counted <= parts.width(kCountedIds), "More tokens are counted than listed.");
    if (parts.has(kRepetition)) row.repetition = float(parts.numbers(kRepetition)[i]);
    if (parts.has(kPresence)) row.presence = float(parts.numbers(kPresence)[i]);
    if (parts.has(kFrequency)) row.frequency = float(parts.numbers(kFrequency)[i]);
  }
}

// Gives each row its biases, then its banned tokens.
void set_changes(std::vector<SampleRow>& rows, const Parts& parts, std::vector<Change>& changes) {
  for (Part part : {kBiasRows, kBannedRows})
    for (int64_t i = 0; i < parts.size(part); i++) row_at(rows, parts.ids(part)[i]).num_changes++;
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

  void sample(Threads& threads, int num_threads, const Logits& logits, const std::vector<std::optional<Array>>& arrays,
              const Words& report) {
    check_logits(logits);
    Parts parts{arrays};
    parts.check_all(int64_t(logits.shape(0)), int64_t(logits.shape(1)));
    check(report.size() >= 2 * logits.shape(0), "The report has too few rows.");
    int64_t* found = start_of<int64_t>(report);
    if (!logits.shape(0)) return;
    Released released;  // before the lock, which another thread may hold that waits for the interpreter
    std::lock_guard<std::mutex> lock(lock_);
    const int64_t num_rows = int64_t(logits.shape(0)), vocab_size = int64_t(logits.shape(1));
    rows_.assign(size_t(num_rows), SampleRow{});
    for (int64_t r = 0; r < num_rows; r++) rows_[size_t(r)].logits = logits.data() + r * logits.stride(0);
    set_rows(rows_, parts, vocab_size);
    set_changes(rows_, parts, changes_);
    run(threads, num_threads, num_rows, vocab_size,
        [&](const Task& task) { kernels_->sample(rows_.data(), num_rows, found, found + num_rows, task); });
  }

  void score(Threads& threads, int num_threads, const Logits& logits, const Typed<int64_t, 1>& token_ids,
             const std::optional<Typed<int64_t, 1>>& rows, const Doubles& logprobs, const Words& ranks,
             const Words& top_ids, const Doubles& top_logprobs) {
    check_logits(logits);
    const int64_t num_rows = int64_t(token_ids.size()), size = int64_t(logits.shape(1));
    check(top_ids.ndim() == 2 && int64_t(top_ids.shape(1)) <= size, "More likely tokens are asked for than there are.");
    const int64_t num_top = int64_t(top_ids.shape(1));
    check((!rows || int64_t(rows->size()) == num_rows) && int64_t(logprobs.size()) == num_rows &&
              int64_t(ranks.size()) == num_rows && int64_t(top_ids.size()) == num_rows * num_top &&
              int64_t(top_logprobs.size()) == num_rows * num_top,
          "The arrays of scores have different sizes.");
    if (!num_rows) return;
    const int64_t *ids = start_of<const int64_t>(token_ids), *places = start_of<const int64_t>(rows);
    double *found = start_of<double>(logprobs), *top_found = start_of<double>(top_logprobs);
    int64_t *found_ranks = start_of<int64_t>(ranks), *found_ids = start_of<int64_t>(top_ids);
    std::vector<ScoreRow> wanted;
    for (int64_t r = 0; r < num_rows; r++) {
      const int64_t row = rows ? places[r] : r, token = ids[r];
      check(row >= 0 && row < int64_t(logits.shape(0)), "There is no such row of logits.");
      check(token >= 0 && token < size, "There is no such token.");
      wanted.push_back({logits.data() + row * logits.stride(0), size, token, num_top, found + r, found_ranks + r,
                        found_ids + r * num_top, top_found + r * num_top});
    }
    Released released;
    std::lock_guard<std::mutex> lock(lock_);
    run(threads, num_threads, num_rows, size,
        [&](const Task& task) { kernels_->score(wanted.data(), num_rows, task); });
  }

  // One row: the token and the outcome.
  std::pair<int64_t, int64_t> draw(const Vector& logits, double temperature, int64_t top_k, double top_p,
                                   double number) {
    SampleRow row{};
    check(int64_t(logits.shape(0)) <= kMostSize && !std::isnan(top_p), "A parameter of sampling is not a number.");
    row.logits = start_of<const float>(logits), row.end = int64_t(logits.shape(0)), row.top_p = top_p,
    row.number = number;
    if (temperature > 0) set_temperature(row, temperature, 0);
    if (top_k > 0) row.top_k = top_k;
    Released released;
    std::lock_guard<std::mutex> lock(lock_);
    int64_t token = 0, outcome = 0;
    kernels_->sample(&row, 1, &token, &outcome, Task{0, 1, nullptr, nullptr, nullptr, room(0, row.end)});
    return {token, outcome};
  }

 private:
  static void check_logits(const Logits& logits) {
    check(logits.stride(1) == 1, "Rows of logits must be contiguous.");
    check(int64_t(logits.shape(1)) <= kMostSize, "There are too many logits.");
    start_of<const float>(logits);
  }
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
      .def("sample", &Sampler::sample, "threads"_a, "num_threads"_a, "logits"_a, "arrays"_a, "report"_a.noconvert())
      .def("score", &Sampler::score, "threads"_a, "num_threads"_a, "logits"_a, "token_ids"_a, "rows"_a.none(),
           "logprobs"_a.noconvert(), "ranks"_a.noconvert(), "top_ids"_a.noconvert(), "top_logprobs"_a.noconvert())
      .def("draw", &Sampler::draw, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "number"_a);
}

}  // namespace archerfish
