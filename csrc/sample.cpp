// One token for each row of logits, by the rules of archerfish/kernels/sampling.py; and log-probabilities of tokens.
//
// A first pass takes the largest logit of every group of 16 tokens. The likeliest token lies in a group with the
// largest peak, and the k likeliest have logits that reach the k-th largest peak, so that few tokens are left to
// compare. Only cuts that keep thousands of tokens need more: a histogram of all tokens, and a choice within one of its
// bins.
#include <cfloat>

#include "vec.h"

namespace archerfish::LEVEL {
namespace sampling {
namespace {

constexpr int kDeep = 16;              // vectors of a span; a lane of them is a group
constexpr int kSpan = kDeep * kLanes;  // tokens
constexpr int kBins = 1024, kBinCopies = 4;
constexpr float kBinsPerNat = 32;
constexpr int64_t kLikely = 256;     // tokens that hold the mass of most rows
constexpr int64_t kShortRow = 4096;  // tokens that may all be compared

// Keys rank tokens: the higher logit, then the lower id.
struct Candidate {
  uint64_t key;
  float weight;
};

INLINE uint64_t key_of(float logit, int64_t id) {
  logit += 0.0f;  // -0.0 becomes 0.0
  uint32_t bits;
  memcpy(&bits, &logit, 4);
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
  return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(id));
}
INLINE int64_t id_of(uint64_t key) { return int64_t(0xffffffffu - uint32_t(key)); }
INLINE float logit_of(uint64_t key) {
  uint32_t bits = uint32_t(key >> 32);
  bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
  float logit;
  memcpy(&logit, &bits, 4);
  return logit;
}

INLINE bool any(Ints mask) {
  uint64_t words[kVectorBytes / 8], found = 0;
  memcpy(words, &mask, sizeof words);
  UNROLL for (int i = 0; i < kVectorBytes / 8; i++) found |= words[i];
  return found != 0;
}
INLINE double next(double x, int64_t step) {  // the next number above, or below for a step of -1; x >= 0
  int64_t bits;
  memcpy(&bits, &x, 8);
  bits += step;
  memcpy(&x, &bits, 8);
  return x;
}

// A row that is being worked on, and memory of this thread.
struct Work {
  const float* x;  // logits that may be chosen, after all changes
  int64_t size, num_spans;
  float highest = 0, factor = 1, min_p = 0;  // factor: 1 / temperature
  float *copy, *weights, *peaks, *folded;
  double *sums, *masses;  // cumulative weights of spans; weights by bin
  Candidate* list;
  uint64_t* seen;

  Work(char* memory, int64_t row_size) : size(row_size), num_spans((row_size + kSpan - 1) / kSpan) {
    const int64_t room = sample_room(row_size);
    list = reinterpret_cast<Candidate*>(memory), memory += room * int64_t(sizeof(Candidate));
    sums = reinterpret_cast<double*>(memory), memory += room / 8;
    masses = reinterpret_cast<double*>(memory), memory += kBins * kBinCopies * 8;
    seen = reinterpret_cast<uint64_t*>(memory), memory += room / 8;
    copy = reinterpret_cast<float*>(memory), weights = copy + room, peaks = weights + room,
    folded = peaks + room / kDeep;
  }
  int64_t num_groups() const { return num_spans * kLanes; }
  // A whole span of logits; what lies beyond the row is -inf.
  INLINE const float* span(int64_t place, float* rest) const {
    const int64_t begin = place * kSpan;
    if (begin + kSpan <= size) return x + begin;
    for (int i = 0; i < kSpan; i++) rest[i] = begin + i < size ? x[begin + i] : -INFINITY;
    return rest;
  }
  INLINE Ints bins(Floats logits) const {  // a higher logit is never in a later bin
    return to_ints(smaller((highest - logits) * (factor * kBinsPerNat), all(kBins - 1)));
  }
};

// exp((logit - highest) / temperature) of some vectors at once, with a relative error below 2e-7 but for that of the
// quotient; 0 where that is below min_p or too small for a float32.
struct Weigher {
  const Floats highest, factor, least;
  explicit Weigher(const Work& work)
      : highest(all(work.highest)),
        factor(all(work.factor * 1.44269504f)),
        least(larger(all(work.min_p), all(FLT_MIN))) {}
  template <int kCount>
  INLINE void operator()(Floats (&x)[kCount]) const {
    const Floats magic = all(12582912.0f);  // rounds to a whole number, which then stands in the lowest bits
    Floats power[kCount], p[kCount];
    UNROLL for (int i = 0; i < kCount; i++) x[i] = larger((x[i] - highest) * factor, all(-126.2f));
    UNROLL for (int i = 0; i < kCount; i++) power[i] = x[i] + magic;
    UNROLL for (int i = 0; i < kCount; i++) x[i] = x[i] - (power[i] - magic);
    UNROLL for (int i = 0; i < kCount; i++) p[i] = x[i] * 0.00132647269f + 0.00967151266f;
    UNROLL for (int i = 0; i < kCount; i++) p[i] = p[i] * x[i] + 0.0555073374f;
    UNROLL for (int i = 0; i < kCount; i++) p[i] = p[i] * x[i] + 0.240222421f;
    UNROLL for (int i = 0; i < kCount; i++) p[i] = p[i] * x[i] + 0.693146978f;
    UNROLL for (int i = 0; i < kCount; i++) p[i] = p[i] * x[i] + 1.0f;
    UNROLL for (int i = 0; i < kCount; i++) x[i] = as_floats(as_words(p[i]) + (as_words(power[i]) << 23));
    UNROLL for (int i = 0; i < kCount; i++) x[i] = choose(x[i] >= least, x[i], Floats{});
  }
};

void find_peaks(Work& work) {
  Floats top = all(-INFINITY);
  float rest[kSpan];
  for (int64_t s = 0; s < work.num_spans; s++) {
    const float* at = work.span(s, rest);
    Floats peak = load(at);
    UNROLL for (int j = 1; j < kDeep; j++) peak = larger_or_nan(peak, load(at + j * kLanes));
    store(work.peaks + s * kLanes, peak);
    top = larger_or_nan(top, peak);
  }
  work.highest = top[0];
  for (int i = 1; i < kLanes; i++)
    if (!(work.highest >= top[i]) && work.highest == work.highest) work.highest = top[i];
}

int64_t first_highest(const Work& work) {
  int64_t s = 0;
  while (!any(load(work.peaks + s * kLanes) == all(work.highest))) s++;
  for (int64_t i = s * kSpan;; i++)
    if (work.x[i] == work.highest) return i;
}

// Fills `weights` and `sums` by a function of four vectors of logits and the first id; gives the sum of all.
template <class F>
INLINE double set_weights(Work& work, F weigh) {
  double total = 0;
  float rest[kSpan];
  float* const weights = work.weights;
  double* const sums = work.sums;
  const int64_t num_spans = work.num_spans;
  for (int64_t s = 0; s < num_spans; s++) {
    const float* at = work.span(s, rest);
    Floats part[4] = {};
    for (int j = 0; j < kSpan; j += 4 * kLanes) {
      Floats x[4];
      UNROLL for (int i = 0; i < 4; i++) x[i] = load(at + j + i * kLanes);
      weigh(x, s * kSpan + j);
      UNROLL for (int i = 0; i < 4; i++) store(weights + s * kSpan + j + i * kLanes, x[i]), part[i] += x[i];
    }
    part[0] = (part[0] + part[1]) + (part[2] + part[3]);
    for (int i = 0; i < kLanes; i++) total += double(part[0][i]);
    sums[s] = total;
  }
  return total;
}

double fill_weights(Work& work) {
  const Weigher weigher(work);
  return set_weights(work, [&](Floats(&x)[4], int64_t) { weigher(x); });
}

// Takes away the weights of tokens that come after a key.
double drop_after(Work& work, uint64_t last) {
  const Floats lowest = all(logit_of(last));
  const Ints last_id = all_ints(int32_t(id_of(last)));
  const float* weights = work.weights;
  Ints lanes;
  for (int i = 0; i < kLanes; i++) lanes[i] = i;
  return set_weights(work, [&](Floats(&x)[4], int64_t id) {
    for (int i = 0; i < 4; i++, id += kLanes) {
      Ints is_kept = (x[i] > lowest) | ((x[i] == lowest) & (int32_t(id) + lanes <= last_id));
      x[i] = choose(is_kept, load(weights + id), Floats{});
    }
  });
}

// Where a number in [0, 1) falls in the cumulative weights.
int64_t pick(const Work& work, double number) {
  const double total = work.sums[work.num_spans - 1];
  double target = number * total;
  if (target >= total) target = next(total, -1);
  int64_t low = 0, high = work.num_spans - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (work.sums[middle] > target)
      high = middle;
    else
      low = middle + 1;
  }
  double sum = low ? work.sums[low - 1] : 0;
  int64_t found = 0;
  for (int64_t i = low * kSpan; i < (low + 1) * kSpan; i++) {
    if (work.weights[i] == 0) continue;
    found = i, sum += double(work.weights[i]);
    if (sum > target) break;
  }
  return found;
}

// Lists the tokens whose logit is at least `bound`, with the logit as their weight.
int64_t collect(const Work& work, float bound) {
  int64_t count = 0;
  float rest[kSpan];
  for (int64_t s = 0; s < work.num_spans; s++) {
    if (!any(load(work.peaks + s * kLanes) >= all(bound))) continue;
    const float* at = work.span(s, rest);
    for (int j = 0; j < kSpan; j += kLanes) {
      if (!any(load(at + j) >= all(bound))) continue;
      for (int i = j; i < j + kLanes; i++)
        if (at[i] >= bound && s * kSpan + i < work.size) work.list[count++] = {key_of(at[i], s * kSpan + i), at[i]};
    }
  }
  return count;
}

// Turns the logits of a list into weights and drops tokens without any.
int64_t weigh_list(const Work& work, int64_t count, double& total) {
  const Weigher weigher(work);
  int64_t num_left = 0;
  total = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t here = at_most(kLanes, count - i);
    Floats weights[1] = {all(-INFINITY)};
    for (int64_t j = 0; j < here; j++) weights[0][j] = work.list[i + j].weight;
    weigher(weights);
    for (int64_t j = 0; j < here; j++)
      if (weights[0][j] > 0)
        work.list[num_left++] = {work.list[i + j].key, weights[0][j]}, total += double(weights[0][j]);
  }
  return num_left;
}

// Moves the tokens of the highest keys to the front of a list, as few as are needed for `before` and their weights (or
// their number) to reach the limit; gives how many. The last of them is the one with the lowest key.
template <bool kByCount>
int64_t keep_first(Candidate* list, int64_t count, double before, double limit) {
  int64_t low = 0, high = count;
  uint64_t random = 0;
  while (low < high) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    const int64_t middle = low + int64_t((random >> 32) % uint64_t(high - low));
    const Candidate pivot = list[middle];
    list[middle] = list[low];
    double mass = 0;
    int64_t next = low;  // list[next] is free
    for (int64_t i = low + 1; i < high; i++) {
      const Candidate one = list[i];
      if (one.key < pivot.key) continue;
      mass += kByCount ? 1.0 : double(one.weight);
      list[next] = one, next++;
      list[i] = list[next];
    }
    list[next] = pivot;
    if (next > low && before + mass >= limit) {
      high = next;
      continue;
    }
    before += mass + (kByCount ? 1.0 : double(pivot.weight));
    low = next + 1;
    if (before >= limit) return low;
  }
  return high;
}

// A finite logit that the `count` likeliest tokens reach unless they are ruled out, found among the peaks of groups.
float bound_of(const Work& work, int64_t count) {
  int64_t num = work.num_spans;
  if (work.num_groups() < 2 * count) return -FLT_MAX;
  memcpy(work.folded, work.peaks, size_t(num) * sizeof(Floats));
  while (num > 1 && num * kLanes >= 4 * count) {  // two groups become one, as long as there are enough
    const int64_t half = (num + 1) / 2;
    for (int64_t i = 0; i + half < num; i++) {
      float* peaks = work.folded + i * kLanes;
      store(peaks, larger(load(peaks), load(peaks + half * kLanes)));
    }
    num = half;
  }
  for (int64_t i = 0; i < num * kLanes; i++) work.list[i].key = key_of(work.folded[i], i);
  const float bound = logit_of(work.list[keep_first<true>(work.list, num * kLanes, 0, double(count)) - 1].key);
  return bound > -FLT_MAX ? bound : -FLT_MAX;
}

int64_t draw_from_list(const Work& work, int64_t count, double total, double top_p, double number) {
  if (top_p < 1) {
    count = keep_first<false>(work.list, count, 0, top_p * total);
    total = 0;
    for (int64_t i = 0; i < count; i++) total += double(work.list[i].weight);
  }
  for (int64_t i = 0; i < count; i++) work.list[i].key &= 0xffffffffu;  // now the lower id comes first
  return id_of(work.list[keep_first<false>(work.list, count, 0, next(number * total, 1)) - 1].key);
}

// The key of the last token that `keep_first` would keep of all tokens.
template <bool kByCount>
uint64_t last_kept(Work& work, double limit) {
  memset(work.masses, 0, kBins * kBinCopies * sizeof(double));
  float rest[kSpan];
  int32_t bins[kLanes];
  for (int64_t s = 0; s < work.num_spans; s++) {
    const float *at = work.span(s, rest), *weights = work.weights + s * kSpan;
    for (int j = 0; j < kSpan; j += kLanes) {
      Ints found = work.bins(load(at + j));
      memcpy(bins, &found, sizeof bins);
      for (int i = 0; i < kLanes; i++)
        work.masses[i % kBinCopies * kBins + bins[i]] += kByCount ? 1.0 : double(weights[j + i]);
    }
  }
  double before = 0;
  int bin = 0;
  for (; bin < kBins - 1; bin++) {
    double mass = 0;
    for (int i = 0; i < kBinCopies; i++) mass += work.masses[i * kBins + bin];
    if (before + mass >= limit) break;
    before += mass;
  }
  int64_t count = 0;
  for (int64_t s = 0; s < work.num_spans; s++) {
    const float* at = work.span(s, rest);
    for (int j = 0; j < kSpan; j += kLanes) {
      Ints is_here = work.bins(load(at + j)) == bin;
      if (!any(is_here)) continue;
      for (int64_t i = 0, id = s * kSpan + j; i < kLanes && id < work.size; i++, id++)
        if (is_here[i]) work.list[count++] = {key_of(at[j + i], id), work.weights[id]};
    }
  }
  if (!count) return key_of(-INFINITY, INT32_MAX);  // rounded sums do not reach the limit: all tokens are kept
  return work.list[keep_first<kByCount>(work.list, count, before, limit) - 1].key;
}

int64_t draw(Work& work, int64_t top_k, double top_p, double number) {
  const bool has_top_k = top_k < work.size;
  double total, mass;
  if (has_top_k && (2 * top_k <= work.num_groups() || work.size <= kShortRow)) {
    const int64_t num_kept = keep_first<true>(work.list, collect(work, bound_of(work, top_k)), 0, double(top_k));
    const int64_t num_left = weigh_list(work, num_kept, total);
    return draw_from_list(work, num_left, total, top_p, number);
  }
  total = fill_weights(work);
  if (!has_top_k && top_p < 1) {
    const int64_t count = at_most(kLikely, work.size <= kShortRow ? kLikely : work.num_groups() / 2);
    const int64_t num_left = weigh_list(work, collect(work, bound_of(work, count)), mass);
    if (mass >= top_p * total) return draw_from_list(work, num_left, total, top_p, number);
  }
  if (has_top_k) total = drop_after(work, last_kept<true>(work, double(top_k)));
  if (top_p < 1) drop_after(work, last_kept<false>(work, top_p * total));
  return pick(work, number);
}

INLINE float choose_bits(float logit, uint32_t rule_out) {  // -inf where all bits are set; without a branch
  uint32_t bits;
  memcpy(&bits, &logit, 4);
  bits = (bits & ~rule_out) | (0xff800000u & rule_out);
  memcpy(&logit, &bits, 4);
  return logit;
}

// Copies the logits from `first` to `end`, -inf for those that the bits rule out.
void copy_allowed(const SampleRow& row, float* out) {
  if (!row.bits) {
    memcpy(out, row.logits + row.first, size_t(row.end - row.first) * 4);
    return;
  }
  for (int64_t id = row.first; id < row.end;) {
    const int64_t end = at_most(row.end, (id / 64 + 1) * 64), size = end - id;
    const uint64_t bits = uint64_t(row.bits[id / 64]) >> (id % 64);
    const float* logits = row.logits + id;
    if (!bits)
      for (int64_t i = 0; i < size; i++) out[i] = -INFINITY;
    else
      for (int64_t i = 0; i < size; i++) out[i] = choose_bits(logits[i], uint32_t(bits >> i & 1) - 1);
    id = end, out += size;
  }
}

void penalise(const SampleRow& row, Work& work) {
  memset(work.seen, 0, size_t((work.size + 63) / 64) * 8);
  for (int64_t i = 0; i < row.num_counted; i++) {
    const int64_t place = row.counted[i] - row.first;
    if (place < 0 || place >= work.size || work.seen[place / 64] >> (place % 64) & 1) continue;
    work.seen[place / 64] |= uint64_t(1) << (place % 64);
    const int32_t count = row.counts[row.counted[i]], num_output = count >> 1;
    float logit = work.copy[place];
    if (count > 0) logit = logit > 0 ? logit / row.repetition : logit * row.repetition;
    if (num_output > 0) logit -= row.presence;
    volatile float product = row.frequency * float(num_output);  // rounded on its own, as the reference does it
    work.copy[place] = logit - product;
  }
}

void adjust(const SampleRow& row, Work& work) {
  work.x = row.logits + row.first;
  if (!row.bits && !row.num_changes && !row.num_counted) return;
  copy_allowed(row, work.copy);
  work.x = work.copy;
  for (int64_t i = 0; i < row.num_changes; i++) {
    const Change& change = row.changes[i];
    if (change.token < row.first || change.token >= row.end) continue;
    float& logit = work.copy[change.token - row.first];
    logit = change.value == -INFINITY ? -INFINITY : logit + change.value;
  }
  if (row.num_counted) penalise(row, work);
}

int64_t choose_token(const SampleRow& row, char* memory, int64_t& outcome) {
  Work work(memory, row.end - row.first);
  adjust(row, work);
  find_peaks(work);
  outcome = work.highest - work.highest == 0 ? kChosen : work.highest == -INFINITY ? kNoneLeft : kNotFinite;
  if (outcome != kChosen) return 0;
  if (row.temperature == 0) return first_highest(work) + row.first + row.offset;
  work.factor = 1.0f / row.temperature, work.min_p = row.min_p;
  return draw(work, row.top_k, row.top_p, row.number) + row.first + row.offset;
}

void sort_list(Candidate* list, int64_t count) {  // the highest key first; a shell sort, as lists are short
  for (int64_t gap = count / 2; gap > 0; gap /= 2)
    for (int64_t i = gap; i < count; i++) {
      const Candidate one = list[i];
      int64_t to = i;
      for (; to >= gap && list[to - gap].key < one.key; to -= gap) list[to] = list[to - gap];
      list[to] = one;
    }
}

void score_token(const ScoreRow& row, char* memory) {
  Work work(memory, row.size);
  work.x = row.logits;
  find_peaks(work);
  const float own = work.x[row.token];
  Ints num_higher = {};
  float rest[kSpan];
  for (int64_t s = 0; s < work.num_spans; s++)
    for (int j = 0; j < kSpan; j += kLanes) num_higher -= load(work.span(s, rest) + j) > all(own);
  *row.rank = 1;
  for (int i = 0; i < kLanes; i++) *row.rank += num_higher[i];
  const bool is_finite = work.highest - work.highest == 0;
  const double base = is_finite ? double(work.highest) + std::log(fill_weights(work)) : double(NAN);
  *row.logprob = double(own) - base;
  int64_t count = is_finite ? collect(work, bound_of(work, row.num_top)) : 0;
  if (count < row.num_top)
    for (count = 0; count < row.size; count++) work.list[count].key = key_of(work.x[count], count);
  count = at_most(row.num_top, keep_first<true>(work.list, count, 0, double(row.num_top)));
  sort_list(work.list, count);
  for (int64_t i = 0; i < count; i++) {
    row.top_ids[i] = id_of(work.list[i].key);
    row.top_logprobs[i] = double(work.x[row.top_ids[i]]) - base;
  }
}

}  // namespace
}  // namespace sampling

void sample(const SampleRow* rows, int64_t num_rows, int64_t* tokens, int64_t* outcomes, const Task& task) {
  task.share(0, num_rows, 1, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
      tokens[row] = sampling::choose_token(rows[row], task.own, outcomes[row]);
  });
}

void score(const ScoreRow* rows, int64_t num_rows, const Task& task) {
  task.share(0, num_rows, 1, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) sampling::score_token(rows[row], task.own);
  });
}

}  // namespace archerfish::LEVEL
