// Rows of any length in registers: whole ones, then one that is partly filled.
#pragma once
#include <cstdint>

#include "storage.h"

namespace lockstep {

// The lanes past n hold `fill`.
static inline Vec load_n(const float* p, int n, float fill) {
  if (n == kLanes) return load(p);
  float buffer[kLanes];
  store(buffer, splat(fill));
  memcpy(buffer, p, 4 * size_t(n));
  return load(buffer);
}

// The same for rows stored in bf16: widened exactly, rounded to nearest even when stored, NaN to a quiet NaN.
struct Bf16 {
  uint16_t bits;
};
typedef uint16_t HalfWords __attribute__((vector_size(2 * kLanes)));
static inline Vec load_n(const Bf16* p, int n) {
  HalfWords words = {};
  memcpy(&words, p, 2 * size_t(n));
  return from_bits(__builtin_convertvector(words, IVec) << 16);
}
static inline Vec load(const Bf16* p) { return load_n(p, kLanes); }
static inline void store_n(Bf16* p, Vec v, int n) {
  const IVec b = bits(v), rounded = (b + splat(int32_t(0x7fff)) + ((b >> 16) & splat(int32_t(1)))) >> 16;
  const IVec nan = (b >> 16) | splat(int32_t(0x40)), chosen = ((IVec)(v == v) & rounded) | (~(IVec)(v == v) & nan);
  const HalfWords words = __builtin_convertvector(chosen, HalfWords);
  memcpy(p, &words, 2 * size_t(n));
}
// f(T()) with the type that rows are stored in: bf16, or else fp32.
template <class F>
static inline auto with_storage(int64_t bf16, F f) {
  return bf16 ? f(Bf16()) : f(float());
}

// f(first element, number of elements) for each register of a row.
template <class F>
static inline void each_vector(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, int(n - i));
}

// Row sum over 16 lanes (see vec.h): step(lanes, first element, number of elements) adds one register; absent elements must add nothing.
template <class Step>
static inline void each_lane_group(int64_t n, Step step) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int g = 0; g < kGroup; g++) step(g, i + g * kLanes, kLanes);
  if (i < n)
    for (int g = 0; g < kGroup; g++) {
      const int64_t left = n - i - g * kLanes;
      step(g, i + g * kLanes, int(left < 0 ? 0 : left < kLanes ? left : kLanes));
    }
}

}  // namespace lockstep
