#include "threads.h"

#include <pthread.h>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <map>
#include <system_error>

namespace archerfish {
namespace {

constexpr int kSpins = 4000;           // of a barrier, until a thread sleeps: some 20 microseconds
constexpr int64_t kIdleSpins = 60000;  // between two calls: some 300 microseconds
constexpr int64_t kCountMask = 0xffff;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Sleeps until `word` has changed from `value` and wake_all was called; elsewhere than on Linux it lets others run.
void sleep_on(int* word, int value) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  sched_yield();
#endif
}

void wake_all(int* word) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
#endif
}

}  // namespace

void Barrier::wait(int num_threads) {
  const int mine = __atomic_load_n(&generation, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&num_waiting, 1, __ATOMIC_ACQ_REL) == num_threads) {
    __atomic_store_n(&num_waiting, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&generation, mine + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&num_asleep, __ATOMIC_SEQ_CST)) wake_all(&generation);
    return;
  }
  for (int spins = 0; __atomic_load_n(&generation, __ATOMIC_ACQUIRE) == mine; spins++) {
    if (spins < kSpins) {
      pause();
      continue;
    }
    __atomic_add_fetch(&num_asleep, 1, __ATOMIC_SEQ_CST);
    sleep_on(&generation, mine);
    __atomic_sub_fetch(&num_asleep, 1, __ATOMIC_RELAXED);
  }
}

Threads::Threads(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads), is_asleep_(size_t(num_threads_)) {
  for (int thread = 1; thread < num_threads_; thread++) {
    try {
      threads_.emplace_back([this, thread] { serve(thread); });
    } catch (const std::system_error&) {  // the system gives no more threads
      num_threads_ = thread;
    }
  }
}

void Threads::pin(const std::vector<int>& cores) {
#if defined(__linux__)
  for (size_t i = 0; i < threads_.size() && !cores.empty(); i++) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(size_t(cores[(i + 1) % cores.size()]), &only);
    pthread_setaffinity_np(threads_[i].native_handle(), sizeof only, &only);
  }
#endif
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
  work_ = &work;
  __atomic_store_n(&call_, ((call_ | kCountMask) + 1) | num_threads, __ATOMIC_SEQ_CST);
  int num_asleep = 0;
  for (int thread = 1; thread < num_threads; thread++)
    num_asleep += __atomic_load_n(&is_asleep_[size_t(thread)], __ATOMIC_SEQ_CST);
  if (num_asleep) {
    std::lock_guard<std::mutex> lock(sleeping_);
    wake_.notify_all();
  }
  work(0);
  end_.wait(num_threads);
}

void Threads::serve(int thread) {
  int64_t seen = 0, call;
  auto is_wanted = [&] {
    call = __atomic_load_n(&call_, __ATOMIC_SEQ_CST);
    return call != seen && (call & kCountMask) > thread;
  };
  for (;;) {
    for (int64_t spins = 0; !is_wanted(); spins++) {
      if (spins < kIdleSpins) {
        pause();
        continue;
      }
      std::unique_lock<std::mutex> lock(sleeping_);
      __atomic_store_n(&is_asleep_[size_t(thread)], 1, __ATOMIC_SEQ_CST);
      wake_.wait(lock, is_wanted);
      __atomic_store_n(&is_asleep_[size_t(thread)], 0, __ATOMIC_SEQ_CST);
    }
    seen = call;
    (*work_)(thread);
    end_.wait(int(call & kCountMask));
  }
}

}  // namespace archerfish
