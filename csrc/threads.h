// Threads that run one function together, again and again: they spin for a while between two calls, then sleep.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "kernels.h"

namespace archerfish {

class Threads {
 public:
  // The threads of this process for a number of them. They are never ended: they sleep when there is nothing to do.
  static Threads& of(int num_threads);
  int count() const { return num_threads_; }
  // Calls work(thread) for threads 0 to num_threads - 1; the caller is thread 0. One call at a time: others wait.
  void run(int num_threads, const std::function<void(int)>& work);

 private:
  explicit Threads(int num_threads);
  void serve(int thread);

  int num_threads_;
  std::mutex running_, sleeping_;
  std::condition_variable wake_;
  const std::function<void(int)>* work_ = nullptr;
  int num_wanted_ = 0;
  alignas(64) int64_t generation_ = 0;
  alignas(64) int num_busy_ = 0;
  alignas(64) int num_asleep_ = 0;
};

}  // namespace archerfish
