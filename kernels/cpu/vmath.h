// exp, log, silu and rsqrt from IEEE-754 operations in a fixed order: every build and every lane gives the same bits.
// Range reduction by Cody and Waite ("Software Manual for the Elementary Functions", 1980); polynomials: own Chebyshev fits.
// Largest error seen over all fp32 arguments: tests/test_elementwise.py. NaN in, NaN out.
#pragma once
#include "vec.h"

namespace lockstep {

// Subnormal results are right too; exp(x > 88.7228) is inf, exp(x < -103.98) is 0.
static inline Vec exp(Vec x) {
  const Vec magic = splat(0x1.8p23f);  // adding it rounds to the nearest integer, ties to even
  x = min(x, splat(89.0f));
  x = max(x, splat(-104.0f));
  Vec t = fma(x, splat(0x1.715476p+0f), magic), n = t - magic;
  IVec e = bits(t) - bits(magic);
  Vec r = fma(n, splat(-0x1.62e4p-1f), x);  // n * this part of log 2 is exact
  r = fma(n, splat(-0x1.7f7d1cp-20f), r);
  Vec p = splat(0x1.a151bcp-13f);
  p = fma(p, r, splat(0x1.6d4366p-10f));
  p = fma(p, r, splat(0x1.1110c6p-7f));
  p = fma(p, r, splat(0x1.5554e8p-5f));
  p = fma(p, r, splat(0x1.555556p-3f));
  p = fma(p, r, splat(0.5f));
  p = fma(r * r, p, r) + splat(1.0f);
  IVec half = e >> 1;  // 2^n in two exact steps: one rounding even where the result is subnormal, inf where it is too large
  Vec scale1 = from_bits((half + splat(int32_t(127))) << 23), scale2 = from_bits((e - half + splat(int32_t(127))) << 23);
  return p * scale1 * scale2;
}

// log(0) is -inf, log(x < 0) is NaN; subnormal arguments are right too.
static inline Vec log(Vec x) {
  IVec small = (IVec)(x < splat(0x1p-126f));
  Vec y = select(small, x * splat(0x1p23f), x);
  const IVec one = splat(int32_t(0x3f800000)), root_half = splat(int32_t(0x3f3504f3));
  IVec shifted = bits(y) - root_half;
  IVec e = shifted >> 23;  // y = 2^e * (1 + f), 1 + f in [sqrt(1/2), sqrt(2))
  Vec f = from_bits((shifted & splat(int32_t(0x007fffff))) + root_half) - from_bits(one);
  Vec k = __builtin_convertvector(e - (small & splat(int32_t(23))), Vec);
  Vec p = splat(0x1.24db16p-4f);
  p = fma(p, f, splat(-0x1.da07dap-4f));
  p = fma(p, f, splat(0x1.ddafbap-4f));
  p = fma(p, f, splat(-0x1.fc5932p-4f));
  p = fma(p, f, splat(0x1.23d640p-3f));
  p = fma(p, f, splat(-0x1.555ee0p-3f));
  p = fma(p, f, splat(0x1.999d52p-3f));
  p = fma(p, f, splat(-0x1.fffff2p-3f));
  p = fma(p, f, splat(0x1.555554p-2f));
  Vec square = f * f;
  Vec low = fma(k, splat(0x1.7f7d1cp-20f), fma(f * p, square, splat(-0.5f) * square));
  Vec result = fma(k, splat(0x1.62e4p-1f), f + low);
  const Vec zero = {}, infinity = from_bits(splat(int32_t(0x7f800000)));
  result = select((IVec)(x < infinity), result, x);  // inf and NaN pass through
  result = select((IVec)(x < zero), from_bits(splat(int32_t(0x7fc00000))), result);
  return select((IVec)(x == zero), -infinity, result);
}

static inline Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }
static inline Vec silu(Vec x) { return x / (splat(1.0f) + exp(-x)); }
static inline Vec rsqrt(Vec x) { return splat(1.0f) / sqrt(x); }

// The same bits for one number.
static inline float exp(float x) { return exp(splat(x))[0]; }
static inline float log(float x) { return log(splat(x))[0]; }
static inline float sigmoid(float x) { return sigmoid(splat(x))[0]; }
static inline float silu(float x) { return silu(splat(x))[0]; }
static inline float rsqrt(float x) { return 1.0f / sqrt(x); }

}  // namespace lockstep
