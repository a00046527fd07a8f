#include "threads.h"

#include <sched.h>

#include <map>

namespace archerfish {
namespace {

constexpr int kSpins = 4000;         // of a barrier, until it lets others run: some 20 microseconds
constexpr int64_t kIdleSpins = 60000;  // between two calls, until a thread sleeps: some 300 microseconds

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace

void Barrier::wait(int num_threads) {
  const int mine = __atomic_load_n(&generation, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&num_waiting, 1, __ATOMIC_ACQ_REL) == num_threads) {
    __atomic_store_n(&num_waiting, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&generation, mine + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int spins = 0; __atomic_load_n(&generation, __ATOMIC_ACQUIRE) == mine; spins++) {
    if (spins < kSpins) pause();
    else sched_yield();
  }
}

Threads::Threads(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
  for (int thread = 1; thread < num_threads_; thread++) std::thread([this, thread] { serve(thread); }).detach();
}

Threads& Threads::of(int num_threads) {
  static std::mutex lock;
  static std::map<int, Threads*> known;
  std::lock_guard<std::mutex> only(lock);
  Threads*& found = known[num_threads];
  if (!found) found = new Threads(num_threads);
  return *found;
}

void Threads::run(int num_threads, const std::function<void(int)>& work) {
  num_threads = num_threads < count() ? num_threads : count();
  if (num_threads <= 1) return work(0);
  std::lock_guard<std::mutex> only(running_);
  work_ = &work, num_wanted_ = num_threads;
  __atomic_store_n(&num_busy_, num_threads_ - 1, __ATOMIC_RELAXED);
  __atomic_add_fetch(&generation_, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&num_asleep_, __ATOMIC_SEQ_CST)) {
    std::lock_guard<std::mutex> lock(sleeping_);
    wake_.notify_all();
  }
  work(0);
  for (int spins = 0; __atomic_load_n(&num_busy_, __ATOMIC_ACQUIRE); spins++) {
    if (spins < kSpins) pause();
    else sched_yield();
  }
}

void Threads::serve(int thread) {
  int64_t seen = 0;
  for (;;) {
    for (int64_t spins = 0; __atomic_load_n(&generation_, __ATOMIC_ACQUIRE) == seen; spins++) {
      if (spins < kIdleSpins) {
        pause();
        continue;
      }
      std::unique_lock<std::mutex> lock(sleeping_);
      __atomic_add_fetch(&num_asleep_, 1, __ATOMIC_SEQ_CST);
      wake_.wait(lock, [&] { return __atomic_load_n(&generation_, __ATOMIC_SEQ_CST) != seen; });
      __atomic_sub_fetch(&num_asleep_, 1, __ATOMIC_SEQ_CST);
    }
    seen = __atomic_load_n(&generation_, __ATOMIC_ACQUIRE);
    if (thread < num_wanted_) (*work_)(thread);
    __atomic_sub_fetch(&num_busy_, 1, __ATOMIC_ACQ_REL);
  }
}

}  // namespace archerfish
