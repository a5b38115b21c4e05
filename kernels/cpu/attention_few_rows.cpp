// Attention forward for a few row-heads of one sequence, as in decoding: keys side by side for the scores, head dims for the outputs.
// Same leaves and tree as attention.cpp.
#include "attention_parts.h"

namespace lockstep {
namespace {

// Brings the rows into the cache while something else is computed: rows of one head lie too far apart for the processor to guess.
inline void prefetch_rows(const Rows& rows, int64_t first, int64_t last, int64_t D) {
  for (int64_t i = first; i < last; i++)
    for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(rows.data + i * rows.stride + d);
}

// s[i][key] = scale * (chain over d of q[i][d] * k[key][d]), i < R. Keys past the last are copies of it. Returns each row's s to `s`,
// rows `width` apart, a multiple of kLanes.
template <int R>
void leaf_scores(const float* q, const Rows& k, int64_t keys, int64_t D, float scale, float* s, int64_t width, const Rows& next) {
  for (int64_t first = 0; first < keys; first += kLanes) {
    const float* rows[kLanes];
    for (int j = 0; j < kLanes; j++) rows[j] = k.data + std::min(first + j, keys - 1) * k.stride;
    prefetch_rows(next, first, std::min(first + kLanes, keys), D);
    Vec acc[R] = {};
    int64_t d = 0;
    for (; d + kLanes <= D; d += kLanes) {
      Vec r[kLanes];
      for (int j = 0; j < kLanes; j++) r[j] = load(rows[j] + d);
      transpose(r);
      for (int j = 0; j < kLanes; j++)
        for (int i = 0; i < R; i++) acc[i] = fma(splat(q[i * D + d + j]), r[j], acc[i]);
    }
    if (const int n = int(D - d)) {
      Vec r[kLanes];
      for (int j = 0; j < kLanes; j++) r[j] = load_partial(rows[j] + d, n);
      transpose(r);
      for (int j = 0; j < n; j++)
        for (int i = 0; i < R; i++) acc[i] = fma(splat(q[i * D + d + j]), r[j], acc[i]);
    }
    for (int i = 0; i < R; i++) store(s + i * width + first, acc[i] * splat(scale));
  }
}

// s becomes p = exp(s - m) for the first `visible` keys and zero for the rest, up to the width; returns m.
float row_probabilities(float* p, int64_t width, int64_t visible) {
  Vec most = splat(kAbsent);
  IVec lane;
  for (int j = 0; j < kLanes; j++) lane[j] = j;
  const IVec end = splat(int32_t(visible));
  for (int64_t i = 0; i < width; i += kLanes) {
    Vec s = select((IVec)(lane + splat(int32_t(i)) < end), load(p + i), splat(kAbsent));
    store(p + i, s);
    most = max(most, s);
  }
  float m = kAbsent;
  for (int j = 0; j < kLanes; j++) m = m < most[j] ? most[j] : m;
  for (int64_t i = 0; i < width; i += kLanes)
    store(p + i, select((IVec)(lane + splat(int32_t(i)) < end), exp(load(p + i) - splat(m)), Vec{}));
  return m;
}

// Columns [d0, d0 + NV * kLanes) of o[i] = chain over the keys of p[i][key] * v[key]; the last register holds `last` of them.
template <int R, int NV>
void output_columns(const float* p, int64_t width, const Rows& v, int64_t keys, int64_t d0, int last, float* o, int64_t o_stride) {
  Vec acc[R][NV] = {};
  const float* row = v.data + d0;
  if (last == kLanes) {
    chain<R, NV>(p, width, 1, row, v.stride, keys, acc);
  } else {
    Vec c[R][NV] = {};
    for (int64_t key = 0; key < keys; key++, row += v.stride) {
      Vec x[NV];
      for (int j = 0; j + 1 < NV; j++) x[j] = load(row + j * kLanes);
      x[NV - 1] = load_partial(row + (NV - 1) * kLanes, last);
      for (int i = 0; i < R; i++)
        for (int j = 0; j < NV; j++) c[i][j] = fma(splat(p[i * width + key]), x[j], c[i][j]);
    }
    memcpy(acc, c, sizeof acc);
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < NV; j++) store(o + i * o_stride + d0 + j * kLanes, acc[i][j] + Vec{});
}

template <int R>
void leaf_outputs(const float* p, int64_t width, const Rows& v, int64_t keys, int64_t D, float* o, int64_t o_stride) {
  constexpr int kMost = kLanes == 16 ? (R == 1 ? 8 : R <= 3 ? 8 / R * 2 : R <= 4 ? 4 : 3) : R <= 2 ? 4 : 2;
  for (int64_t d0 = 0; d0 < D; d0 += kMost * kLanes) {
    const int64_t columns = std::min<int64_t>(kMost * kLanes, D - d0), vectors = num_blocks(columns, kLanes);
    with_constant<kMost>(int(vectors),
                         [&](auto n) { output_columns<R, n>(p, width, v, keys, d0, int(columns - (n - 1) * kLanes), o, o_stride); });
  }
}

// l[i] = chain over the keys of p[i][key]: R chains side by side.
template <int R>
void leaf_sums(const float* p, int64_t width, int64_t keys, float* l) {
  float sum[R] = {};
  for (int64_t key = 0; key < keys; key++)
    for (int i = 0; i < R; i++) sum[i] += p[i * width + key];
  for (int i = 0; i < R; i++) l[i] = sum[i];
}

template <int R>
void few_rows(const Problem& p, const Task& t, const float* q, const Keys& k, const Keys& v, int64_t leaf, const Output& out) {
  const Sequence& seq = p.seqs[t.seq];
  int64_t D = p.D, last_key[R], most_keys = 0;
  for (int64_t i = 0; i < R; i++) {
    last_key[i] = std::min(p.q_pos[lane(p, t, i).row], seq.k_len - 1);
    most_keys = std::max(most_keys, last_key[i] + 1);
  }
  // Node: m [kLanes] and l [kLanes], one lane a row, then o [R][o_stride].
  const int64_t leaves = num_blocks(most_keys, leaf), width = num_blocks(leaf, kLanes) * kLanes, o_stride = num_blocks(D, kLanes) * kLanes,
                node_size = 2 * kLanes + R * o_stride;
  static_assert(kFewRows <= kLanes);
  float* rows = scratch(3, size_t(AlignedTree::slots(leaves) * node_size + R * (D + width)));
  float *nodes = rows, *q_rows = nodes + AlignedTree::slots(leaves) * node_size, *probabilities = q_rows + R * D;
  for (int64_t i = 0; i < R; i++) {
    Lane at = lane(p, t, i);
    memcpy(q_rows + i * D, q + (at.row * p.Hq + at.head) * D, 4 * size_t(D));
  }
  auto merge = [&](int left, int right) {
    float *a = nodes + left * node_size, *b = nodes + right * node_size;
    const Weights w = merge_weights(load(a), load(b));
    store(a, w.m);
    store(a + kLanes, merged(load(a + kLanes), load(b + kLanes), w));
    for (int i = 0; i < R; i++) {
      const Weights row = {w.m, splat(w.left[i]), splat(w.right[i])};
      const int64_t at = 2 * kLanes + i * o_stride;
      for (int64_t d = at; d < at + o_stride; d += kLanes) store(a + d, merged(load(a + d), load(b + d), row));
    }
  };
  AlignedTree tree;
  for (int64_t index = 0; index < leaves; index++) {
    const int64_t first = index * leaf, keys = std::min(leaf, most_keys - first), used = num_blocks(keys, kLanes) * kLanes;
    float* node = nodes + tree.push_slot() * node_size;
    store(node, Vec{}), store(node + kLanes, Vec{});
    const Rows k_leaf = rows_of(k, seq, t.seq, t.kv_head, first, keys, D, 1), v_leaf = rows_of(v, seq, t.seq, t.kv_head, first, keys, D, 2);
    leaf_scores<R>(q_rows, k_leaf, keys, D, p.scale, probabilities, width, v_leaf);
    for (int i = 0; i < R; i++)
      node[i] = row_probabilities(probabilities + i * width, used, std::max<int64_t>(0, std::min(keys, last_key[i] + 1 - first)));
    leaf_sums<R>(probabilities, width, keys, node + kLanes);
    leaf_outputs<R>(probabilities, width, v_leaf, keys, D, node + 2 * kLanes, o_stride);
    tree.push(index, merge);
  }
  tree.finish(merge);
  for (int64_t i = 0; i < R; i++) {
    Lane at = lane(p, t, i);
    const int64_t index = at.row * p.Hq + at.head;
    const float l = nodes[kLanes + i], *o = nodes + 2 * kLanes + i * o_stride;
    out.m[index] = nodes[i];
    out.l[index] = l;
    for (int64_t d = 0; d < D; d++) out.o[index * D + d] = o[d] / l;
  }
}

}  // namespace

void attention_few_rows(const Problem& p, const Task& t, const float* q, const Keys& k, const Keys& v, int64_t leaf, const Output& out) {
  with_constant<kFewRows>(int(t.count), [&](auto r) { few_rows<r>(p, t, q, k, v, leaf, out); });
}

}  // namespace lockstep
