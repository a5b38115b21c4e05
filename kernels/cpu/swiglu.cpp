// SwiGLU: kernels/swiglu.py states formula and rounding order.
#include "parallel.h"
#include "rowwise.h"
#include "vmath.h"

using namespace lockstep;

namespace {

template <class T>
void forward_row(const T* gate, const T* up, int64_t n, T* y) {
  each_vector(n, [&](int64_t i, int lanes) { store_n(y + i, silu(load_n(gate + i, lanes)) * load_n(up + i, lanes), lanes); });
}

template <class T>
void backward_row(const T* dy, const T* gate, const T* up, int64_t columns, T* dgate, T* dup) {
  each_vector(columns, [&](int64_t i, int n) {
    const Vec d = load_n(dy + i, n), g = load_n(gate + i, n), u = load_n(up + i, n);
    const Vec one = splat(1.0f), denominator = one + exp(-g), s = one / denominator;
    store_n(dgate + i, (d * u) * (s * fma(g, one - s, one)), n);
    store_n(dup + i, d * (g / denominator), n);
  });
}

}  // namespace

extern "C" {

// All elements in one row.
void swiglu_forward_dense(const float* gate, const float* up, int64_t n, float* y) {
  FloatMode mode;
  constexpr int64_t kPiece = 256;  // whole registers
  parallel_for((n + kPiece - 1) / kPiece, grain_for(16 * kPiece), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPiece, last = end * kPiece < n ? end * kPiece : n;
    forward_row(gate + first, up + first, last - first, y + first);
  });
}

void swiglu_forward(int64_t is_bf16, const void* gate, int64_t gate_row, const void* up, int64_t up_row, int64_t rows, int64_t columns,
                    void* y) {
  FloatMode mode;
  with_storage(is_bf16, [&](auto type) {
    using T = decltype(type);
    const T *g = static_cast<const T*>(gate), *u = static_cast<const T*>(up);
    T* out = static_cast<T*>(y);
    parallel_for(rows, grain_for(16 * columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) forward_row(g + r * gate_row, u + r * up_row, columns, out + r * columns);
    });
  });
}

void swiglu_backward(int64_t is_bf16, const void* dy, int64_t dy_row, const void* gate, int64_t gate_row, const void* up, int64_t up_row,
                     int64_t rows, int64_t columns, void* dgate, void* dup) {
  FloatMode mode;
  with_storage(is_bf16, [&](auto type) {
    using T = decltype(type);
    const T *d = static_cast<const T*>(dy), *g = static_cast<const T*>(gate), *u = static_cast<const T*>(up);
    T *dg = static_cast<T*>(dgate), *du = static_cast<T*>(dup);
    parallel_for(rows, grain_for(24 * columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++)
        backward_row(d + r * dy_row, g + r * gate_row, u + r * up_row, columns, dg + r * columns, du + r * columns);
    });
  });
}
}
