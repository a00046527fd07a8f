#include "tape.h"

#include <algorithm>
#include <string>

#include "bind_checks.h"

namespace archerfish {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

const Tape::Value& Tape::known(int value) const {
  check(value >= 0 && value < int(values_.size()), "The tape has no such value.");
  return values_[size_t(value)];
}

int Tape::value(Rows rows, int64_t row_bytes) {
  check(!is_planned_, "A tape that was replayed takes nothing more.");
  values_.push_back({rows, checked_size(row_bytes, "A row of a value has too few or too many bytes.")});
  return int(values_.size()) - 1;
}

int Tape::result(Rows rows, int64_t row_bytes) {
  int made = value(rows, row_bytes);
  values_.back().result = num_results_++;
  return made;
}

int Tape::constant(const void* memory, int64_t num_bytes, bool is_writable) {
  for (size_t v = 0; v < values_.size(); v++)
    if (values_[v].is_constant && values_[v].memory == memory && values_[v].num_bytes == num_bytes &&
        values_[v].is_writable == is_writable)
      return int(v);
  int made = value(Rows::kTokens, 1);
  Value& constant = values_.back();
  constant.is_constant = true, constant.is_writable = is_writable;
  constant.memory = memory, constant.num_bytes = num_bytes;
  return made;
}

void Tape::add(const std::vector<Use>& uses, Step step, Needs shared_bytes, int64_t own_bytes) {
  check(!is_planned_, "A tape that was replayed takes nothing more.");
  std::vector<int> used;
  for (const Use& use : uses) {
    if (use.is_optional && use.value < 0) continue;
    const Value& value = known(use.value);
    check(!use.is_written || value.is_writable, "An operation would write into a constant that is read-only.");
    check(value.is_constant || (value.rows == use.rows && value.row_bytes == use.row_bytes),
          "A value has other rows than the operation takes.");
    used.push_back(use.value);
  }
  for (const Use& use : uses) {
    if (use.value < 0) continue;
    Value& value = values_[size_t(use.value)];
    value.last_use = int(steps_.size());
    if (use.is_written) value.route = -1;
    if (value.is_constant) constant_uses_.push_back(use);
  }
  steps_.push_back({std::move(used), std::move(step), std::move(shared_bytes), own_bytes});
}

void Tape::limit(Input which, int64_t least, int64_t end) {
  Limit& limit = limits_[int(which)];
  limit.is_used = true;
  limit.least = std::max(limit.least, least), limit.end = std::min(limit.end, end);
}

void Tape::set_routed(int ids, int order, int64_t num_experts, int64_t num_chosen) {
  values_[size_t(ids)].route = values_[size_t(order)].route = int(routings_.size());
  routings_.push_back({num_experts, num_chosen});
}

void Tape::check_routed(int ids, int order, int64_t num_experts, int64_t num_chosen) const {
  const int route = known(ids).route;
  check(ids != order && route >= 0 && known(order).route == route, "Experts take what one routing has written.");
  const Routing& found = routings_[size_t(route)];
  check(found.num_experts == num_experts && found.num_chosen == num_chosen,
        "Experts have other sizes than their routing.");
}

namespace {

const char* const kInputNames[] = {"Token ids",     "Positions",       "Slots",        "Block ids",
                                   "Starts",        "Context lengths", "Kept rows",    "Type ids",
                                   "Previous rows", "Source slots",    "Target slots", "Starts of pieces",
                                   "First pieces",  "Adapter slots"};
static_assert(sizeof kInputNames / sizeof *kInputNames == size_t(Input::kCount), "each input has a name");

// How many numbers a replay reads of an input.
int64_t count_of(Input which, const Sizes& sizes) {
  switch (which) {
    case Input::kBlockTables:
      return sizes.of(Rows::kSequences) * sizes.table_width;
    case Input::kStarts:
    case Input::kFirstPieces:
      return sizes.of(Rows::kSequences) + 1;
    case Input::kContextLens:
      return sizes.of(Rows::kSequences);
    case Input::kKeptRows:
      return sizes.of(Rows::kKept);
    case Input::kSources:
    case Input::kTargets:
      return sizes.num_pieces;
    case Input::kPieceStarts:
      return sizes.num_pieces + 1;
    default:
      return sizes.of(Rows::kTokens);
  }
}

void check_range(Input which, int64_t lowest, int64_t highest, int64_t least, int64_t end) {
  if (lowest >= least && highest < end) return;
  const std::string first = least == INT64_MIN ? "up to " : "from " + std::to_string(least) + " to ";
  const std::string found = std::to_string(lowest) + " to " + std::to_string(highest);
  const std::string name = kInputNames[int(which)];
  throw nb::value_error(
      (name + " must be " + first + std::to_string(end - 1) + ", but go from " + found + ".").c_str());
}

}  // namespace

void Tape::check_input(Input which, const Sizes& sizes, const InputArray& given) const {
  const Limit& limit = limits_[int(which)];
  const int64_t count = count_of(which, sizes), num_tokens = sizes.of(Rows::kTokens);
  if (given.count < count) {
    const std::string has = std::to_string(given.count) + " numbers, but the step reads " + std::to_string(count) + ".";
    throw nb::value_error((std::string(kInputNames[int(which)]) + ": the array has " + has).c_str());
  }
  if (!count || which == Input::kBlockTables) return;
  const int64_t* numbers = given.numbers;
  const auto [lowest, highest] = std::minmax_element(numbers, numbers + count);
  switch (which) {
    case Input::kStarts:
    case Input::kPieceStarts:
    case Input::kFirstPieces:
      check_range(which, *lowest, *highest, 0, (which == Input::kFirstPieces ? sizes.num_pieces : num_tokens) + 1);
      for (int64_t i = 1; i < count; i++)
        check(numbers[i] - numbers[i - 1] >= limit.least, "Starts must ascend, and a part that is read has some rows.");
      return;
    case Input::kKeptRows:
    case Input::kPrevious:
      return check_range(which, *lowest, *highest, limit.least, num_tokens);
    case Input::kContextLens:
      return check_range(which, *lowest, *highest, limit.least, sizes.table_width * sizes.block_size + 1);
    default:
      return check_range(which, *lowest, *highest, limit.least, limit.end);
  }
}

// Checks the blocks of each sequence's keys; tables may have anything behind these.
void Tape::check_blocks(const Sizes& sizes, const InputArray* inputs) const {
  check(sizes.block_size > 0, "Blocks have no tokens.");
  const int64_t* table = inputs[int(Input::kBlockTables)].numbers;
  const int64_t* lengths = inputs[int(Input::kContextLens)].numbers;
  const int64_t end = limits_[int(Input::kBlockTables)].end / sizes.block_size;
  for (int64_t s = 0; s < sizes.of(Rows::kSequences); s++, table += sizes.table_width) {
    int64_t lowest = 0, highest = -1;
    for (int64_t i = 0; i * sizes.block_size < lengths[s]; i++)
      lowest = std::min(lowest, table[i]), highest = std::max(highest, table[i]);
    check_range(Input::kBlockTables, lowest, highest, 0, end);
  }
}

void Tape::check_replay(const Sizes& sizes, const InputArray* inputs, const std::vector<int64_t>& result_bytes) {
  for (int64_t size :
       {sizes.rows[0], sizes.rows[1], sizes.rows[2], sizes.table_width, sizes.block_size, sizes.num_pieces})
    check(size >= 0 && size <= kMostSize, "A size of the step is negative or too large.");
  for (int which = 0; which < int(Input::kCount); which++)
    if (limits_[which].is_used) check_input(Input(which), sizes, inputs[which]);
  if (limits_[int(Input::kBlockTables)].is_used) check_blocks(sizes, inputs);
  for (const Use& use : constant_uses_)
    check(sizes.of(use.rows) * use.row_bytes <= values_[size_t(use.value)].num_bytes, "A constant has too few rows.");
  check(int(result_bytes.size()) == num_results_, "The step gives another number of results than the tape has.");
  int64_t num_bytes = 0;
  for (const Value& value : values_) {
    const int64_t size = sizes.of(value.rows) * value.row_bytes;
    num_bytes += size;
    check(num_bytes <= kMostBytes, "The step has more rows than any memory holds.");
    check(value.result < 0 || size <= result_bytes[size_t(value.result)], "An array for results is too small.");
  }
  for (const Check& each : checks_) each(sizes, inputs);
  std::lock_guard<std::mutex> lock(frames_lock_);
  if (!is_planned_) plan();
}

// Gives every value of the arena a slot; a slot is free again after the last use of its value.
void Tape::plan() {
  for (int step = 0; step < int(steps_.size()); step++)
    for (int used : steps_[size_t(step)].uses) {
      Value& value = values_[size_t(used)];
      if (value.slot >= 0 || value.is_constant || value.result >= 0) continue;
      int best = -1;
      for (int s = 0; s < int(slots_.size()); s++) {
        const Slot& slot = slots_[size_t(s)];
        if (slot.rows != value.rows || slot.free_after >= step) continue;
        if (best < 0 ||
            std::abs(slot.row_bytes - value.row_bytes) < std::abs(slots_[size_t(best)].row_bytes - value.row_bytes))
          best = s;
      }
      if (best < 0) {
        best = int(slots_.size());
        slots_.push_back({value.rows, value.row_bytes, -1});
      }
      slots_[size_t(best)].row_bytes = std::max(slots_[size_t(best)].row_bytes, value.row_bytes);
      slots_[size_t(best)].free_after = value.last_use;
      value.slot = best;
    }
  is_planned_ = true;
}

std::unique_ptr<Frame> Tape::take_frame() {
  std::lock_guard<std::mutex> lock(frames_lock_);
  if (frames_.empty()) return std::make_unique<Frame>();
  auto frame = std::move(frames_.back());
  frames_.pop_back();
  return frame;
}

void Tape::bind(Frame& frame, int num_threads, char* const* results) {
  std::vector<int64_t> offsets(slots_.size());
  int64_t total = 0, shared = 0, own = 0;
  for (size_t s = 0; s < slots_.size(); s++)
    offsets[s] = total, total += aligned(slots_[s].row_bytes * frame.sizes.of(slots_[s].rows));
  for (const Part& part : steps_) {
    if (part.shared_bytes) shared = std::max(shared, part.shared_bytes(frame.sizes));
    own = std::max(own, part.own_bytes);
  }
  if (int(frame.own.size()) < num_threads) frame.own.resize(size_t(num_threads));
  auto room = [&](Memory& memory, int64_t bytes) {
    const int64_t before = memory.size();
    char* found = memory.room(bytes);
    if (memory.size() > before) __atomic_add_fetch(&num_allocations, 1, __ATOMIC_RELAXED);
    return found;
  };
  char* arena = room(frame.arena, total);
  room(frame.shared, shared);
  for (Memory& memory : frame.own) room(memory, own);
  frame.places.resize(values_.size());
  for (size_t v = 0; v < values_.size(); v++) {
    const Value& value = values_[v];
    if (value.is_constant)
      frame.places[v] = const_cast<char*>(static_cast<const char*>(value.memory));
    else if (value.result >= 0)
      frame.places[v] = results[value.result];
    else if (value.slot >= 0)
      frame.places[v] = arena + offsets[size_t(value.slot)];
  }
}

void Tape::run(Threads& threads, int num_threads, const Sizes& sizes, const InputArray* inputs, char* const* results) {
  auto frame = take_frame();
  num_threads = std::max(1, std::min(num_threads, threads.count()));
  frame->kernels = kernels_, frame->sizes = sizes;
  for (int which = 0; which < int(Input::kCount); which++) frame->inputs[which] = inputs[which].numbers;
  bind(*frame, num_threads, results);
  frame->counters.assign(steps_.size() * 2, Counter{0});
  threads.run(num_threads, [&](int thread) {
    Task task{thread, num_threads, nullptr, &frame->barrier, frame->shared.start(), frame->own[size_t(thread)].start()};
    for (size_t step = 0; step < steps_.size(); step++) {
      task.counters = frame->counters.data() + 2 * step;
      steps_[step].step(*frame, task);
      if (step + 1 < steps_.size()) task.wait();
    }
  });
  std::lock_guard<std::mutex> lock(frames_lock_);
  num_replays++;
  frames_.push_back(std::move(frame));
}

}  // namespace archerfish
