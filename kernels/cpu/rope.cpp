// Rotary embedding: kernels/rope.py states formula and rounding order. Its tables are made in rng.cpp, beside the other fp64 functions.
#include "parallel.h"
#include "rowwise.h"

using namespace lockstep;

namespace {

template <class T>
void turn(const T* from, const float* cosine, const float* sine, int64_t half, bool inverse, T* to) {
  each_vector(half, [&](int64_t i, int n) {
    const Vec c = load_n(cosine + i, n), table = load_n(sine + i, n), s = inverse ? -table : table;
    const Vec first = load_n(from + i, n), second = load_n(from + half + i, n);
    store_n(to + i, fma(first, c, -(second * s)), n);
    store_n(to + half + i, fma(second, c, first * s), n);
  });
}

}  // namespace

extern "C" {

// 1: a position has no row in the tables.
int rope_apply(int64_t is_bf16, const void* x, int64_t x_row, int64_t x_head, int64_t rows, int64_t heads, int64_t half,
               const int64_t* positions, const float* cosine, const float* sine, int64_t num_positions, int64_t inverse, void* out) {
  FloatMode mode;
  for (int64_t r = 0; r < rows; r++)
    if (positions[r] < 0 || positions[r] >= num_positions) return 1;
  with_storage(is_bf16, [&](auto type) {
    using T = decltype(type);
    const T* in = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    parallel_for(rows, grain_for(4 * heads * half), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        const int64_t row = positions[r] * half;
        for (int64_t h = 0; h < heads; h++)
          turn(in + r * x_row + h * x_head, cosine + row, sine + row, half, inverse, to + (r * heads + h) * 2 * half);
      }
    });
  });
  return 0;
}
}
