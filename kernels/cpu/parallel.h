// A thread pool that decides nothing: tasks are independent, so which thread runs them, and when, changes no bit.
// Threads start at the first parallel call of a process (fork() before that is safe, and a forked child makes its own).
// While one thread uses the pool, calls from others, and nested calls, run serially in their caller.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep {

// Round to nearest, no flush to zero, no exceptions raised, for the life of the object; one at the entry of every exported function.
class FloatMode {
 public:
  FloatMode() {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    _mm_setcsr(0x1f80);
    asm volatile("" ::: "memory");
#endif
  }
  ~FloatMode() {
#if defined(__x86_64__)
    asm volatile("" ::: "memory");
    _mm_setcsr(saved_);
#endif
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  unsigned saved_ = 0;
};

using TaskFunction = void (*)(void* context, int64_t begin, int64_t end);
int num_threads();
void run_tasks(int64_t count, int64_t grain, TaskFunction function, void* context);

// f(begin, end) over [0, count) in pieces of at most `grain` (> 0) items. One piece, or one thread: a plain call of f(0, count).
template <class F>
void parallel_for(int64_t count, int64_t grain, F&& f) {
  if (count <= 0) return;
  if (count <= grain || num_threads() == 1) {
    f(int64_t(0), count);
    return;
  }
  using G = std::remove_reference_t<F>;
  run_tasks(
      count, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<G*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// Grain for items that cost `work` elementary operations each: a piece below some 20 microseconds isn't worth a thread.
static inline int64_t grain_for(int64_t work) {
  int64_t grain = (int64_t(1) << 16) / (work > 0 ? work : 1);
  return grain > 0 ? grain : 1;
}

// Scratch floats of this thread, 64-byte aligned, kept between calls. Slots 0..3 are separate buffers.
float* scratch(int slot, size_t count);

}  // namespace lockstep
