#include "parallel.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace lockstep {
namespace {

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

std::atomic<int> wanted_threads{1};
thread_local bool inside_pool = false;

// Looks for some 30 microseconds, as long as it takes to wake a sleeping thread: calls of a layer follow each other faster than that.
template <class Condition>
void spin_while(Condition condition) {
  for (int i = 0; i < 2000 && condition(); i++) pause_briefly();
}

class Pool {
 public:
  Pool(int workers) : process_(getpid()), workers_(workers) {
    for (int i = 0; i < workers; i++) std::thread([this] { work(); }).detach();
  }
  bool ours() const { return process_ == getpid(); }
  bool fits(int workers) const { return ours() && workers_ == workers; }

  // Returns when every piece is done; a worker that wakes up too late doesn't hold it up.
  void run(int64_t count, int64_t grain, TaskFunction function, void* context) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      count_ = count, grain_ = grain, function_ = function, context_ = context;
      next_.store(0, std::memory_order_relaxed);
      open_ = true;
      generation_++;
    }
    start_.notify_all();
    take_pieces();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = false;
    }
    spin_while([this] { return active_ != 0; });
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return active_ == 0; });
  }

  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    start_.notify_all();
  }

 private:
  void take_pieces() {
    inside_pool = true;
    for (int64_t begin; (begin = next_.fetch_add(grain_, std::memory_order_relaxed)) < count_;)
      function_(context_, begin, begin + grain_ < count_ ? begin + grain_ : count_);
    inside_pool = false;
  }
  void work() {
    FloatMode mode;
    std::unique_lock<std::mutex> lock(mutex_);
    for (uint64_t seen = 0;;) {
      if (!open_ || generation_ == seen) {
        const uint64_t last = generation_;
        lock.unlock();
        spin_while([&] { return generation_ == last; });
        lock.lock();
      }
      start_.wait(lock, [&] { return stopping_ || (open_ && generation_ != seen); });
      if (stopping_) return;
      seen = generation_;
      active_++;
      lock.unlock();
      take_pieces();
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  const pid_t process_;
  const int workers_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> active_{0};  // workers on the open job
  bool open_ = false, stopping_ = false;
  int64_t count_ = 0, grain_ = 1;
  TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  std::atomic<int64_t> next_{0};
};

std::atomic<bool> pool_taken{false};
std::atomic<pid_t> taken_by{0};
Pool* pool = nullptr;  // a stopped or inherited pool is left to leak: its threads may still hold the mutex

bool take_pool() {
  pid_t self = getpid();
  if (pool_taken.load() && taken_by.load() != self) {  // forked while the parent was computing: the flag is the parent's
    pid_t other = taken_by.load();
    if (other != self && taken_by.compare_exchange_strong(other, self)) pool_taken.store(false);
  }
  bool expected = false;
  if (!pool_taken.compare_exchange_strong(expected, true)) return false;
  taken_by.store(self);
  return true;
}

}  // namespace

int num_threads() { return wanted_threads.load(std::memory_order_relaxed); }

void run_tasks(int64_t count, int64_t grain, TaskFunction function, void* context) {
  int workers = num_threads() - 1;
  if (workers < 1 || inside_pool || !take_pool()) {
    function(context, 0, count);
    return;
  }
  if (pool && pool->ours() && !pool->fits(workers)) pool->stop();
  if (!pool || !pool->fits(workers)) pool = new Pool(workers);
  pool->run(count, grain, function, context);
  pool_taken.store(false);
}

float* scratch(int slot, size_t count) {
  struct Buffers {
    float* data[4] = {};
    size_t size[4] = {};
    ~Buffers() {
      for (float* p : data) free(p);
    }
  };
  static thread_local Buffers buffers;
  if (buffers.size[slot] < count) {
    free(buffers.data[slot]);
    size_t bytes = (count * 4 + 4095) / 4096 * 4096 + 64;
    buffers.data[slot] = static_cast<float*>(aligned_alloc(64, bytes));
    buffers.size[slot] = count;
  }
  return buffers.data[slot];
}

}  // namespace lockstep

extern "C" {
void lockstep_set_threads(int n) { lockstep::wanted_threads.store(n < 1 ? 1 : n); }
int lockstep_num_threads() { return lockstep::num_threads(); }
int lockstep_lanes() { return LOCKSTEP_LANES; }
}
