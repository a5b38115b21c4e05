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
void store_columns(const Vec (&acc)[R][NV], float* c, int64_t stride, int64_t n) {
  for (int i = 0; i < R; i++)
    for (int j = 0; j < NV; j++) {
      int64_t left = n - j * kLanes;
      if (left >= kLanes) store(c + i * stride + j * kLanes, acc[i][j]);
      else if (left > 0) store_partial(c + i * stride + j * kLanes, acc[i][j], int(left));
    }
}

// Few rows, b transposed: kLanes rows of b at a time are transposed in registers and used at once.
template <int R, int NV>
void few_rows_transposed(const float* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride, int64_t n0, int64_t n,
                         const std::vector<TreeStep>& steps) {
  const float* rows[NV][kLanes];
  for (int j = 0; j < NV; j++)
    for (int q = 0; q < kLanes; q++) rows[j][q] = b.data + (n0 + std::min<int64_t>(j * kLanes + q, n - 1)) * b.stride;
  auto leaf = [&](const TreeStep& s, Vec(&out)[R][NV]) {
    Vec acc[R][NV] = {};
    int64_t k = s.begin;
    for (; k + kLanes <= s.end; k += kLanes)
      for (int j = 0; j < NV; j++) {
        Vec r[kLanes];
        for (int q = 0; q < kLanes; q++) r[q] = load(rows[j][q] + k);
        transpose(r);
        for (int q = 0; q < kLanes; q++)
          for (int i = 0; i < R; i++) acc[i][j] = fma(splat(a[i * a_stride + k + q]), r[q], acc[i][j]);
      }
    for (; k < s.end; k++)
      for (int j = 0; j < NV; j++) {
        Vec column;
        for (int q = 0; q < kLanes; q++) column[q] = rows[j][q][k];
        for (int i = 0; i < R; i++) acc[i][j] = fma(splat(a[i * a_stride + k]), column, acc[i][j]);
      }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < NV; j++) out[i][j] = acc[i][j];
  };
  Vec result[R][NV];
  tree_in_registers<R, NV>(steps, leaf, result);
  store_columns<R, NV>(result, c + n0, c_stride, n);
}

// Few rows, b as it lies: NV * kLanes columns of each row of b.
template <int R, int NV>
void few_rows_direct(const float* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride, int64_t n0, int64_t n,
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
    float row[NV * kLanes] = {};
    auto leaf = [&](const TreeStep& s, Vec(&acc)[R][NV]) {
      for (int64_t k = s.begin; k < s.end; k++) {
        memcpy(row, b.data + k * b.stride + n0, 4 * size_t(n));
        chain<R, NV>(a + k, a_stride, 1, row, 0, 1, acc);
      }
    };
    tree_in_registers<R, NV>(steps, leaf, result);
  }
  store_columns<R, NV>(result, c + n0, c_stride, n);
}

// Registers of columns beside R rows: enough independent chains to hide the latency of an FMA, few enough to stay in registers.
constexpr int columns_transposed(int R) { return R <= 4 && kLanes == 16 ? 2 : R <= 2 ? 2 : 1; }
constexpr int columns_direct(int R) { return R == 1 ? 8 : R == 2 ? 4 : R <= 4 ? kVecs : kLanes == 16 ? 3 : 2; }

}  // namespace

void multiply_few_rows(const float* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride, int64_t M, int64_t N,
                       const std::vector<TreeStep>& steps) {
  with_constant<kRows>(int(M), [&](auto r) {
    constexpr int R = r, T = columns_transposed(R), D = columns_direct(R);
    int64_t width = (b.transposed ? T : D) * kLanes;
    parallel_for(num_blocks(N, width), grain_for(width * steps.back().end), [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; p++) {
        int64_t n0 = p * width, n = std::min(width, N - n0);
        if (b.transposed) few_rows_transposed<R, T>(a, a_stride, b, c, c_stride, n0, n, steps);
        else few_rows_direct<R, D>(a, a_stride, b, c, c_stride, n0, n, steps);
      }
    });
  });
}

}  // namespace lockstep
