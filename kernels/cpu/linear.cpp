// y = x w^T and dx = dy w on fixed leaves. Here: packed tiles, for many rows. linear_few_rows.cpp gives the same bits faster for few.
#include <algorithm>

#include "linear_parts.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kPiece = 160;     // terms per piece: a packed panel of them fits the first-level cache
constexpr int64_t kFewTransposed = 2;  // up to so many rows, transposing w in registers beats packing it
constexpr int64_t kRowBlock = 384;  // rows per pass over w

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
    steps.push_back({begin + block_start(size, pieces, i), begin + block_start(size, pieces, i + 1), slot, 0, i == 0});
}

// Steps of the tree over `count` terms in leaves of `leaf`, pieces of at most `most` terms.
// Of one shape, remembered by the thread: a model has few, and a small product takes no longer than this list.
const std::vector<TreeStep>& tree_steps(int64_t count, int64_t leaf, int64_t most) {
  struct Entry {
    int64_t count = 0, leaf = 0, most = 0;
    std::vector<TreeStep> steps;
  };
  constexpr int kEntries = 16;
  static thread_local Entry entries[kEntries];
  Entry& e = entries[uint64_t(count * 31 + leaf + most) % kEntries];
  if (e.count != count || e.leaf != leaf || e.most != most) {
    e.steps.clear();
    add_steps(e.steps, 0, num_blocks(count, leaf), 0, count, leaf, most);
    e.count = count, e.leaf = leaf, e.most = most;
  }
  return e.steps;
}

int num_slots(const std::vector<TreeStep>& steps) {
  int slots = 0;
  for (const TreeStep& s : steps) slots = std::max(slots, s.slot + 1);
  return slots;
}

// Rows [begin, end) of the panel of columns [n0, n0 + n) -> panel[k - begin][kColumns]. Columns past n hold copies of the last one.
template <class T>
void pack_panel(const Operand<T>& b, int64_t n0, int n, int64_t begin, int64_t end, float* panel) {
  if (!b.transposed) {
    for (int64_t k = begin; k < end; k++, panel += kColumns) {
      const T* row = b.data + k * b.stride + n0;
      if (n == kColumns) {
        for (int j = 0; j < kVecs; j++) store(panel + j * kLanes, load(row + j * kLanes));
      } else {
        for (int j = 0; j < kColumns; j++) panel[j] = widen(row[std::min(j, n - 1)]);
      }
    }
    return;
  }
  for (int j0 = 0; j0 < kColumns; j0 += kLanes) {
    const T* rows[kLanes];
    for (int j = 0; j < kLanes; j++) rows[j] = b.data + (n0 + std::min(j0 + j, n - 1)) * b.stride;
    int64_t k = begin;
    for (; k + kLanes <= end; k += kLanes) {
      Vec r[kLanes];
      for (int j = 0; j < kLanes; j++) r[j] = load(rows[j] + k);
      transpose(r);
      for (int i = 0; i < kLanes; i++) store(panel + (k - begin + i) * kColumns + j0, r[i]);
    }
    for (; k < end; k++)
      for (int j = 0; j < kLanes; j++) panel[(k - begin) * kColumns + j0 + j] = widen(rows[j][k]);
  }
}

// Block of R rows of a, terms [begin, end) -> packed[k - begin][R].
template <class T>
void pack_rows(const T* a, int64_t stride, int R, int64_t begin, int64_t end, float* packed) {
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
    for (int i = 0; i < R; i++) packed[(k - begin) * R + i] = widen(a[i * stride + k]);
}

// One step of the tree for a tile of R rows; `stack` is the tile's slot 0, slots lie `slot_size` apart. `out`: of the last step.
template <int R>
void tile_step(const TreeStep& step, const float* a, const float* panel, float* stack, int64_t slot_size, const Result* out, int columns) {
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
  for (int i = 0; i < R; i++)
    for (int j = 0; j < kVecs; j++) {
      if (out) out->put(i, j * kLanes, acc[i][j], columns);
      else store(slot + i * kColumns + j * kLanes, acc[i][j]);
    }
}

// At most kRowBlock rows against all of b, panel by panel.
template <class TA, class TB>
void multiply_packed(const TA* a, int64_t a_stride, const Operand<TB>& b, const Result& c, int64_t M, int64_t N,
                     const std::vector<TreeStep>& steps) {
  int64_t K = steps.back().end, blocks = num_blocks(M, kRows);
  float* packed = scratch(0, size_t(M * K));  // step by step, in it block by block
  parallel_for(blocks, grain_for(8 * kRows * K), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      int64_t m = block_start(M, blocks, i), R = block_start(M, blocks, i + 1) - m;
      for (const TreeStep& s : steps)
        pack_rows(a + m * a_stride, a_stride, int(R), s.begin, s.end, packed + s.begin * M + m * (s.end - s.begin));
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
          const Result out = c.at(m, n0);
          with_constant<kRows>(int(R), [&](auto r) {
            tile_step<r>(s, packed + s.begin * M + m * (s.end - s.begin), panel, stack + m * kColumns, slot_size,
                         &s == &steps.back() ? &out : nullptr, n);
          });
        }
      }
    }
  });
}

// Few rows in fp32: themselves, or widened copies, as every column reads them again.
inline const float* widened(const float* a, int64_t&, int64_t, int64_t) { return a; }
const float* widened(const bf16* a, int64_t& stride, int64_t M, int64_t K) {
  float* copy = scratch(0, size_t(M * K));
  for (int64_t m = 0; m < M; m++)
    for (int64_t k = 0; k < K; k++) copy[m * K + k] = widen(a[m * stride + k]);
  stride = K;
  return copy;
}

template <class TA, class TB>
void multiply(const TA* a, int64_t a_stride, const Operand<TB>& b, const Result& c, int64_t M, int64_t N, int64_t K, int64_t leaf) {
  if (M <= 0 || N <= 0) return;
  if (K <= 0) {
    for (int64_t m = 0; m < M; m++)
      for (int64_t n = 0; n < N; n += kLanes) c.put(m, n, Vec{}, N);
    return;
  }
  if (M <= (b.transposed ? kFewTransposed : kRows)) {
    const float* rows = widened(a, a_stride, M, K);
    return multiply_few_rows(rows, a_stride, b, c, M, N, tree_steps(K, leaf, leaf));
  }
  const std::vector<TreeStep>& steps = tree_steps(K, leaf, kPiece);
  int64_t blocks = num_blocks(M, kRowBlock);
  for (int64_t i = 0; i < blocks; i++) {
    int64_t m = block_start(M, blocks, i);
    multiply_packed(a + m * a_stride, a_stride, b, c.at(m, 0), block_start(M, blocks, i + 1) - m, N, steps);
  }
}

}  // namespace

void linear_forward(const float* x, int64_t x_stride, const float* w, int64_t w_stride, float* y, int64_t y_stride, int64_t M, int64_t N,
                    int64_t K, int64_t leaf) {
  multiply(x, x_stride, Operand<float>{w, w_stride, true}, {y, nullptr, y_stride}, M, N, K, leaf);
}
void linear_forward(const float* x, int64_t x_stride, const bf16* w, int64_t w_stride, float* y, int64_t y_stride, int64_t M, int64_t N,
                    int64_t K, int64_t leaf) {
  multiply(x, x_stride, Operand<bf16>{w, w_stride, true}, {y, nullptr, y_stride}, M, N, K, leaf);
}
void linear_input_grad(const float* dy, int64_t dy_stride, const float* w, int64_t w_stride, float* dx, int64_t dx_stride, int64_t M,
                       int64_t N, int64_t K, int64_t leaf) {
  multiply(dy, dy_stride, Operand<float>{w, w_stride, false}, {dx, nullptr, dx_stride}, M, K, N, leaf);
}
void linear_input_grad(const float* dy, int64_t dy_stride, const bf16* w, int64_t w_stride, float* dx, int64_t dx_stride, int64_t M,
                       int64_t N, int64_t K, int64_t leaf) {
  multiply(dy, dy_stride, Operand<bf16>{w, w_stride, false}, {dx, nullptr, dx_stride}, M, K, N, leaf);
}

}  // namespace lockstep

namespace {
using namespace lockstep;

// Operands both fp32 or both bf16 (`half`), the result contiguous and either (`half_out`).
void multiply_stored(const void* a, int64_t a_stride, const void* b, int64_t b_stride, bool transposed, void* c, int64_t M, int64_t N,
                     int64_t K, int64_t leaf, bool half, bool half_out) {
  FloatMode mode;
  const Result result = half_out ? Result{nullptr, static_cast<bf16*>(c), N} : Result{static_cast<float*>(c), nullptr, N};
  if (half)
    multiply(static_cast<const bf16*>(a), a_stride, Operand<bf16>{static_cast<const bf16*>(b), b_stride, transposed}, result, M, N, K, leaf);
  else
    multiply(static_cast<const float*>(a), a_stride, Operand<float>{static_cast<const float*>(b), b_stride, transposed}, result, M, N, K,
             leaf);
}

}  // namespace

extern "C" {
// half, half_out: whether operands and result are bf16.
void linear_forward(const void* x, int64_t x_stride, const void* w, int64_t w_stride, void* y, int64_t M, int64_t N, int64_t K,
                    int64_t leaf, int64_t half, int64_t half_out) {
  multiply_stored(x, x_stride, w, w_stride, true, y, M, N, K, leaf, half != 0, half_out != 0);
}
void linear_input_grad(const void* dy, int64_t dy_stride, const void* w, int64_t w_stride, void* dx, int64_t M, int64_t N, int64_t K,
                       int64_t leaf, int64_t half, int64_t half_out) {
  multiply_stored(dy, dy_stride, w, w_stride, false, dx, M, K, N, leaf, half != 0, half_out != 0);
}
}
