// RMS norm of rows: kernels/rms_norm.py states formula and rounding order.
#include <algorithm>
#include <atomic>

#include "fixed_point.h"
#include "parallel.h"
#include "rowwise.h"
#include "vmath.h"

using namespace lockstep;

namespace {

// Rows [M, G, D] of which the last dimension is dense.
struct Shape {
  int64_t rows, groups, dim;
};
template <class T>
struct Strided {
  const T* data;
  int64_t row, group;
  Strided(const void* p, int64_t row, int64_t group) : data(static_cast<const T*>(p)), row(row), group(group) {}
  const T* at(int64_t r, int64_t g) const { return data + r * row + g * group; }
};

// f(row, group, number of the row in a dense tensor), shared out over threads.
template <class F>
void each_row(const Shape& s, int64_t work, F f) {
  parallel_for(s.rows * s.groups, grain_for(work * s.dim), [&](int64_t begin, int64_t end) {
    int64_t r = begin / s.groups, g = begin % s.groups;
    for (int64_t i = begin; i < end; i++) {
      f(r, g, i);
      if (++g == s.groups) g = 0, r++;
    }
  });
}

template <class T>
void forward(const Strided<T>& x, const Shape& s, const T* w, float eps, T* y, float* rstd) {
  each_row(s, 4, [&](int64_t r, int64_t g, int64_t i) {
    const T* row = x.at(r, g);
    T* out = y + i * s.dim;
    Lanes16 sum = splat16(0.0f);
    each_lane_group(s.dim, [&](int lanes, int64_t k, int n) {
      const Vec v = load_n(row + k, n);
      sum.r[lanes] = fma(v, v, sum.r[lanes]);
    });
    const float scale = rsqrt(sum16(sum) / float(s.dim) + eps);
    rstd[i] = scale;
    each_vector(s.dim, [&](int64_t k, int n) { store_n(out + k, load_n(row + k, n) * splat(scale) * load_n(w + k, n), n); });
  });
}

template <class T>
void input_grad(const Strided<T>& dy, const Strided<T>& x, const Shape& s, const T* w, const float* rstd, T* dx) {
  each_row(s, 8, [&](int64_t r, int64_t g, int64_t i) {
    const T *row = x.at(r, g), *grad = dy.at(r, g);
    const Vec scale = splat(rstd[i]);
    Lanes16 sum = splat16(0.0f);
    each_lane_group(s.dim, [&](int lanes, int64_t k, int n) {
      sum.r[lanes] = fma(load_n(grad + k, n) * load_n(w + k, n), load_n(row + k, n) * scale, sum.r[lanes]);
    });
    const Vec mean = splat(sum16(sum) / float(s.dim));
    each_vector(s.dim, [&](int64_t k, int n) {
      const Vec weighted = load_n(grad + k, n) * load_n(w + k, n), normed = load_n(row + k, n) * scale;
      store_n(dx + i * s.dim + k, scale * fma(-normed, mean, weighted), n);
    });
  });
}

template <class T>
bool weight_grad(const Strided<T>& dy, const Strided<T>& x, const Shape& s, const float* rstd, int64_t* acc, const int64_t* tiles,
                 int64_t num_tiles, double fixed_scale) {
  std::atomic<bool> overflow{false};
  constexpr int64_t kColumns = 64;
  parallel_for((s.dim + kColumns - 1) / kColumns, grain_for(s.rows * s.groups * kColumns), [&](int64_t begin, int64_t end) {
    for (int64_t c0 = begin * kColumns; c0 < std::min(s.dim, end * kColumns); c0 += kColumns) {
      const int64_t columns = std::min(kColumns, s.dim - c0);
      for (int64_t t = 0; t < num_tiles; t++)
        for (int64_t g = 0; g < s.groups; g++) {
          float chain[kColumns] = {};
          for (int64_t r = tiles[t]; r < tiles[t + 1]; r++) {
            const T *row = x.at(r, g) + c0, *grad = dy.at(r, g) + c0;
            const Vec scale = splat(rstd[r * s.groups + g]);
            each_vector(columns, [&](int64_t k, int n) {
              store_n(chain + k, fma(load_n(grad + k, n), load_n(row + k, n) * scale, load_n(chain + k, n)), n);
            });
          }
          if (accumulate_fixed(acc + c0, chain, columns, fixed_scale)) overflow = true;
        }
    }
  });
  return overflow;
}

}  // namespace

extern "C" {

void rms_norm_forward(int64_t is_bf16, const void* x, int64_t x_row, int64_t x_group, int64_t rows, int64_t groups, int64_t dim,
                      const void* w, void* y, float* rstd, double eps) {
  FloatMode mode;
  with_storage(is_bf16, [&](auto t) {
    using T = decltype(t);
    forward<T>({x, x_row, x_group}, {rows, groups, dim}, static_cast<const T*>(w), float(eps), static_cast<T*>(y), rstd);
  });
}

void rms_norm_input_grad(int64_t is_bf16, const void* dy, int64_t dy_row, int64_t dy_group, const void* x, int64_t x_row, int64_t x_group,
                         int64_t rows, int64_t groups, int64_t dim, const void* w, const float* rstd, void* dx) {
  FloatMode mode;
  with_storage(is_bf16, [&](auto t) {
    using T = decltype(t);
    const Shape shape{rows, groups, dim};
    input_grad<T>({dy, dy_row, dy_group}, {x, x_row, x_group}, shape, static_cast<const T*>(w), rstd, static_cast<T*>(dx));
  });
}

// 1: a value or a sum is too large; 2: the tiles leave the rows.
int rms_norm_weight_grad(int64_t is_bf16, const void* dy, int64_t dy_row, int64_t dy_group, const void* x, int64_t x_row, int64_t x_group,
                         int64_t rows, int64_t groups, int64_t dim, const float* rstd, int64_t* acc, const int64_t* tiles,
                         int64_t num_tiles, double scale) {
  FloatMode mode;
  if (num_tiles < 0 || (num_tiles > 0 && (tiles[0] < 0 || tiles[num_tiles] > rows))) return 2;
  for (int64_t t = 0; t < num_tiles; t++)
    if (tiles[t] > tiles[t + 1]) return 2;
  return with_storage(is_bf16, [&](auto t) -> int {
    using T = decltype(t);
    return weight_grad<T>({dy, dy_row, dy_group}, {x, x_row, x_group}, {rows, groups, dim}, rstd, acc, tiles, num_tiles, scale);
  });
}
}
