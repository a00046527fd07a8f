// A pass of a model, recorded once as a list of operations and replayed with the numbers of each step.
//
// Values have a number of rows that is known when the tape is replayed. Those that are not inputs, constants or results
// lie in an arena, where a value takes the place of one that is not used any more. A replay allocates no memory for
// values, unless it has more rows than any before it.
//
// Operations declare their values and limits when they are recorded. `check_replay` compares a step with these limits.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace archerfish {

enum class Rows : int { kTokens, kKept, kSequences, kCount };
enum class Input : int {
  kTokenIds,
  kPositions,
  kSlots,
  kBlockTables,
  kStarts,
  kContextLens,
  kKeptRows,
  kTypeIds,
  kPrevious,
  kSources,
  kTargets,
  kPieceStarts,
  kFirstPieces,
  kAdapters,
  kCount
};

// An operation reads or writes `row_bytes` of a value for each row.
struct Use {
  int value;
  Rows rows;
  int64_t row_bytes;
  bool is_written = false;
  bool is_optional = false;  // a negative value means none
};
inline Use reads(int value, Rows rows, int64_t numbers) { return {value, rows, 4 * numbers}; }
inline Use writes(int value, Rows rows, int64_t numbers) { return {value, rows, 4 * numbers, true}; }
inline Use optional(Use use) {
  use.is_optional = true;
  return use;
}

// An array of a step.
struct InputArray {
  const int64_t* numbers = nullptr;
  int64_t count = 0;
};

struct Sizes {
  int64_t rows[int(Rows::kCount)] = {};
  int64_t table_width = 0, block_size = 0, num_pieces = 0;
  int64_t of(Rows kind) const { return rows[int(kind)]; }
};

// Memory that only grows, from the start of a cache line on.
class Memory {
 public:
  int64_t size() const { return int64_t(memory_.size()); }
  char* start() {
    return memory_.data() + (kLine - int64_t(reinterpret_cast<uintptr_t>(memory_.data()) % kLine)) % kLine;
  }
  char* room(int64_t bytes) {
    if (size() < bytes + kLine) memory_.resize(size_t(bytes + kLine));
    return start();
  }

 private:
  std::vector<char> memory_;
};

// The memory of one replay.
struct Frame {
  const Kernels* kernels;
  Sizes sizes;
  const int64_t* inputs[int(Input::kCount)] = {};
  std::vector<char*> places;  // of values
  std::vector<Counter> counters;
  Barrier barrier;
  Memory arena, shared;
  std::vector<Memory> own;

  float* at(int value) const { return value < 0 ? nullptr : reinterpret_cast<float*>(places[size_t(value)]); }
  int32_t* ints(int value) const { return reinterpret_cast<int32_t*>(at(value)); }
  const int64_t* input(Input which) const { return inputs[int(which)]; }
};

class Tape {
 public:
  explicit Tape(const Kernels* kernels) : kernels_(kernels) {}

  int value(Rows rows, int64_t row_bytes);   // memory of the arena
  int result(Rows rows, int64_t row_bytes);  // memory that is given when the tape is replayed
  int constant(const void* memory, int64_t num_bytes, bool is_writable);
  Rows rows_of(int value) const { return known(value).rows; }
  int64_t constant_bytes(int value) const { return known(value).num_bytes; }

  using Step = std::function<void(const Frame&, const Task&)>;
  using Needs = std::function<int64_t(const Sizes&)>;
  void add(const std::vector<Use>& uses, Step step, Needs shared_bytes = nullptr, int64_t own_bytes = 0);

  // The operation reads an array of the step, with entries from `least` to `end` - 1. For arrays that say where parts
  // begin, `least` is the smallest size of a part. For block tables, `end` is the number of tokens in all blocks.
  void limit(Input which, int64_t least, int64_t end);
  // Called before each replay, after all limits were checked: raises an error if the operation cannot run.
  using Check = std::function<void(const Sizes&, const InputArray* inputs)>;
  void require(Check check) { checks_.push_back(std::move(check)); }
  // `route` has written these values; `experts` reads them as indices.
  void set_routed(int ids, int order, int64_t num_experts, int64_t num_chosen);
  void check_routed(int ids, int order, int64_t num_experts, int64_t num_chosen) const;

  // Raises a ValueError if the numbers of a replay do not fit. result_bytes: the size of each result's array.
  void check_replay(const Sizes& sizes, const InputArray* inputs, const std::vector<int64_t>& result_bytes);
  // Replays the tape after `check_replay`; results: one address for each result, in the order in which they were asked
  // for.
  void run(Threads& threads, int num_threads, const Sizes& sizes, const InputArray* inputs, char* const* results);

  int64_t num_replays = 0, num_allocations = 0;

 private:
  struct Value {
    Rows rows;
    int64_t row_bytes;
    int slot = -1, result = -1, last_use = -1;
    bool is_constant = false, is_writable = true;
    const void* memory = nullptr;  // a constant's array
    int64_t num_bytes = 0;         // size of `memory`
    int route = -1;                // the routing whose ids or order the value has
  };
  struct Limit {
    bool is_used = false;
    int64_t least = INT64_MIN, end = INT64_MAX;
  };
  struct Routing {
    int64_t num_experts, num_chosen;
  };
  struct Slot {
    Rows rows;
    int64_t row_bytes;
    int free_after;
  };
  struct Part {
    std::vector<int> uses;
    Step step;
    Needs shared_bytes;
    int64_t own_bytes;
  };
  const Value& known(int value) const;
  void check_input(Input which, const Sizes& sizes, const InputArray& given) const;
  void check_blocks(const Sizes& sizes, const InputArray* inputs) const;
  void plan();
  std::unique_ptr<Frame> take_frame();
  void bind(Frame& frame, int num_threads, char* const* results);

  const Kernels* kernels_;
  std::vector<Value> values_;
  std::vector<Slot> slots_;
  std::vector<Part> steps_;
  std::vector<Use> constant_uses_;
  std::vector<Check> checks_;
  std::vector<Routing> routings_;
  Limit limits_[int(Input::kCount)];
  int num_results_ = 0;
  bool is_planned_ = false;
  std::mutex frames_lock_;
  std::vector<std::unique_ptr<Frame>> frames_;  // that no replay uses
};

}  // namespace archerfish
