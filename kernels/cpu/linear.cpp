// y = x w^T and dx = dy w on fixed K leaves. Three schedules, one result: packed tiles for many rows, transposes in registers for few rows
// of x w^T, direct rows of w for few rows of dy w.
#include "linear.h"

#include <algorithm>

#include "parallel.h"
#include "tile.h"

namespace lockstep {
namespace {

constexpr int64_t kPiece = 160;     // terms per piece: a packed panel of them fits the first-level cache
constexpr int64_t kRowBlock = 384;  // rows per pass over w
constexpr int kMaxSlots = 40;

struct Operand {
  const float* data;
  int64_t stride;
  bool transposed;  // element (k, n) is data[n * stride + k], else data[k * stride + n]
};

void add_steps(std::vector<TreeStep>& steps, int64_t lo, int64_t hi, int slot, int64_t count, int64_t leaf, int64_t most) {
  if (hi - lo > 1) {
    int64_t mid = (lo + hi) / 2;
    add_steps(steps, lo, mid, slot, count, leaf, most);
    add_steps(steps, mid, hi, slot + 1, count, leaf, most);
    steps.back().merges++;
    return;
  }
  int64_t begin = lo * leaf, size = std::min(leaf, count - begin), pieces = num_blocks(size, most);
  for (int64_t i = 0; i < pieces; i++)
    steps.push_back({begin + block_start(size, pieces, i), begin + block_start(size, pieces, i + 1), slot, 0, i == 0, i + 1 == pieces});
}

// Rows [begin, end) of the panel of columns [n0, n0 + n) -> panel[k - begin][kColumns]. Columns past n hold copies of the last one.
void pack_panel(const Operand& b, int64_t n0, int n, int64_t begin, int64_t end, float* panel) {
  if (!b.transposed) {
    for (int64_t k = begin; k < end; k++, panel += kColumns) {
      const float* row = b.data + k * b.stride + n0;
      if (n == kColumns) {
        for (int j = 0; j < kVecs; j++) store(panel + j * kLanes, load(row + j * kLanes));
      } else {
        for (int j = 0; j < kColumns; j++) panel[j] = row[std::min(j, n - 1)];
      }
    }
    return;
  }
  for (int j0 = 0; j0 < kColumns; j0 += kLanes) {
    const float* rows[kLanes];
    for (int j = 0; j < kLanes; j++) rows[j] = b.data + (n0 + std::min(j0 + j, n - 1)) * b.stride;
    int64_t k = begin;
    for (; k + kLanes <= end; k += kLanes) {
      Vec r[kLanes];
      for (int j = 0; j < kLanes; j++) r[j] = load(rows[j] + k);
      transpose(r);
      for (int i = 0; i < kLanes; i++) store(panel + (k - begin + i) * kColumns + j0, r[i]);
    }
    for (; k < end; k++)
      for (int j = 0; j < kLanes; j++) panel[(k - begin) * kColumns + j0 + j] = rows[j][k];
  }
}

// Block of R rows of a, terms [begin, end) -> packed[k - begin][R].
void pack_rows(const float* a, int64_t stride, int R, int64_t begin, int64_t end, float* packed) {
  int64_t k = begin;
  if (R == kLanes / 2 || R == kLanes) {
    for (; k + kLanes <= end; k += kLanes) {
      Vec r[kLanes];
      for (int i = 0; i < kLanes; i++) r[i] = load(a + std::min(i, R - 1) * stride + k);
      transpose(r);
      for (int i = 0; i < kLanes; i++) memcpy(packed + (k - begin + i) * R, &r[i], 4 * size_t(R));
    }
  }
  for (; k < end; k++)
    for (int i = 0; i < R; i++) packed[(k - begin) * R + i] = a[i * stride + k];
}

// One step of the tree for a tile of R rows; `stack` is the tile's slot 0, slots lie `slot_size` apart.
template <int R>
void tile_step(const TreeStep& step, const float* a, const float* panel, float* stack, int64_t slot_size, float* out, int64_t out_stride, int columns) {
  Vec acc[R][kVecs] = {};
  float* slot = stack + step.slot * slot_size;
  if (!step.first)
    for (int i = 0; i < R; i++)
      for (int j = 0; j < kVecs; j++) acc[i][j] = load(slot + i * kColumns + j * kLanes);
  chain<R, kVecs>(a, 1, R, panel, kColumns, step.end - step.begin, acc);
  for (int merge = 0; merge < step.merges; merge++) {
    slot -= slot_size;
    for (int i = 0; i < R; i++)
      for (int j = 0; j < kVecs; j++) acc[i][j] += load(slot + i * kColumns + j * kLanes);
  }
  if (!out) {
    out = slot;
    out_stride = columns = kColumns;
  }
  for (int i = 0; i < R; i++) {
    float* row = out + i * out_stride;
    for (int j = 0; j < kVecs; j++) {
      int n = columns - j * kLanes;
      if (n >= kLanes) store(row + j * kLanes, acc[i][j]);
      else if (n > 0) store_partial(row + j * kLanes, acc[i][j], n);
    }
  }
}

// At most kRowBlock rows against all of b, panel by panel.
void multiply_packed(const float* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride, int64_t M, int64_t N, const std::vector<TreeStep>& steps) {
  int64_t K = steps.back().end, blocks = num_blocks(M, kRows);
  float* packed = scratch(0, size_t(M * K));  // step by step, in it block by block
  parallel_for(blocks, grain_for(8 * kRows * K), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      int64_t m = block_start(M, blocks, i), R = block_start(M, blocks, i + 1) - m;
      for (const TreeStep& s : steps) pack_rows(a + m * a_stride, a_stride, int(R), s.begin, s.end, packed + s.begin * M + m * (s.end - s.begin));
    }
  });
  int64_t slot_size = M * kColumns;
  parallel_for(num_blocks(N, kColumns), grain_for(M * kColumns * K / kLanes), [&](int64_t first, int64_t last) {
    float* panel = scratch(1, size_t(kPiece * kColumns));
    float* stack = scratch(2, size_t(num_slots(steps) * slot_size));
    for (int64_t p = first; p < last; p++) {
      int64_t n0 = p * kColumns;
      int n = int(std::min<int64_t>(kColumns, N - n0));
      for (const TreeStep& s : steps) {
        pack_panel(b, n0, n, s.begin, s.end, panel);
        for (int64_t i = 0; i < blocks; i++) {
          int64_t m = block_start(M, blocks, i), R = block_start(M, blocks, i + 1) - m;
          float* out = &s == &steps.back() ? c + m * c_stride + n0 : nullptr;
          with_constant<kRows>(int(R), [&](auto r) {
            tile_step<r>(s, packed + s.begin * M + m * (s.end - s.begin), panel, stack + m * kColumns, slot_size, out, c_stride, n);
          });
        }
      }
    }
  });
}

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
void few_rows_transposed(const float* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride, int64_t n0, int64_t n, const std::vector<TreeStep>& steps) {
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
void few_rows_direct(const float* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride, int64_t n0, int64_t n, const std::vector<TreeStep>& steps) {
  Vec result[R][NV];
  if (n == NV * kLanes) {
    tree_in_registers<R, NV>(
        steps, [&](const TreeStep& s, Vec(&acc)[R][NV]) { chain<R, NV>(a + s.begin, a_stride, 1, b.data + s.begin * b.stride + n0, b.stride, s.end - s.begin, acc); }, result);
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

void multiply_few(const float* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride, int64_t M, int64_t N, const std::vector<TreeStep>& steps) {
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

void multiply(const float* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride, int64_t M, int64_t N, int64_t K, int64_t leaf) {
  if (M <= 0 || N <= 0) return;
  if (K <= 0) {
    for (int64_t m = 0; m < M; m++) std::fill_n(c + m * c_stride, N, 0.0f);
    return;
  }
  if (M <= kRows) return multiply_few(a, a_stride, b, c, c_stride, M, N, tree_steps(K, leaf, leaf));
  const std::vector<TreeStep> steps = tree_steps(K, leaf, kPiece);
  int64_t blocks = num_blocks(M, kRowBlock);
  for (int64_t i = 0; i < blocks; i++) {
    int64_t m = block_start(M, blocks, i);
    multiply_packed(a + m * a_stride, a_stride, b, c + m * c_stride, c_stride, block_start(M, blocks, i + 1) - m, N, steps);
  }
}

}  // namespace

std::vector<TreeStep> tree_steps(int64_t count, int64_t leaf, int64_t most) {
  std::vector<TreeStep> steps;
  add_steps(steps, 0, num_blocks(count, leaf), 0, count, leaf, most);
  return steps;
}

int num_slots(const std::vector<TreeStep>& steps) {
  int slots = 0;
  for (const TreeStep& s : steps) slots = std::max(slots, s.slot + 1);
  return slots;
}

void linear_forward(const float* x, int64_t x_stride, const float* w, int64_t w_stride, float* y, int64_t y_stride, int64_t M, int64_t N, int64_t K, int64_t leaf) {
  multiply(x, x_stride, {w, w_stride, true}, y, y_stride, M, N, K, leaf);
}

void linear_input_grad(const float* dy, int64_t dy_stride, const float* w, int64_t w_stride, float* dx, int64_t dx_stride, int64_t M, int64_t N, int64_t K, int64_t leaf) {
  multiply(dy, dy_stride, {w, w_stride, false}, dx, dx_stride, M, K, N, leaf);
}

}  // namespace lockstep

extern "C" {
void linear_forward(const float* x, int64_t x_stride, const float* w, int64_t w_stride, float* y, int64_t M, int64_t N, int64_t K, int64_t leaf) {
  lockstep::FloatMode mode;
  lockstep::linear_forward(x, x_stride, w, w_stride, y, N, M, N, K, leaf);
}
void linear_input_grad(const float* dy, int64_t dy_stride, const float* w, int64_t w_stride, float* dx, int64_t M, int64_t N, int64_t K, int64_t leaf) {
  lockstep::FloatMode mode;
  lockstep::linear_input_grad(dy, dy_stride, w, w_stride, dx, K, M, N, K, leaf);
}
}
