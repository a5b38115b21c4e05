// SwiGLU: kernels/swiglu.py states formula and rounding order.
#include "parallel.h"
#include "rowwise.h"
#include "vmath.h"

using namespace lockstep;

namespace {

// f(first element, number of elements) of a dense row, in pieces that threads share: rows are cut too, for one long row is dense data.
template <class F>
void each_piece(int64_t rows, int64_t columns, int64_t work, F f) {
  if (rows == 1) {
    const int64_t pieces = (columns + 1023) / 1024;  // whole registers, but for the last piece
    parallel_for(pieces, grain_for(work * 1024), [&](int64_t begin, int64_t end) {
      const int64_t first = begin * 1024, last = end < pieces ? end * 1024 : columns;
      each_vector(last - first, [&](int64_t i, int n) { f(0, first + i, n); });
    });
    return;
  }
  parallel_for(rows, grain_for(work * columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) each_vector(columns, [&](int64_t i, int n) { f(r, i, n); });
  });
}

}  // namespace

extern "C" {

void swiglu_forward(int64_t is_bf16, const void* gate, int64_t gate_row, const void* up, int64_t up_row, int64_t rows, int64_t columns,
                    void* y) {
  FloatMode mode;
  with_storage(is_bf16, [&](auto type) {
    using T = decltype(type);
    const T *g = static_cast<const T*>(gate), *u = static_cast<const T*>(up);
    T* out = static_cast<T*>(y);
    each_piece(rows, columns, 16, [&](int64_t r, int64_t i, int n) {
      store_n(out + r * columns + i, silu(load_n(g + r * gate_row + i, n)) * load_n(u + r * up_row + i, n), n);
    });
  });
}

void swiglu_backward(int64_t is_bf16, const void* dy, int64_t dy_row, const void* gate, int64_t gate_row, const void* up, int64_t up_row,
                     int64_t rows, int64_t columns, void* dgate, void* dup) {
  FloatMode mode;
  with_storage(is_bf16, [&](auto type) {
    using T = decltype(type);
    const T *d_in = static_cast<const T*>(dy), *g_in = static_cast<const T*>(gate), *u_in = static_cast<const T*>(up);
    T *dg = static_cast<T*>(dgate), *du = static_cast<T*>(dup);
    each_piece(rows, columns, 24, [&](int64_t r, int64_t i, int n) {
      const Vec d = load_n(d_in + r * dy_row + i, n), g = load_n(g_in + r * gate_row + i, n), u = load_n(u_in + r * up_row + i, n);
      const Vec one = splat(1.0f), denominator = one + exp(-g), s = one / denominator;
      store_n(dg + r * columns + i, (d * u) * (s * fma(g, one - s, one)), n);
      store_n(du + r * columns + i, d * (g / denominator), n);
    });
  });
}
}
