// Exact sums: acc += int64(round_half_even(v * 2^s)). Integer addition is associative, so neither order nor placement can matter.
#pragma once
#include <cstdint>

#include "vmath_extra.h"

namespace lockstep {

// round_half_even(d) for |d| < 2^61 where d has at most 24 significant bits: two exact halves, as AVX2 has no fp64 -> int64 conversion.
static inline uint64_t round_to_int64(double d) {
  const double high = d * 0x1p-40 + kRoundMagic;
  const double low = d - (high - kRoundMagic) * 0x1p40;  // exact, |low| <= 2^39; an even number was taken away, so ties stay ties
  return ((bits64(high) - kRoundMagicBits) << 40) + (bits64(low + kRoundMagic) - kRoundMagicBits);
}

static inline bool too_large(double d) { return !(__builtin_fabs(d) < 0x1p61); }
static inline bool sum_too_large(uint64_t acc) { return acc + ((1ull << 62) - 1) > (1ull << 63) - 2; }  // |acc| >= 2^62

// acc[i] += fixed(v[i]); true when a value or a sum was too large (acc is then of no use).
static inline bool accumulate_fixed(int64_t* acc, const float* v, int64_t n, double scale) {
  uint64_t bad = 0;
  for (int64_t i = 0; i < n; i++) {
    const double d = double(v[i]) * scale;
    const uint64_t sum = uint64_t(acc[i]) + round_to_int64(d);
    bad |= uint64_t(too_large(d)) | uint64_t(sum_too_large(sum));
    acc[i] = int64_t(sum);
  }
  return bad != 0;
}

}  // namespace lockstep
