// Fixed-point conversion and the exact norm. Vectorised by the compiler from plain loops of exact operations.
#include <algorithm>
#include <atomic>
#include <mutex>

#include "fixed_point.h"
#include "parallel.h"

using namespace lockstep;

extern "C" {

int reduce_to_fixed(const float* x, int64_t* out, int64_t n, double scale) {
  FloatMode mode;
  std::atomic<int> overflow{0};
  parallel_for(n, 1 << 14, [&](int64_t begin, int64_t end) {
    uint64_t bad = 0;
    for (int64_t i = begin; i < end; i++) {
      const double d = double(x[i]) * scale;
      bad |= uint64_t(too_large(d));
      out[i] = int64_t(round_to_int64(d));
    }
    if (bad) overflow = 1;
  });
  return overflow;
}

int reduce_from_fixed(const int64_t* acc, float* out, int64_t n, double divisor) {
  FloatMode mode;
  std::atomic<int> overflow{0};
  parallel_for(n, 1 << 14, [&](int64_t begin, int64_t end) {
    uint64_t bad = 0;
    for (int64_t i = begin; i < end; i++) {
      bad |= uint64_t(sum_too_large(uint64_t(acc[i])));
      out[i] = float(double(acc[i]) / divisor);
    }
    if (bad) overflow = 1;
  });
  return overflow;
}

// Bits of the largest magnitude; those of infinities and NaN are the largest.
uint32_t reduce_max_bits(const float* x, int64_t n) {
  std::atomic<uint32_t> result{0};
  parallel_for(n, 1 << 16, [&](int64_t begin, int64_t end) {
    uint32_t most = 0;
    for (int64_t i = begin; i < end; i++) {
      uint32_t b;
      memcpy(&b, x + i, 4);
      most = std::max(most, b & 0x7fffffffu);
    }
    uint32_t seen = result;
    while (seen < most && !result.compare_exchange_weak(seen, most)) {
    }
  });
  return result;
}

// limbs[0] += whole units, limbs[1] += the rest in units of 2^-28, of x * x * scale^2 < 2^28. `scale_squared` is a power of two.
void reduce_square_limbs(const float* x, int64_t n, double scale_squared, int64_t* limbs) {
  FloatMode mode;
  std::mutex mutex;
  parallel_for(n, 1 << 16, [&](int64_t begin, int64_t end) {
    int64_t high = 0, low = 0;
    for (int64_t i = begin; i < end; i++) {
      const double square = double(x[i]) * double(x[i]) * scale_squared;  // exact: 48 bits
      const int32_t whole = int32_t(square);
      const double rest = (square - double(whole)) * 0x1p28;
      high += whole;
      low += int64_t(bits64(rest + kRoundMagic) - kRoundMagicBits);
    }
    std::lock_guard<std::mutex> lock(mutex);
    limbs[0] += high;
    limbs[1] += low;
  });
}
}
