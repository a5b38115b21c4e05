// What forward and backward attention share. A tile holds `width` = NV * kLanes lanes side by side: row-heads (a query row and one head
// of its group) in the forward pass and for dq, keys for dk and dv. Everything is then lane by lane, and no sum crosses lanes.
#pragma once
#include <algorithm>
#include <cfloat>
#include <vector>

#include "parallel.h"
#include "storage.h"
#include "tile.h"
#include "vmath.h"

namespace lockstep {

constexpr float kAbsent = -FLT_MAX;  // the maximum over no keys: exp(kAbsent - m) is 0 for any score m

struct Sequence {
  int64_t q_start, q_stop, k_start, k_len;
};

// Keys or values: [row][head][D] with free strides for rows and heads.
struct Cache {
  const float* data;
  int64_t row_stride, head_stride;
};

struct Problem {
  const Sequence* seqs;
  int64_t num_seqs;
  const int64_t* q_pos;  // absolute position of every query row
  int64_t Hq, Hkv, D;
  float scale;
  int64_t group() const { return Hq / Hkv; }
};

// lanes[j][0..D) -> to[d * width + j]
static inline void gather_lanes(const float* const* lanes, int width, int64_t D, float* to) {
  for (int j0 = 0; j0 < width; j0 += kLanes) {
    int64_t d = 0;
    for (; d + kLanes <= D; d += kLanes) {
      Vec r[kLanes];
      for (int j = 0; j < kLanes; j++) r[j] = load(lanes[j0 + j] + d);
      transpose(r);
      for (int i = 0; i < kLanes; i++) store(to + (d + i) * width + j0, r[i]);
    }
    for (; d < D; d++)
      for (int j = 0; j < kLanes; j++) to[d * width + j0 + j] = lanes[j0 + j][d];
  }
}

// from[d * width + j] -> lanes[j][0..D) for j < count
static inline void scatter_lanes(const float* from, int width, int64_t D, float* const* lanes, int count) {
  for (int j0 = 0; j0 < count; j0 += kLanes) {
    int n = std::min(kLanes, count - j0);
    int64_t d = 0;
    for (; d + kLanes <= D; d += kLanes) {
      Vec r[kLanes];
      for (int i = 0; i < kLanes; i++) r[i] = load(from + (d + i) * width + j0);
      transpose(r);
      for (int j = 0; j < n; j++) store(lanes[j0 + j] + d, r[j]);
    }
    for (; d < D; d++)
      for (int j = 0; j < n; j++) lanes[j0 + j][d] = from[d * width + j0 + j];
  }
}

// Row i of `rows` times the columns of b, for every i < count: acc = chain over k of a[i * a_row + k * a_k] * b[k][width].
// use(i, acc) gets the NV registers of row i; init(i, acc) sets them before.
template <int NV, class Init, class Use>
static inline void for_rows(int64_t count, const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t terms, Init&& init,
                            Use&& use) {
  int64_t blocks = num_blocks(count, kRows);
  for (int64_t block = 0; block < blocks; block++) {
    int64_t first = block_start(count, blocks, block), rows = block_start(count, blocks, block + 1) - first;
    with_constant<kRows>(int(rows), [&](auto r) {
      constexpr int R = r;
      Vec acc[R][NV];
      for (int i = 0; i < R; i++) init(first + i, acc[i]);
      chain<R, NV>(a + first * a_row, a_row, a_k, b, NV * kLanes, terms, acc);
      for (int i = 0; i < R; i++) use(first + i, acc[i]);
    });
  }
}

struct Zero {
  template <int NV>
  void operator()(int64_t, Vec (&acc)[NV]) const {
    for (int j = 0; j < NV; j++) acc[j] = Vec{};
  }
};

// A tree over blocks aligned to powers of two, evaluated from left to right: pushing leaf after leaf (every one between the first and the
// last) leaves pending nodes on a stack, and `finish` merges them. merge(left, right), of slot numbers, puts the result into `left`.
class AlignedTree {
 public:
  int push_slot() const { return size_; }
  template <class Merge>
  void push(int64_t leaf, Merge&& merge) {
    size_++;
    sizes_[size_ - 1] = 0;
    // A node that is a right child joins its left sibling; a left sibling without leaves isn't on the stack, and the node stands for both.
    for (int level = 0; (leaf >> level) & 1; level++) {
      if (size_ >= 2 && sizes_[size_ - 2] == level) {
        merge(size_ - 2, size_ - 1);
        size_--;
      }
      sizes_[size_ - 1] = level + 1;
    }
  }
  template <class Merge>
  void finish(Merge&& merge) {
    for (; size_ > 1; size_--) merge(size_ - 2, size_ - 1);
  }
  static int slots(int64_t leaves) {
    int n = 2;
    while (leaves >>= 1) n++;
    return n;
  }

 private:
  int size_ = 0;
  int sizes_[64] = {};
};

// --- forward -----------------------------------------------------------------------------------------------------------------
constexpr int kFewRows = kLanes == 16 ? 6 : 4;  // up to so many row-heads the second schedule is faster

struct Output {
  float *o, *m, *l;
};

// Row-heads [first, first + count) of a sequence and kv head; number i is row q_start + i / group, head kv_head * group + i % group.
struct Task {
  int64_t seq, kv_head, first, count;
};

struct Lane {
  int64_t row, head;
};
static inline Lane lane(const Problem& p, const Task& t, int64_t i) {
  int64_t g = p.group(), j = t.first + i;
  return {p.seqs[t.seq].q_start + j / g, t.kv_head * g + j % g};
}

// Merge of two nodes, lane by lane: each side is scaled to the common maximum. An absent side adds exactly nothing; the +0 keeps
// zeros positive, so that it adds nothing to them either.
struct Weights {
  Vec m, left, right;
};
static inline Weights merge_weights(Vec left, Vec right) {
  Vec m = max(left, right);
  return {m, exp(left - m), exp(right - m)};
}
static inline Vec merged(Vec left, Vec right, const Weights& w) { return fma(right, w.right, left * w.left) + Vec{}; }

// Keys or values of the forward pass: fp32 or bf16, contiguous rows of a sequence or, with a table, pages of page_size rows.
struct Keys {
  const void* data;
  int64_t row_stride, head_stride;
  bool half;
  const int32_t* table;  // [sequence][pages_per_seq], or null
  int64_t pages_per_seq, page_size;
};

struct Rows {
  const float* data;
  int64_t stride;
};

template <class T>
static inline void widen_row(const T* from, int64_t n, float* to) {
  int64_t d = 0;
  for (; d + kLanes <= n; d += kLanes) store(to + d, load(from + d));
  for (; d < n; d++) to[d] = widen(from[d]);
}

// Rows [first, first + count) of a sequence and head as fp32: where they lie if they lie together, else gathered into `slot` of the scratch.
static inline Rows rows_of(const Keys& k, const Sequence& seq, int64_t seq_index, int64_t head, int64_t first, int64_t count, int64_t D,
                           int slot) {
  const int32_t* pages = k.table ? k.table + seq_index * k.pages_per_seq : nullptr;
  auto row = [&](int64_t i) { return pages ? int64_t(pages[i / k.page_size]) * k.page_size + i % k.page_size : seq.k_start + i; };
  bool together = !pages || first / k.page_size == (first + count - 1) / k.page_size;
  if (!k.half && together) return {static_cast<const float*>(k.data) + row(first) * k.row_stride + head * k.head_stride, k.row_stride};
  float* to = scratch(slot, size_t(count * D));
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = row(first + i) * k.row_stride + head * k.head_stride;
    if (k.half) widen_row(static_cast<const bf16*>(k.data) + at, D, to + i * D);
    else widen_row(static_cast<const float*>(k.data) + at, D, to + i * D);
  }
  return {to, D};
}

// At most kFewRows row-heads: keys (for scores) and head dims (for outputs) side by side.
void attention_few_rows(const Problem& p, const Task& t, const float* q, const Keys& k, const Keys& v, int64_t leaf, const Output& out);

// --- backward ----------------------------------------------------------------------------------------------------------------
struct Saved {
  const float *q, *dout, *o, *m, *l;
};

// left += right, both n floats.
static inline void add(float* left, const float* right, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(left + i, load(left + i) + load(right + i));
}

}  // namespace lockstep
