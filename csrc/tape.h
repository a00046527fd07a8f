// A pass of a model, recorded once as a list of operations and replayed with the numbers of each step.
//
// Values have a number of rows that is known when the tape is replayed. Those that are not inputs, constants or results
// lie in an arena, where a value takes the place of one that is not used any more. A replay allocates no memory for
// values, unless it has more rows than any before it.
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
  int constant(const void* memory);
  Rows rows_of(int value) const { return values_[size_t(value)].rows; }

  using Step = std::function<void(const Frame&, const Task&)>;
  using Needs = std::function<int64_t(const Sizes&)>;
  void add(std::vector<int> uses, Step step, Needs shared_bytes = nullptr, int64_t own_bytes = 0);

  // Replays the tape; results: one address for each result, in the order in which they were asked for.
  void run(Threads& threads, int num_threads, const Sizes& sizes, const int64_t* const* inputs, char* const* results);

  int64_t num_replays = 0, num_allocations = 0;

 private:
  struct Value {
    Rows rows;
    int64_t row_bytes;
    int slot = -1, result = -1, last_use = -1;
    const void* memory = nullptr;
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
  void plan();
  std::unique_ptr<Frame> take_frame();
  void bind(Frame& frame, int num_threads, char* const* results);

  const Kernels* kernels_;
  std::vector<Value> values_;
  std::vector<Slot> slots_;
  std::vector<Part> steps_;
  int num_results_ = 0;
  bool is_planned_ = false;
  std::mutex frames_lock_;
  std::vector<std::unique_ptr<Frame>> frames_;  // that no replay uses
};

}  // namespace archerfish
