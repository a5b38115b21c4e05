// Exact sums: acc += int64(round_half_even(v * 2^s)). Integer addition is associative, so neither order nor placement can matter.
#pragma once
#include <cstdint>

#include "vec.h"
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
  int64_t i = 0;
#if LOCKSTEP_LANES == 16  // AVX512 has the conversion that is put together above: the same integers in half the time
  const __m512i limit = _mm512_set1_epi64((1ll << 62) - 1), range = _mm512_set1_epi64(INT64_MAX - 1);
  for (; i + 8 <= n; i += 8) {
    const __m512d d = _mm512_mul_pd(_mm512_cvtps_pd(_mm256_loadu_ps(v + i)), _mm512_set1_pd(scale));
    const __m512i sum = _mm512_add_epi64(_mm512_loadu_si512(acc + i), _mm512_cvtpd_epi64(d));
    bad |= _mm512_cmp_pd_mask(_mm512_abs_pd(d), _mm512_set1_pd(0x1p61), _CMP_NLT_UQ);
    bad |= _mm512_cmpgt_epu64_mask(_mm512_add_epi64(sum, limit), range);
    _mm512_storeu_si512(acc + i, sum);
  }
#endif
  for (; i < n; i++) {
    const double d = double(v[i]) * scale;
    const uint64_t sum = uint64_t(acc[i]) + round_to_int64(d);
    bad |= uint64_t(too_large(d)) | uint64_t(sum_too_large(sum));
    acc[i] = int64_t(sum);
  }
  return bad != 0;
}

}  // namespace lockstep
