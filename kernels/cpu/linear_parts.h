// What the schedules of the matrix product share.
#pragma once
#include <vector>

#include "linear.h"
#include "storage.h"
#include "tile.h"

namespace lockstep {

template <class T>
struct Operand {
  const T* data;
  int64_t stride;
  bool transposed;  // element (k, n) is data[n * stride + k], else data[k * stride + n]
};

// Where a product goes: fp32 or bf16, told apart at run time, as there is one store to a whole chain of FMAs.
struct Result {
  float* full;
  bf16* half;  // null: full
  int64_t stride;
  Result at(int64_t row, int64_t column) const {
    const int64_t i = row * stride + column;
    return half ? Result{nullptr, half + i, stride} : Result{full + i, nullptr, stride};
  }
  // Lanes at `column` of a row that has `columns`; those past its end are dropped.
  void put(int64_t row, int64_t column, Vec v, int64_t columns) const {
    const int64_t i = row * stride + column, left = columns - column;
    if (left <= 0) return;
    const int n = left < kLanes ? int(left) : kLanes;
    half ? store_n(half + i, v, n) : store_n(full + i, v, n);
  }
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
template <class T>
void multiply_few_rows(const float* a, int64_t a_stride, const Operand<T>& b, const Result& c, int64_t M, int64_t N,
                       const std::vector<TreeStep>& steps);
extern template void multiply_few_rows(const float*, int64_t, const Operand<float>&, const Result&, int64_t, int64_t,
                                       const std::vector<TreeStep>&);
extern template void multiply_few_rows(const float*, int64_t, const Operand<bf16>&, const Result&, int64_t, int64_t,
                                       const std::vector<TreeStep>&);

}  // namespace lockstep
