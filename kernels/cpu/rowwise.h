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
