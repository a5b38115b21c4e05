// What the schedules of the matrix product share.
#pragma once
#include <vector>

#include "linear.h"
#include "tile.h"

namespace lockstep {

struct Operand {
  const float* data;
  int64_t stride;
  bool transposed;  // element (k, n) is data[n * stride + k], else data[k * stride + n]
};

// One step of a halving tree evaluated leaf by leaf on a stack: terms [begin, end) form a chain; `merges` left siblings, in slots slot - 1,
// slot - 2, ..., are then added, and the value goes to slot - merges. A long leaf is cut in pieces that continue in their slot.
struct TreeStep {
  int64_t begin, end;
  int slot, merges;
  bool first;  // of its leaf
};
constexpr int kMaxSlots = 40;

// c [M,N] = a [M,K] b [K,N] for M <= kRows.
void multiply_few_rows(const float* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride, int64_t M, int64_t N,
                       const std::vector<TreeStep>& steps);

}  // namespace lockstep
