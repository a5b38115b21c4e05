// The register tile of every matrix product here: R rows by kColumns columns, each element one sequential chain of FMAs over k.
// Only the chain is fixed; the tile's shape is a tuning knob.
#pragma once
#include <type_traits>

#include "storage.h"

namespace lockstep {

#if LOCKSTEP_LANES == 16
constexpr int kRows = 8, kVecs = 3;
#elif LOCKSTEP_LANES == 8
constexpr int kRows = 6, kVecs = 2;
#else
constexpr int kRows = 4, kVecs = 2;
#endif
constexpr int kColumns = kVecs * kLanes;

// acc[i][j] = chain over k of a[i * a_row + k * a_k] * b[k * b_k + j]. Continues from acc.
template <int R, int NV, class T>
static inline __attribute__((always_inline)) void chain(const float* a, int64_t a_row, int64_t a_k, const T* b, int64_t b_k,
                                                        int64_t count, Vec (&acc)[R][NV]) {
  Vec c[R][NV];  // local, so that it stays in registers
  for (int i = 0; i < R; i++)
    for (int j = 0; j < NV; j++) c[i][j] = acc[i][j];
  for (int64_t k = 0; k < count; k++, a += a_k, b += b_k) {
    Vec row[NV];
    for (int j = 0; j < NV; j++) row[j] = load(b + j * kLanes);
    for (int i = 0; i < R; i++) {
      Vec x = splat(a[i * a_row]);
      for (int j = 0; j < NV; j++) c[i][j] = fma(x, row[j], c[i][j]);
    }
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < NV; j++) acc[i][j] = c[i][j];
}

// f(std::integral_constant<int, n>) for 1 <= n <= Max.
template <int Max, class F>
static inline void with_constant(int n, F&& f) {
  if constexpr (Max > 1) {
    if (n < Max) return with_constant<Max - 1>(n, f);
  }
  f(std::integral_constant<int, Max>{});
}

// `count` items in the fewest blocks of at most `most`, whose sizes differ by at most one: start of block i.
static inline int64_t num_blocks(int64_t count, int64_t most) { return (count + most - 1) / most; }
static inline int64_t block_start(int64_t count, int64_t blocks, int64_t i) { return count * i / blocks; }

}  // namespace lockstep
