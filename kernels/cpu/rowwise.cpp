// Kernels that treat every row (or every token) by itself: RMS norm, SwiGLU, rotary embedding, gradient of the token embedding.
// The Python module of each states its formula and rounding order.
#include "rowwise.h"

#include <algorithm>
#include <atomic>

#include "fixed_point.h"
#include "parallel.h"
#include "vmath.h"

using namespace lockstep;

extern "C" {

void rms_norm_forward(const float* x, int64_t x_row, int64_t x_group, int64_t rows, int64_t groups, int64_t dim, const float* w, float eps,
                      float* y, float* rstd) {
  FloatMode mode;
  parallel_for(rows * groups, grain_for(4 * dim), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const float* row = x + r / groups * x_row + r % groups * x_group;
      Lanes16 sum = splat16(0.0f);
      each_lane_group(dim, [&](int g, int64_t i, int n) {
        const Vec v = load_n(row + i, n);
        sum.r[g] = fma(v, v, sum.r[g]);
      });
      const float scale = rsqrt(sum16(sum) / float(dim) + eps);
      rstd[r] = scale;
      each_vector(dim, [&](int64_t i, int n) { store_n(y + r * dim + i, load_n(row + i, n) * splat(scale) * load_n(w + i, n), n); });
    }
  });
}

void rms_norm_input_grad(const float* dy, int64_t dy_row, int64_t dy_group, const float* x, int64_t x_row, int64_t x_group, int64_t rows,
                         int64_t groups, int64_t dim, const float* w, const float* rstd, float* dx) {
  FloatMode mode;
  parallel_for(rows * groups, grain_for(8 * dim), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const float* row = x + r / groups * x_row + r % groups * x_group;
      const float* grad = dy + r / groups * dy_row + r % groups * dy_group;
      const Vec scale = splat(rstd[r]);
      Lanes16 sum = splat16(0.0f);
      each_lane_group(dim, [&](int g, int64_t i, int n) {
        sum.r[g] = fma(load_n(grad + i, n) * load_n(w + i, n), load_n(row + i, n) * scale, sum.r[g]);
      });
      const Vec mean = splat(sum16(sum) / float(dim));
      each_vector(dim, [&](int64_t i, int n) {
        const Vec g = load_n(grad + i, n) * load_n(w + i, n), normed = load_n(row + i, n) * scale;
        store_n(dx + r * dim + i, scale * fma(-normed, mean, g), n);
      });
    }
  });
}

int rms_norm_weight_grad(const float* dy, int64_t dy_row, int64_t dy_group, const float* x, int64_t x_row, int64_t x_group, int64_t rows,
                         int64_t groups, int64_t dim, const float* rstd, int64_t* acc, const int64_t* tiles, int64_t num_tiles,
                         double scale) {
  FloatMode mode;
  if (num_tiles < 0 || (num_tiles > 0 && (tiles[0] < 0 || tiles[num_tiles] > rows))) return 2;
  std::atomic<int> overflow{0};
  constexpr int64_t kColumns = 64;
  parallel_for((dim + kColumns - 1) / kColumns, grain_for(rows * groups * kColumns), [&](int64_t begin, int64_t end) {
    for (int64_t c0 = begin * kColumns; c0 < std::min(dim, end * kColumns); c0 += kColumns) {
      const int64_t columns = std::min(kColumns, dim - c0);
      for (int64_t t = 0; t < num_tiles; t++)
        for (int64_t g = 0; g < groups; g++) {
          float chain[kColumns] = {};
          for (int64_t r = tiles[t]; r < tiles[t + 1]; r++) {
            const float* row = x + r * x_row + g * x_group + c0;
            const float* grad = dy + r * dy_row + g * dy_group + c0;
            const Vec s = splat(rstd[r * groups + g]);
            each_vector(columns, [&](int64_t i, int n) {
              store_n(chain + i, fma(load_n(grad + i, n), load_n(row + i, n) * s, load_n(chain + i, n)), n);
            });
          }
          if (accumulate_fixed(acc + c0, chain, columns, scale)) overflow = 1;
        }
    }
  });
  return overflow;
}

void swiglu_forward(const float* gate, int64_t gate_row, const float* up, int64_t up_row, int64_t rows, int64_t columns, float* y) {
  FloatMode mode;
  parallel_for(rows, grain_for(16 * columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      each_vector(columns, [&](int64_t i, int n) {
        store_n(y + r * columns + i, silu(load_n(gate + r * gate_row + i, n)) * load_n(up + r * up_row + i, n), n);
      });
  });
}

void swiglu_backward(const float* dy, int64_t dy_row, const float* gate, int64_t gate_row, const float* up, int64_t up_row, int64_t rows,
                     int64_t columns, float* dgate, float* dup) {
  FloatMode mode;
  parallel_for(rows, grain_for(24 * columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      each_vector(columns, [&](int64_t i, int n) {
        const Vec d = load_n(dy + r * dy_row + i, n), g = load_n(gate + r * gate_row + i, n), u = load_n(up + r * up_row + i, n);
        const Vec one = splat(1.0f), denominator = one + exp(-g), s = one / denominator;
        store_n(dgate + r * columns + i, (d * u) * (s * fma(g, one - s, one)), n);
        store_n(dup + r * columns + i, d * (g / denominator), n);
      });
  });
}

int rope_apply(const float* x, int64_t x_row, int64_t x_head, int64_t rows, int64_t heads, int64_t half, const int64_t* positions,
               const float* cosine, const float* sine, int64_t num_positions, int inverse, float* out) {
  FloatMode mode;
  for (int64_t r = 0; r < rows; r++)
    if (positions[r] < 0 || positions[r] >= num_positions) return 1;
  parallel_for(rows, grain_for(4 * heads * half), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      for (int64_t h = 0; h < heads; h++) {
        const float* from = x + r * x_row + h * x_head;
        float* to = out + (r * heads + h) * 2 * half;
        each_vector(half, [&](int64_t i, int n) {
          const Vec c = load_n(cosine + positions[r] * half + i, n), table = load_n(sine + positions[r] * half + i, n);
          const Vec s = inverse ? -table : table, first = load_n(from + i, n), second = load_n(from + half + i, n);
          store_n(to + i, fma(first, c, -(second * s)), n);
          store_n(to + half + i, fma(second, c, first * s), n);
        });
      }
  });
  return 0;
}

// Rows are shared out by column, so that no two threads meet in one accumulator.
int embedding_accumulate(int64_t* acc, int64_t vocab, int64_t dim, const int64_t* local, int64_t rows, const float* dx, int64_t dx_row,
                         double scale) {
  FloatMode mode;
  std::atomic<int> overflow{0};
  parallel_for(dim, std::max<int64_t>(64, grain_for(4 * rows)), [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < rows; r++)
      if (local[r] >= 0 && local[r] < vocab && accumulate_fixed(acc + local[r] * dim + begin, dx + r * dx_row + begin, end - begin, scale))
        overflow = 1;
  });
  return overflow;
}
}
