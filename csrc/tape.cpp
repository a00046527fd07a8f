#include "tape.h"

#include <algorithm>

namespace archerfish {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

int Tape::value(Rows rows, int64_t row_bytes) {
  values_.push_back({rows, row_bytes});
  return int(values_.size()) - 1;
}

int Tape::result(Rows rows, int64_t row_bytes) {
  int made = value(rows, row_bytes);
  values_.back().result = num_results_++;
  return made;
}

int Tape::constant(const void* memory) {
  int made = value(Rows::kTokens, 0);
  values_.back().memory = memory;
  return made;
}

void Tape::add(std::vector<int> uses, Step step, Needs shared_bytes, int64_t own_bytes) {
  uses.erase(std::remove_if(uses.begin(), uses.end(), [](int value) { return value < 0; }), uses.end());
  for (int value : uses) values_[size_t(value)].last_use = int(steps_.size());
  steps_.push_back({std::move(uses), std::move(step), std::move(shared_bytes), own_bytes});
}

// Gives every value of the arena a slot; a slot is free again after the last use of its value.
void Tape::plan() {
  for (int step = 0; step < int(steps_.size()); step++)
    for (int used : steps_[size_t(step)].uses) {
      Value& value = values_[size_t(used)];
      if (value.slot >= 0 || value.memory || value.result >= 0) continue;
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
  if (!is_planned_) plan();
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
    if (value.memory)
      frame.places[v] = const_cast<char*>(static_cast<const char*>(value.memory));
    else if (value.result >= 0)
      frame.places[v] = results[value.result];
    else if (value.slot >= 0)
      frame.places[v] = arena + offsets[size_t(value.slot)];
  }
}

void Tape::run(Threads& threads, int num_threads, const Sizes& sizes, const int64_t* const* inputs,
               char* const* results) {
  auto frame = take_frame();
  num_threads = std::max(1, std::min(num_threads, threads.count()));
  frame->kernels = kernels_, frame->sizes = sizes;
  std::copy(inputs, inputs + int(Input::kCount), frame->inputs);
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
