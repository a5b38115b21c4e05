// Exact sums: fp32 values are turned into int64 fixed point, round(v * 2^s) with ties to even, and added as integers.
#pragma once
#include "vec.h"

namespace lockstep {

constexpr double kFixedLimit = 0x1p61;  // a value or a partial sum below it can be added to an accumulator below 2^62 without wrapping round

// sum[i] += round(v[i] * scale). `small` promises |v[i] * scale| < 2^51 for every lane.
static inline void add_fixed(Vec v, double scale, bool small, int64_t* sum) {
#if LOCKSTEP_LANES == 16
  (void)small;
  __m512d s = _mm512_set1_pd(scale);
  __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
  _mm512_storeu_si512(sum, _mm512_add_epi64(_mm512_loadu_si512(sum), _mm512_cvtpd_epi64(_mm512_mul_pd(low, s))));
  _mm512_storeu_si512(sum + 8, _mm512_add_epi64(_mm512_loadu_si512(sum + 8), _mm512_cvtpd_epi64(_mm512_mul_pd(high, s))));
#else
#if LOCKSTEP_LANES == 8
  if (small) {  // the low bits of d + 1.5 * 2^52 are the rounded integer
    const __m256d s = _mm256_set1_pd(scale), magic = _mm256_set1_pd(0x1.8p52);
    for (int h = 0; h < 2; h++) {
      __m256d d = _mm256_cvtps_pd(h ? _mm256_extractf128_ps((__m256)v, 1) : _mm256_castps256_ps128((__m256)v));
      __m256i i = _mm256_sub_epi64(_mm256_castpd_si256(_mm256_add_pd(_mm256_mul_pd(d, s), magic)), _mm256_castpd_si256(magic));
      __m256i* p = (__m256i*)(sum + 4 * h);
      _mm256_storeu_si256(p, _mm256_add_epi64(_mm256_loadu_si256(p), i));
    }
    return;
  }
#endif
  (void)small;
  for (int i = 0; i < kLanes; i++) sum[i] += __builtin_llrint(double(v[i]) * scale);
#endif
}

// Bits of the largest magnitude; NaN counts as larger than any number.
static inline IVec max_bits(IVec a, Vec v) {
  IVec b = bits(abs(v));
  return (IVec)select((IVec)(a < b), (Vec)b, (Vec)a);
}
static inline float max_lane(IVec a) {
  int32_t most = 0;
  for (int i = 0; i < kLanes; i++) most = a[i] > most ? a[i] : most;
  float value;
  memcpy(&value, &most, 4);
  return value;
}

// acc[i] += sum[i], sum[i] = 0; true when a result reaches 2^62 in magnitude.
static inline bool flush_fixed(int64_t* acc, int64_t* sum, int64_t count) {
  uint64_t seen = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t value = acc[i] + sum[i], sign = value >> 63;
    acc[i] = value;
    sum[i] = 0;
    seen |= uint64_t((value ^ sign) - sign);
  }
  return seen >> 62;
}

}  // namespace lockstep
