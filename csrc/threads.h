// Threads that run one function together, again and again: they spin for a while between two calls, then sleep.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace archerfish {

constexpr int kMostCores = 1024;  // CPU_SETSIZE

class Threads {
 public:
  // The threads of this process for a number of them. They are never ended: they sleep when there is nothing to do.
  static Threads& of(int num_threads);
  int count() const { return num_threads_; }
  // Binds each thread but the caller's to one core, in turn, beginning with the second: the first is for the caller.
  void pin(const std::vector<int>& cores);
  // Calls work(thread) for threads 0 to num_threads - 1; the caller is thread 0. One call at a time: others wait.
  void run(int num_threads, const std::function<void(int)>& work);

 private:
  explicit Threads(int num_threads);
  void serve(int thread);

  int num_threads_;
  std::vector<std::thread> threads_;
  std::vector<int> is_asleep_;  // by thread
  std::mutex running_, sleeping_;
  std::condition_variable wake_;
  const std::function<void(int)>* work_ = nullptr;
  Barrier end_;
  alignas(64) int64_t call_ = 0;  // the number of the call, and in the low bits how many threads it wants
};

}  // namespace archerfish
