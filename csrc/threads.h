// Threads that run one function together, again and again: they spin for a while between two calls, then sleep.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace archerfish {

class Threads {
 public:
  explicit Threads(int num_threads);
  ~Threads();
  int count() const { return int(workers_.size()) + 1; }
  // Calls work(thread) for threads 0 to num_threads - 1; the caller is thread 0. One call at a time: others wait.
  void run(int num_threads, const std::function<void(int)>& work);

 private:
  void serve(int thread);

  std::vector<std::thread> workers_;
  std::mutex running_, sleeping_;
  std::condition_variable wake_;
  const std::function<void(int)>* work_ = nullptr;
  int num_wanted_ = 0;
  alignas(64) int64_t generation_ = 0;
  alignas(64) int num_busy_ = 0;
  alignas(64) int num_asleep_ = 0;
  bool is_ending_ = false;
};

}  // namespace archerfish
