// Gradient of the queries: p is recomputed from the saved maximum and sum, and dq sums over the forward pass's leaves of keys, on its tree.
#include "attention_parts.h"

namespace lockstep {
namespace {

int64_t row_head(const Problem& p, const Task& t, int64_t i) {
  Lane at = lane(p, t, i);
  return at.row * p.Hq + at.head;
}

// ds of one leaf: p = exp(s - m) / l, then p * (dp - delta) * scale; lane j sees the first visible[j] keys.
template <int NV>
void leaf_dscores(const float* k, int64_t k_stride, const float* v, int64_t v_stride, int64_t keys, const float* q, const float* dout,
                  int64_t D, float scale, const int32_t* visible, bool all_visible, const float* m, const float* inv_l, const float* delta,
                  float* ds) {
  constexpr int W = NV * kLanes;
  for_rows<NV>(keys, k, k_stride, 1, q, D, Zero(), [&](int64_t key, Vec(&acc)[NV]) {
    for (int j = 0; j < NV; j++) {
      Vec p = exp(acc[j] * splat(scale) - load(m + j * kLanes)) * load(inv_l + j * kLanes);
      if (!all_visible) {
        IVec sees;
        memcpy(&sees, visible + j * kLanes, sizeof sees);
        p = select((IVec)(splat(int32_t(key)) < sees), p, Vec{});
      }
      store(ds + key * W + j * kLanes, p);
    }
  });
  for_rows<NV>(keys, v, v_stride, 1, dout, D, Zero(), [&](int64_t key, Vec(&acc)[NV]) {
    for (int j = 0; j < NV; j++) {
      float* at = ds + key * W + j * kLanes;
      store(at, load(at) * (acc[j] - load(delta + j * kLanes)) * splat(scale));
    }
  });
}

template <int NV>
void query_tile(const Problem& p, const Task& t, const Saved& in, const Cache& k, const Cache& v, int64_t leaf, float* dq,
                float* delta_out) {
  constexpr int W = NV * kLanes;
  const Sequence& seq = p.seqs[t.seq];
  const float *q_lanes[W], *do_lanes[W], *o_lanes[W];
  float* dq_lanes[W];
  int64_t last_key[W], most_keys = 0, D = p.D;
  alignas(64) float m[W], inv_l[W], delta[W];
  for (int j = 0; j < W; j++) {
    int64_t index = row_head(p, t, std::min<int64_t>(j, t.count - 1));
    q_lanes[j] = in.q + index * D, do_lanes[j] = in.dout + index * D, o_lanes[j] = in.o + index * D, dq_lanes[j] = dq + index * D;
    m[j] = in.m[index], inv_l[j] = 1.0f / in.l[index];
    last_key[j] = std::min(p.q_pos[index / p.Hq], seq.k_len - 1);
    most_keys = std::max(most_keys, last_key[j] + 1);
  }
  int64_t leaves = num_blocks(most_keys, leaf);
  float* q_tile = scratch(3, size_t((2 * D + leaf + AlignedTree::slots(leaves) * D) * W));
  float *do_tile = q_tile + D * W, *ds = do_tile + D * W, *nodes = ds + leaf * W;
  gather_lanes(o_lanes, W, D, q_tile);
  gather_lanes(do_lanes, W, D, do_tile);
  for (int j = 0; j < W; j += kLanes) {
    Vec sum = {};
    for (int64_t d = 0; d < D; d++) sum = fma(load(do_tile + d * W + j), load(q_tile + d * W + j), sum);
    store(delta + j, sum);
  }
  gather_lanes(q_lanes, W, D, q_tile);
  auto merge = [&](int left, int right) { add(nodes + left * D * W, nodes + right * D * W, D * W); };
  AlignedTree tree;
  for (int64_t i = 0; i < leaves; i++) {
    int64_t first_key = i * leaf, keys = std::min(leaf, most_keys - first_key), row = seq.k_start + first_key;
    int32_t visible[W];
    bool all_visible = true;
    for (int j = 0; j < W; j++) {
      visible[j] = int32_t(std::max<int64_t>(0, std::min(keys, last_key[j] + 1 - first_key)));
      all_visible &= visible[j] == keys;
    }
    const float *k_leaf = k.data + row * k.row_stride + t.kv_head * k.head_stride,
                *v_leaf = v.data + row * v.row_stride + t.kv_head * v.head_stride;
    leaf_dscores<NV>(k_leaf, k.row_stride, v_leaf, v.row_stride, keys, q_tile, do_tile, D, p.scale, visible, all_visible, m, inv_l, delta,
                     ds);
    float* node = nodes + tree.push_slot() * D * W;
    for_rows<NV>(D, k_leaf, 1, k.row_stride, ds, keys, Zero(), [&](int64_t d, Vec(&acc)[NV]) {
      for (int j = 0; j < NV; j++) store(node + d * W + j * kLanes, acc[j] + Vec{});
    });
    tree.push(i, merge);
  }
  tree.finish(merge);
  scatter_lanes(nodes, W, D, dq_lanes, int(t.count));
  for (int64_t j = 0; j < t.count; j++) delta_out[row_head(p, t, j)] = delta[j];
}

}  // namespace
}  // namespace lockstep

extern "C" {
void attention_backward_q(const float* dout, const float* q, const float* k, int64_t k_row, int64_t k_head, const float* v, int64_t v_row,
                          int64_t v_head, const float* o, const float* m, const float* l, const int64_t* seqs, int64_t num_seqs,
                          const int64_t* q_pos, int64_t Hq, int64_t Hkv, int64_t D, double scale, int64_t kv_leaf, float* dq,
                          float* delta) {
  using namespace lockstep;
  FloatMode mode;
  Problem p = {reinterpret_cast<const Sequence*>(seqs), num_seqs, q_pos, Hq, Hkv, D, float(scale)};
  std::vector<Task> tasks;
  for (int64_t s = 0; s < num_seqs; s++) {
    int64_t count = (p.seqs[s].q_stop - p.seqs[s].q_start) * p.group();
    for (int64_t head = 0; head < Hkv; head++)
      for (int64_t i = 0; i < count; i += kColumns) tasks.push_back({s, head, i, std::min<int64_t>(kColumns, count - i)});
  }
  parallel_for(int64_t(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      with_constant<kVecs>(int(num_blocks(tasks[size_t(i)].count, kLanes)), [&](auto n) {
        query_tile<n>(p, tasks[size_t(i)], {q, dout, o, m, l}, {k, k_row, k_head}, {v, v_row, v_head}, kv_leaf, dq, delta);
      });
  });
}
}
