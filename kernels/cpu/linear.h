// Matrix products for other kernels: parallel inside, serial when called from a task. Strides in elements; the last dim is contiguous.
// Element = halving tree over leaves of `leaf` (the last may be shorter) of one FMA chain that starts at +0.
#pragma once
#include <cstdint>
#include <vector>

namespace lockstep {

// y[m,n] = sum over k of x[m,k] * w[n,k]
void linear_forward(const float* x, int64_t x_stride, const float* w, int64_t w_stride, float* y, int64_t y_stride, int64_t M, int64_t N, int64_t K, int64_t leaf);
// dx[m,k] = sum over n of dy[m,n] * w[n,k]
void linear_input_grad(const float* dy, int64_t dy_stride, const float* w, int64_t w_stride, float* dx, int64_t dx_stride, int64_t M, int64_t N, int64_t K, int64_t leaf);

// One step of a halving tree evaluated leaf by leaf on a stack: terms [begin, end) form a chain; `merges` left siblings, in slots slot - 1,
// slot - 2, ..., are then added, and the value goes to slot - merges. A long leaf is cut in pieces that continue in their slot.
struct TreeStep {
  int64_t begin, end;
  int slot, merges;
  bool first, last;  // of its leaf
};
// Steps of the tree over `count` terms, pieces of at most `most` terms. Slots used: at most depth(steps).
std::vector<TreeStep> tree_steps(int64_t count, int64_t leaf, int64_t most);
int num_slots(const std::vector<TreeStep>& steps);

}  // namespace lockstep
