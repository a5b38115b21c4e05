// fp64 functions for random numbers and tables: plain loops vectorise them. Only IEEE + - * / sqrt and integer operations in a fixed order
// (no FMA, no libm), so every build and compiler gives the same bits. Errors are a few fp64 ulp; callers round the result once to fp32.
#pragma once
#include <cstdint>
#include <cstring>

namespace lockstep {

static inline uint64_t bits64(double x) { uint64_t b; memcpy(&b, &x, 8); return b; }
static inline double from_bits64(uint64_t b) { double x; memcpy(&x, &b, 8); return x; }

constexpr double kRoundMagic = 6755399441055744.0;  // 1.5 * 2^52: adding and subtracting it rounds |x| < 2^51 to the nearest even integer
constexpr uint64_t kRoundMagicBits = 0x4338000000000000ull;

// Natural logarithm of a positive normal number: x = 2^k * m with sqrt(1/2) <= m < sqrt(2), s = (m - 1) / (m + 1),
// log m = 2 atanh s = 2 (s + s^3/3 + s^5/5 + ...).
static inline double log_f64(double x) {
  const uint64_t sqrt_half = 0x3fe6a09e667f3bcdull, one = 0x3ff0000000000000ull;
  const uint64_t shifted = bits64(x) + (one - sqrt_half);
  const double k = from_bits64(kRoundMagicBits + ((shifted >> 52) - 1023)) - kRoundMagic;
  const double f = from_bits64((shifted & 0x000fffffffffffffull) + sqrt_half) - 1.0;
  const double s = f / (2.0 + f), z = s * s;
  double p = 1.0 / 23;
  p = p * z + 1.0 / 21;
  p = p * z + 1.0 / 19;
  p = p * z + 1.0 / 17;
  p = p * z + 1.0 / 15;
  p = p * z + 1.0 / 13;
  p = p * z + 1.0 / 11;
  p = p * z + 1.0 / 9;
  p = p * z + 1.0 / 7;
  p = p * z + 1.0 / 5;
  p = p * z + 1.0 / 3;
  const double ln2_high = 0x1.62e42fefa38p-1, ln2_low = 0x1.ef35793c7673p-45;  // k * ln2_high is exact
  return k * ln2_high + (k * ln2_low + 2.0 * (s + s * (z * p)));
}

// Sine and cosine of an angle in turns, 0 <= turns < 2^40: the quarter turn is split off exactly, Taylor series within an eighth of a turn.
static inline void sincos_turns(double turns, double& sine, double& cosine) {
  const double quarters = turns * 4.0, shifted = quarters + kRoundMagic;
  const uint64_t quadrant = bits64(shifted) & 3;
  const double a = (quarters - (shifted - kRoundMagic)) * 1.5707963267948966, z = a * a;
  double p = 1.0 / 355687428096000.0, q = 1.0 / 20922789888000.0;  // 1/17!, 1/16!
  p = p * z - 1.0 / 1307674368000.0;
  q = q * z - 1.0 / 87178291200.0;
  p = p * z + 1.0 / 6227020800.0;
  q = q * z + 1.0 / 479001600.0;
  p = p * z - 1.0 / 39916800.0;
  q = q * z - 1.0 / 3628800.0;
  p = p * z + 1.0 / 362880.0;
  q = q * z + 1.0 / 40320.0;
  p = p * z - 1.0 / 5040.0;
  q = q * z - 1.0 / 720.0;
  p = p * z + 1.0 / 120.0;
  q = q * z + 1.0 / 24.0;
  p = p * z - 1.0 / 6.0;
  q = q * z - 0.5;
  const double s = a + a * (z * p), c = 1.0 + z * q;
  const double swapped_s = (quadrant & 1) ? c : s, swapped_c = (quadrant & 1) ? s : c;
  sine = from_bits64(bits64(swapped_s) ^ ((quadrant & 2) << 62));
  cosine = from_bits64(bits64(swapped_c) ^ (((quadrant + 1) & 2) << 62));
}

}  // namespace lockstep
