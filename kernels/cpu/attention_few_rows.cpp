// Attention forward for a few row-heads of one sequence, as in decoding: rows one by one. Same leaves and tree as attention.cpp.
#include "attention_parts.h"
#include "linear.h"

namespace lockstep {
namespace {

// p = exp(s - m) for one row-head that sees `visible` keys of the leaf; the rest of p is zero.
void row_probabilities(float* p, int64_t keys, int64_t visible, float scale, float& m, float& l) {
  Vec most = splat(kAbsent);
  int64_t i = 0;
  for (; i + kLanes <= visible; i += kLanes) {
    Vec s = load(p + i) * splat(scale);
    store(p + i, s);
    most = max(most, s);
  }
  m = kAbsent;
  for (int j = 0; j < kLanes; j++) m = m < most[j] ? most[j] : m;
  for (; i < visible; i++) {
    p[i] *= scale;
    m = m < p[i] ? p[i] : m;
  }
  for (i = 0; i + kLanes <= visible; i += kLanes) store(p + i, exp(load(p + i) - splat(m)));
  if (i < visible) store_partial(p + i, exp(load_partial(p + i, int(visible - i)) - splat(m)), int(visible - i));
  std::fill(p + visible, p + keys, 0.0f);
  l = 0.0f;
  for (i = 0; i < visible; i++) l += p[i];
}

}  // namespace

// At most kFewRows row-heads of one kv head: their rows one by one, keys (for scores) and head dims (for outputs) side by side.
void attention_few_rows(const Problem& p, const Task& t, const float* q, const Cache& k, const Cache& v, int64_t leaf, const Output& out) {
  const Sequence& seq = p.seqs[t.seq];
  int64_t R = t.count, D = p.D, last_key[kFewRows], most_keys = 0;
  for (int64_t i = 0; i < R; i++) {
    last_key[i] = std::min(p.q_pos[lane(p, t, i).row], seq.k_len - 1);
    most_keys = std::max(most_keys, last_key[i] + 1);
  }
  int64_t leaves = num_blocks(most_keys, leaf), row_size = D + 2, node_size = R * row_size;  // node row: m, l, o[D]
  float* rows = scratch(3, size_t(R * (D + leaf) + AlignedTree::slots(leaves) * node_size + kLanes));
  float *probabilities = rows + R * D, *nodes = probabilities + R * leaf;
  for (int64_t i = 0; i < R; i++) {
    Lane at = lane(p, t, i);
    memcpy(rows + i * D, q + (at.row * p.Hq + at.head) * D, 4 * size_t(D));
  }
  auto merge = [&](int left, int right) {
    for (int64_t i = 0; i < R; i++) {
      float *a = nodes + left * node_size + i * row_size, *b = nodes + right * node_size + i * row_size;
      Weights w = merge_weights(splat(a[0]), splat(b[0]));
      a[0] = w.m[0];
      int64_t d = 1;
      for (; d + kLanes <= row_size; d += kLanes) store(a + d, merged(load(a + d), load(b + d), w));
      if (int n = int(row_size - d)) store_partial(a + d, merged(load_partial(a + d, n), load_partial(b + d, n), w), n);
    }
  };
  AlignedTree tree;
  for (int64_t leaf_index = 0; leaf_index < leaves; leaf_index++) {
    int64_t first_key = leaf_index * leaf, keys = std::min(leaf, most_keys - first_key), row = seq.k_start + first_key;
    float* node = nodes + tree.push_slot() * node_size;
    linear_forward(rows, D, k.data + row * k.row_stride + t.kv_head * k.head_stride, k.row_stride, probabilities, keys, R, keys, D, D);
    for (int64_t i = 0; i < R; i++) {
      int64_t visible = std::max<int64_t>(0, std::min(keys, last_key[i] + 1 - first_key));
      row_probabilities(probabilities + i * keys, keys, visible, p.scale, node[i * row_size], node[i * row_size + 1]);
    }
    linear_input_grad(probabilities, keys, v.data + row * v.row_stride + t.kv_head * v.head_stride, v.row_stride, node + 2, row_size, R,
                      keys, D, keys);
    for (int64_t i = 0; i < R; i++)
      for (int64_t d = 2; d < row_size; d++) node[i * row_size + d] += 0.0f;
    tree.push(leaf_index, merge);
  }
  tree.finish(merge);
  for (int64_t i = 0; i < R; i++) {
    Lane at = lane(p, t, i);
    int64_t index = at.row * p.Hq + at.head;
    const float* node = nodes + i * row_size;
    out.m[index] = node[0];
    out.l[index] = node[1];
    for (int64_t d = 0; d < D; d++) out.o[index * D + d] = node[2 + d] / node[1];
  }
}

}  // namespace lockstep
