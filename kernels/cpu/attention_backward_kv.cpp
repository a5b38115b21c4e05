// Gradients of keys and values, keys side by side. Leaf = the query rows of one tile of token_leaf absolute positions, chained over (head
// of the group, row); leaves are added on the tree aligned to powers of two.
#include "attention_parts.h"

namespace lockstep {
namespace {

struct KeyTile {
  int64_t seq, kv_head, first_key, count, out_row;
};

struct KeyGrads {
  const float* delta;
  float *dk, *dv;
};

// p and ds of query rows [first, first + rows) at one head, [row][W].
template <int NV>
void rows_dscores(const Problem& p, const Saved& in, const float* delta, int64_t first, int64_t rows, int64_t head, const float* k_tile,
                  const float* v_tile, int64_t first_key, float* probabilities, float* ds) {
  constexpr int W = NV * kLanes;
  int64_t stride = p.Hq * p.D, start = first * stride + head * p.D;
  IVec lane;
  for (int j = 0; j < kLanes; j++) lane[j] = j;
  for_rows<NV>(rows, in.q + start, stride, 1, k_tile, p.D, Zero(), [&](int64_t i, Vec(&acc)[NV]) {
    int64_t index = (first + i) * p.Hq + head, seen = p.q_pos[first + i] + 1 - first_key;
    Vec m = splat(in.m[index]), inv_l = splat(1.0f / in.l[index]);
    for (int j = 0; j < NV; j++) {
      Vec e = exp(acc[j] * splat(p.scale) - m) * inv_l;
      if (seen < W) e = select((IVec)(lane + splat(int32_t(j * kLanes)) < splat(int32_t(seen))), e, Vec{});
      store(probabilities + i * W + j * kLanes, e);
    }
  });
  for_rows<NV>(rows, in.dout + start, stride, 1, v_tile, p.D, Zero(), [&](int64_t i, Vec(&acc)[NV]) {
    Vec d = splat(delta[(first + i) * p.Hq + head]);
    for (int j = 0; j < NV; j++) {
      int64_t at = i * W + j * kLanes;
      store(ds + at, load(probabilities + at) * (acc[j] - d) * splat(p.scale));
    }
  });
}

// sum[d][W] continues with the chain over `rows` rows of a (one head of q or dout) times weights[row][W].
template <int NV>
void continue_chain(const float* a, int64_t stride, int64_t rows, const float* weights, int64_t D, float* sum) {
  constexpr int W = NV * kLanes;
  for_rows<NV>(
      D, a, 1, stride, weights, rows,
      [&](int64_t d, Vec(&acc)[NV]) {
        for (int j = 0; j < NV; j++) acc[j] = load(sum + d * W + j * kLanes);
      },
      [&](int64_t d, Vec(&acc)[NV]) {
        for (int j = 0; j < NV; j++) store(sum + d * W + j * kLanes, acc[j]);
      });
}

template <int NV>
void key_tile(const Problem& p, const KeyTile& t, const Saved& in, const Cache& k, const Cache& v, int64_t token_leaf,
              const KeyGrads& out) {
  constexpr int W = NV * kLanes;
  const Sequence& seq = p.seqs[t.seq];
  int64_t D = p.D, node_size = 2 * D * W;  // node: dk[D][W], dv[D][W]
  const float *k_lanes[W], *v_lanes[W];
  float *dk_lanes[W], *dv_lanes[W];
  for (int64_t j = 0; j < W; j++) {
    int64_t key = std::min(j, t.count - 1), row = seq.k_start + t.first_key + key, out_at = ((t.out_row + key) * p.Hkv + t.kv_head) * D;
    k_lanes[j] = k.data + row * k.row_stride + t.kv_head * k.head_stride,
    v_lanes[j] = v.data + row * v.row_stride + t.kv_head * v.head_stride;
    dk_lanes[j] = out.dk + out_at, dv_lanes[j] = out.dv + out_at;
  }
  // Rows are in the order of their positions: those that see the first key of the tile are the last ones.
  const int64_t *positions = p.q_pos, *stop = positions + seq.q_stop, *row = std::lower_bound(positions + seq.q_start, stop, t.first_key);
  int64_t first_leaf = row == stop ? 0 : *row / token_leaf, leaves = row == stop ? 0 : stop[-1] / token_leaf - first_leaf + 1;
  float* k_tile = scratch(3, size_t(2 * D * W + 2 * token_leaf * W + AlignedTree::slots(leaves) * node_size));
  float *v_tile = k_tile + D * W, *probabilities = v_tile + D * W, *ds = probabilities + token_leaf * W, *nodes = ds + token_leaf * W;
  gather_lanes(k_lanes, W, D, k_tile);
  gather_lanes(v_lanes, W, D, v_tile);
  std::fill_n(nodes, node_size, 0.0f);
  auto merge = [&](int left, int right) { add(nodes + left * node_size, nodes + right * node_size, node_size); };
  AlignedTree tree;
  for (int64_t leaf = first_leaf; leaf < first_leaf + leaves; leaf++) {
    const int64_t* end = std::lower_bound(row, stop, (leaf + 1) * token_leaf);
    int64_t first = row - positions, rows = end - row, stride = p.Hq * D;
    float* node = nodes + tree.push_slot() * node_size;
    std::fill_n(node, node_size, 0.0f);
    for (int64_t head = t.kv_head * p.group(); rows && head < (t.kv_head + 1) * p.group(); head++) {
      rows_dscores<NV>(p, in, out.delta, first, rows, head, k_tile, v_tile, t.first_key, probabilities, ds);
      continue_chain<NV>(in.q + first * stride + head * D, stride, rows, ds, D, node);
      continue_chain<NV>(in.dout + first * stride + head * D, stride, rows, probabilities, D, node + D * W);
    }
    for (int64_t i = 0; i < node_size; i += kLanes)
      store(node + i, load(node + i) + Vec{});  // no negative zeros: a leaf without rows adds nothing
    tree.push(leaf, merge);
    row = end;
  }
  tree.finish(merge);
  scatter_lanes(nodes, W, D, dk_lanes, int(t.count));
  scatter_lanes(nodes + D * W, W, D, dv_lanes, int(t.count));
}

}  // namespace
}  // namespace lockstep

extern "C" {
// ranges[j] = (sequence, a, b): keys [a, b) of the sequence; rows of dk and dv follow that order.
void attention_backward_kv(const float* dout, const float* q, const float* k, int64_t k_row, int64_t k_head, const float* v, int64_t v_row,
                           int64_t v_head, const float* m, const float* l, const float* delta, const int64_t* seqs, int64_t num_seqs,
                           const int64_t* q_pos, const int64_t* ranges, int64_t num_ranges, int64_t Hq, int64_t Hkv, int64_t D,
                           double scale, int64_t token_leaf, float* dk, float* dv) {
  using namespace lockstep;
  FloatMode mode;
  Problem p = {reinterpret_cast<const Sequence*>(seqs), num_seqs, q_pos, Hq, Hkv, D, float(scale)};
  std::vector<KeyTile> tiles;
  int64_t out_row = 0;
  for (int64_t j = 0; j < num_ranges; j++) {
    int64_t seq = ranges[3 * j], a = ranges[3 * j + 1], b = ranges[3 * j + 2];
    for (int64_t head = 0; head < Hkv; head++)
      for (int64_t first = a; first < b; first += kColumns)
        tiles.push_back({seq, head, first, std::min<int64_t>(kColumns, b - first), out_row + first - a});
    out_row += b - a;
  }
  parallel_for(int64_t(tiles.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      with_constant<kVecs>(int(num_blocks(tiles[size_t(i)].count, kLanes)), [&](auto n) {
        key_tile<n>(p, tiles[size_t(i)], {q, dout, nullptr, m, l}, {k, k_row, k_head}, {v, v_row, v_head}, token_leaf, {delta, dk, dv});
      });
  });
}
}
