// The matrix product for a handful of rows, as in decoding: b is read once and never packed. Same chains and tree as linear.cpp.
#include <algorithm>

#include "linear_parts.h"
#include "parallel.h"

namespace lockstep {
namespace {

// Tree over the steps for R rows by NV registers of columns, all of it in registers and on the call stack; `leaf(step, acc)` continues acc.
template <int R, int NV, class Leaf>
static inline void tree_in_registers(const std::vector<TreeStep>& steps, Leaf&& leaf, Vec (&result)[R][NV]) {
  Vec stack[kMaxSlots][R][NV];
  for (const TreeStep& s : steps) {
    Vec acc[R][NV] = {};
    leaf(s, acc);
    int slot = s.slot;
    for (int merge = 0; merge < s.merges; merge++) {
      slot--;
      for (int i = 0; i < R; i++)
        for (int j = 0; j < NV; j++) acc[i][j] += stack[slot][i][j];
    }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < NV; j++) stack[slot][i][j] = acc[i][j];
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < NV; j++) result[i][j] = stack[0][i][j];
}

template <int R, int NV>
void store_columns(const Vec (&acc)[R][NV], const Result& c, int64_t n0, int64_t n) {
  const Result out = c.at(0, n0);
  for (int i = 0; i < R; i++)
    for (int j = 0; j < NV; j++) out.put(i, j * kLanes, acc[i][j], n);
}

// r[i][q] = rows[q][k + i]. Whole lines are loaded, in the order in which they lie in memory: a load of halves saves shuffles and loses more.
template <class T>
static inline void load_transposed(const T* const (&rows)[kLanes], int64_t k, Vec (&r)[kLanes]) {
  for (int q = 0; q < kLanes; q++) r[q] = load(rows[q] + k);
  transpose(r);
}

// Few rows, b transposed: kLanes rows of b at a time are transposed in registers and used at once.
template <int R, int NV, class T>
void few_rows_transposed(const float* a, int64_t a_stride, const Operand<T>& b, const Result& c, int64_t n0, int64_t n,
                         const std::vector<TreeStep>& steps) {
  const T* rows[NV][kLanes];
  for (int j = 0; j < NV; j++)
    for (int q = 0; q < kLanes; q++) rows[j][q] = b.data + (n0 + std::min<int64_t>(j * kLanes + q, n - 1)) * b.stride;
  auto leaf = [&](const TreeStep& s, Vec(&out)[R][NV]) {
    Vec acc[R][NV] = {};
    int64_t k = s.begin;
    for (; k + kLanes <= s.end; k += kLanes)
      for (int j = 0; j < NV; j++) {
        Vec r[kLanes];
        load_transposed(rows[j], k, r);
        for (int q = 0; q < kLanes; q++)
          for (int i = 0; i < R; i++) acc[i][j] = fma(splat(a[i * a_stride + k + q]), r[q], acc[i][j]);
      }
    for (; k < s.end; k++)
      for (int j = 0; j < NV; j++) {
        Vec column;
        for (int q = 0; q < kLanes; q++) column[q] = widen(rows[j][q][k]);
        for (int i = 0; i < R; i++) acc[i][j] = fma(splat(a[i * a_stride + k]), column, acc[i][j]);
      }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < NV; j++) out[i][j] = acc[i][j];
  };
  Vec result[R][NV];
  tree_in_registers<R, NV>(steps, leaf, result);
  store_columns<R, NV>(result, c, n0, n);
}

// Few rows, b as it lies: NV * kLanes columns of each row of b.
template <int R, int NV, class T>
void few_rows_direct(const float* a, int64_t a_stride, const Operand<T>& b, const Result& c, int64_t n0, int64_t n,
                     const std::vector<TreeStep>& steps) {
  Vec result[R][NV];
  if (n == NV * kLanes) {
    tree_in_registers<R, NV>(
        steps,
        [&](const TreeStep& s, Vec(&acc)[R][NV]) {
          chain<R, NV>(a + s.begin, a_stride, 1, b.data + s.begin * b.stride + n0, b.stride, s.end - s.begin, acc);
        },
        result);
  } else {
    T row[NV * kLanes] = {};
    auto leaf = [&](const TreeStep& s, Vec(&acc)[R][NV]) {
      for (int64_t k = s.begin; k < s.end; k++) {
        memcpy(row, b.data + k * b.stride + n0, sizeof(T) * size_t(n));
        chain<R, NV>(a + k, a_stride, 1, row, 0, 1, acc);
      }
    };
    tree_in_registers<R, NV>(steps, leaf, result);
  }
  store_columns<R, NV>(result, c, n0, n);
}

// Registers of columns beside R rows: enough independent chains to hide the latency of an FMA, few enough to stay in registers.
constexpr int columns_transposed(int R) { return R <= 4 && kLanes == 16 ? 2 : R <= 2 ? 2 : 1; }
constexpr int columns_direct(int R) { return R == 1 ? 8 : R == 2 ? 4 : R <= 4 ? kVecs : kLanes == 16 ? 3 : 2; }

}  // namespace

template <class T>
void multiply_few_rows(const float* a, int64_t a_stride, const Operand<T>& b, const Result& c, int64_t M, int64_t N,
                       const std::vector<TreeStep>& steps) {
  with_constant<kRows>(int(M), [&](auto r) {
    constexpr int R = r, wide = columns_transposed(R), D = columns_direct(R);
    int64_t width = (b.transposed ? wide : D) * kLanes;
    parallel_for(num_blocks(N, width), grain_for(width * steps.back().end), [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; p++) {
        int64_t n0 = p * width, n = std::min(width, N - n0);
        if (b.transposed) few_rows_transposed<R, wide>(a, a_stride, b, c, n0, n, steps);
        else few_rows_direct<R, D>(a, a_stride, b, c, n0, n, steps);
      }
    });
  });
}

template void multiply_few_rows(const float*, int64_t, const Operand<float>&, const Result&, int64_t, int64_t, const std::vector<TreeStep>&);
template void multiply_few_rows(const float*, int64_t, const Operand<bf16>&, const Result&, int64_t, int64_t, const std::vector<TreeStep>&);

}  // namespace lockstep
