// Matrix products for other kernels: parallel inside, serial when called from a task. Strides in elements; the last dim is contiguous.
// Element = halving tree over leaves of `leaf` (the last may be shorter) of one FMA chain that starts at +0.
#pragma once
#include "storage.h"

namespace lockstep {

// y[m,n] = sum over k of x[m,k] * w[n,k]
void linear_forward(const float* x, int64_t x_stride, const float* w, int64_t w_stride, float* y, int64_t y_stride, int64_t M, int64_t N,
                    int64_t K, int64_t leaf);
void linear_forward(const float* x, int64_t x_stride, const bf16* w, int64_t w_stride, float* y, int64_t y_stride, int64_t M, int64_t N,
                    int64_t K, int64_t leaf);
// dx[m,k] = sum over n of dy[m,n] * w[n,k]
void linear_input_grad(const float* dy, int64_t dy_stride, const float* w, int64_t w_stride, float* dx, int64_t dx_stride, int64_t M,
                       int64_t N, int64_t K, int64_t leaf);
void linear_input_grad(const float* dy, int64_t dy_stride, const bf16* w, int64_t w_stride, float* dx, int64_t dx_stride, int64_t M,
                       int64_t N, int64_t K, int64_t leaf);

}  // namespace lockstep
