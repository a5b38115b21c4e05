// dW = dy^T x as exact integer sums of token leaves. The conversion to int64 happens on the register tile; the accumulator in memory is
// read and written once per kTokenBlock rows, however many leaves they hold.
#include <algorithm>
#include <atomic>

#include "fixed_point.h"
#include "parallel.h"
#include "tile.h"

namespace lockstep {
namespace {

constexpr int64_t kTokenBlock = 1024;   // rows per pass over the accumulator
constexpr double kFixedLimit = 0x1p61;  // a value or a partial sum below it can be added to an accumulator below 2^62 without wrapping

// sum[i] += round(v[i] * scale), ties to even; |v[i] * scale| < 2^61.
inline void add_fixed(Vec v, double scale, int64_t* sum) {
#if LOCKSTEP_LANES == 16
  __m512d s = _mm512_set1_pd(scale);
  __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
  _mm512_storeu_si512(sum, _mm512_add_epi64(_mm512_loadu_si512(sum), _mm512_cvtpd_epi64(_mm512_mul_pd(low, s))));
  _mm512_storeu_si512(sum + 8, _mm512_add_epi64(_mm512_loadu_si512(sum + 8), _mm512_cvtpd_epi64(_mm512_mul_pd(high, s))));
#else
  float values[kLanes];
  store(values, v);
  for (int i = 0; i < kLanes; i++) sum[i] = int64_t(uint64_t(sum[i]) + round_to_int64(double(values[i]) * scale));
#endif
}

// Bits of the largest magnitude; NaN counts as larger than any number.
inline IVec max_bits(IVec a, Vec v) {
  IVec b = bits(abs(v));
  return (IVec)select((IVec)(a < b), (Vec)b, (Vec)a);
}
inline float max_lane(IVec a) {
  int32_t most = 0;
  for (int i = 0; i < kLanes; i++) most = a[i] > most ? a[i] : most;
  float value;
  memcpy(&value, &most, 4);
  return value;
}

// acc[i] += sum[i], sum[i] = 0; true when a result reaches 2^62 in magnitude.
inline bool flush_fixed(int64_t* acc, int64_t* sum, int64_t count) {
  uint64_t seen = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t value = acc[i] + sum[i], sign = value >> 63;
    acc[i] = value;
    sum[i] = 0;
    seen |= uint64_t((value ^ sign) - sign);
  }
  return seen >> 62;
}

template <class T>
struct Rows {
  const T* data;
  int64_t stride;
};

// Adds the leaves tiles[first..last] of a tile of R out-features; `a` is [row][R], `panel` is [row][kColumns]. True on overflow.
template <int R>
bool accumulate_tile(const float* a, const float* panel, const int64_t* tiles, int64_t first, int64_t last, double scale, int64_t* acc,
                     int64_t acc_stride, int columns) {
  int64_t sum[R][kColumns] = {};
  double bound = 0;  // on the magnitude of every element of sum
  bool overflow = false;
  auto flush = [&] {
    for (int i = 0; i < R; i++) overflow |= flush_fixed(acc + i * acc_stride, sum[i], columns);
  };
  for (int64_t leaf = first; leaf < last; leaf++) {
    int64_t begin = tiles[leaf] - tiles[first], count = tiles[leaf + 1] - tiles[leaf];
    Vec value[R][kVecs] = {};
    chain<R, kVecs>(a + begin * R, 1, R, panel + begin * kColumns, kColumns, count, value);
    IVec most = {};
    for (int i = 0; i < R; i++)
      for (int j = 0; j < kVecs; j++) most = max_bits(most, value[i][j]);
    double largest = double(max_lane(most)) * scale;
    if (!(largest < kFixedLimit)) return true;
    if (bound + largest >= kFixedLimit) {
      flush();
      bound = 0;
    }
    bound += largest;
    for (int i = 0; i < R; i++)
      for (int j = 0; j < kVecs; j++) add_fixed(value[i][j], scale, sum[i] + j * kLanes);
  }
  flush();
  return overflow;
}

// Rows [begin, end) of the columns [n0, n0 + n) -> packed[row - begin][width]; columns past n are zero.
template <class T>
void pack_columns(const Rows<T>& x, int64_t begin, int64_t end, int64_t n0, int n, int width, float* packed) {
  for (int64_t m = begin; m < end; m++, packed += width) {
    const T* row = x.data + m * x.stride + n0;
    if (n == width && width % kLanes == 0) {
      for (int j = 0; j < width; j += kLanes) store(packed + j, load(row + j));
    } else {
      for (int j = 0; j < width; j++) packed[j] = j < n ? widen(row[j]) : 0.0f;
    }
  }
}

// Leaves tiles[first..last], all of dW.
template <class T>
bool accumulate_block(const Rows<T>& dy, const Rows<T>& x, int64_t* acc, int64_t N, int64_t K, const int64_t* tiles, int64_t first,
                      int64_t last, double scale) {
  int64_t begin = tiles[first], end = tiles[last], M = end - begin, blocks = num_blocks(N, kRows);
  float* packed = scratch(0, size_t(M * N));
  parallel_for(blocks, grain_for(4 * kRows * M), [&](int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; i++) {
      int64_t n = block_start(N, blocks, i), R = block_start(N, blocks, i + 1) - n;
      pack_columns(dy, begin, end, n, int(R), int(R), packed + n * M);
    }
  });
  std::atomic<bool> overflow{false};
  parallel_for(num_blocks(K, kColumns), grain_for(N * kColumns * (M + 64) / kLanes), [&](int64_t lo, int64_t hi) {
    float* panel = scratch(1, size_t(M * kColumns));
    for (int64_t p = lo; p < hi; p++) {
      int64_t k0 = p * kColumns;
      int columns = int(std::min<int64_t>(kColumns, K - k0));
      pack_columns(x, begin, end, k0, columns, kColumns, panel);
      for (int64_t i = 0; i < blocks; i++) {
        int64_t n = block_start(N, blocks, i), R = block_start(N, blocks, i + 1) - n;
        with_constant<kRows>(int(R), [&](auto r) {
          if (accumulate_tile<r>(packed + n * M, panel, tiles, first, last, scale, acc + n * K + k0, K, columns)) overflow = true;
        });
      }
    }
  });
  return overflow;
}

template <class T>
bool accumulate(int64_t* acc, const Rows<T>& dy, const Rows<T>& x, int64_t N, int64_t K, const int64_t* tiles, int64_t num_tiles,
                double scale) {
  for (int64_t first = 0, last; first < num_tiles; first = last) {
    for (last = first + 1; last < num_tiles && tiles[last + 1] - tiles[first] <= kTokenBlock;) last++;
    if (tiles[last] > tiles[first] && accumulate_block(dy, x, acc, N, K, tiles, first, last, scale)) return true;
  }
  return false;
}

}  // namespace
}  // namespace lockstep

extern "C" {
// acc[n,k] += sum over leaves i of round(scale * chain over rows m in [tiles[i], tiles[i+1]) of dy[m,n] * x[m,k]). 1 on overflow.
// half: whether dy and x are bf16.
int linear_weight_grad(int64_t* acc, const void* dy, int64_t dy_stride, const void* x, int64_t x_stride, int64_t N, int64_t K,
                       const int64_t* tiles, int64_t num_tiles, double scale, int64_t half) {
  using namespace lockstep;
  FloatMode mode;
  if (N <= 0 || K <= 0) return 0;
  if (half) {
    const Rows<bf16> rows{static_cast<const bf16*>(dy), dy_stride}, inputs{static_cast<const bf16*>(x), x_stride};
    return accumulate(acc, rows, inputs, N, K, tiles, num_tiles, scale);
  }
  const Rows<float> rows{static_cast<const float*>(dy), dy_stride}, inputs{static_cast<const float*>(x), x_stride};
  return accumulate(acc, rows, inputs, N, K, tiles, num_tiles, scale);
}
}
