// Attention forward. Leaf = kv_leaf keys at absolute positions, with its own maximum m, sum l and output o; leaves are merged on the tree
// aligned to powers of two. Two schedules, one result: many row-heads side by side, or, for decoding, few of them with keys side by side.
#include "attention_parts.h"

namespace lockstep {
namespace {

// Scores of one leaf, and p = exp(s - m) in their place. Lane j sees the first visible[j] keys.
template <int NV>
void leaf_probabilities(const float* k, int64_t k_stride, int64_t keys, const float* q, int64_t D, float scale, const int32_t* visible,
                        bool all_visible, float* p, float* m, float* l) {
  constexpr int W = NV * kLanes;
  Vec most[NV], sum[NV] = {};
  for (int j = 0; j < NV; j++) most[j] = splat(kAbsent);
  IVec sees[NV];
  for (int j = 0; j < NV; j++) memcpy(&sees[j], visible + j * kLanes, sizeof(IVec));
  for_rows<NV>(keys, k, k_stride, 1, q, D, Zero(), [&](int64_t key, Vec(&acc)[NV]) {
    for (int j = 0; j < NV; j++) {
      Vec s = acc[j] * splat(scale);
      if (!all_visible) s = select((IVec)(splat(int32_t(key)) < sees[j]), s, splat(kAbsent));
      most[j] = max(most[j], s);
      store(p + key * W + j * kLanes, s);
    }
  });
  for (int64_t key = 0; key < keys; key++)
    for (int j = 0; j < NV; j++) {
      Vec e = exp(load(p + key * W + j * kLanes) - most[j]);
      if (!all_visible) e = select((IVec)(splat(int32_t(key)) < sees[j]), e, Vec{});
      sum[j] += e;
      store(p + key * W + j * kLanes, e);
    }
  for (int j = 0; j < NV; j++) {
    store(m + j * kLanes, most[j]);
    store(l + j * kLanes, sum[j]);
  }
}

// Up to NV * kLanes row-heads side by side.
template <int NV>
void many_rows(const Problem& p, const Task& t, const float* q, const Keys& k, const Keys& v, int64_t leaf, const Output& out) {
  constexpr int W = NV * kLanes;
  const Sequence& seq = p.seqs[t.seq];
  const float* q_lanes[W];
  float* o_lanes[W];
  int64_t last_key[W], most_keys = 0;
  for (int j = 0; j < W; j++) {
    Lane at = lane(p, t, std::min<int64_t>(j, t.count - 1));
    q_lanes[j] = q + (at.row * p.Hq + at.head) * p.D;
    o_lanes[j] = out.o + (at.row * p.Hq + at.head) * p.D;
    last_key[j] = std::min(p.q_pos[at.row], seq.k_len - 1);
    most_keys = std::max(most_keys, last_key[j] + 1);
  }
  int64_t leaves = num_blocks(most_keys, leaf), node_size = (p.D + 2) * W;
  float* q_tile = scratch(3, size_t(p.D * W + leaf * W + AlignedTree::slots(leaves) * node_size));
  float *probabilities = q_tile + p.D * W, *nodes = probabilities + leaf * W;  // node: m[W], l[W], o[D][W]
  gather_lanes(q_lanes, W, p.D, q_tile);
  auto merge = [&](int left, int right) {
    float *a = nodes + left * node_size, *b = nodes + right * node_size;
    for (int j = 0; j < W; j += kLanes) {
      Weights w = merge_weights(load(a + j), load(b + j));
      store(a + j, w.m);
      for (int64_t d = 1; d < p.D + 2; d++) store(a + d * W + j, merged(load(a + d * W + j), load(b + d * W + j), w));
    }
  };
  AlignedTree tree;
  for (int64_t i = 0; i < leaves; i++) {
    int64_t first_key = i * leaf, keys = std::min(leaf, most_keys - first_key);
    int32_t visible[W];
    bool all_visible = true;
    for (int j = 0; j < W; j++) {
      visible[j] = int32_t(std::max<int64_t>(0, std::min(keys, last_key[j] + 1 - first_key)));
      all_visible &= visible[j] == keys;
    }
    float* node = nodes + tree.push_slot() * node_size;
    Rows k_leaf = rows_of(k, seq, t.seq, t.kv_head, first_key, keys, p.D, 1), v_leaf = rows_of(v, seq, t.seq, t.kv_head, first_key, keys, p.D, 2);
    leaf_probabilities<NV>(k_leaf.data, k_leaf.stride, keys, q_tile, p.D, p.scale, visible,
                           all_visible, probabilities, node, node + W);
    for_rows<NV>(p.D, v_leaf.data, 1, v_leaf.stride, probabilities, keys, Zero(),
                 [&](int64_t d, Vec(&acc)[NV]) {
                   for (int j = 0; j < NV; j++) store(node + (2 + d) * W + j * kLanes, acc[j] + Vec{});
                 });
    tree.push(i, merge);
  }
  tree.finish(merge);
  for (int64_t d = 2; d < p.D + 2; d++)
    for (int j = 0; j < W; j += kLanes) store(nodes + d * W + j, load(nodes + d * W + j) / load(nodes + W + j));
  scatter_lanes(nodes + 2 * W, W, p.D, o_lanes, int(t.count));
  for (int64_t j = 0; j < t.count; j++) {
    Lane at = lane(p, t, j);
    out.m[at.row * p.Hq + at.head] = nodes[j];
    out.l[at.row * p.Hq + at.head] = nodes[W + j];
  }
}

}  // namespace

static std::vector<int64_t> tile_starts(int64_t count) {
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < count; i += kColumns) starts.push_back(i);
  starts.push_back(count);
  return starts;
}

static void attention_forward(const Problem& p, const float* q, const Keys& k, const Keys& v, int64_t leaf, const Output& out) {
  std::vector<Task> tasks;
  int64_t work = 1;
  for (int64_t s = 0; s < p.num_seqs; s++) {
    std::vector<int64_t> starts = tile_starts((p.seqs[s].q_stop - p.seqs[s].q_start) * p.group());
    for (int64_t head = 0; head < p.Hkv; head++)
      for (size_t i = 0; i + 1 < starts.size(); i++) tasks.push_back({s, head, starts[i], starts[i + 1] - starts[i]});
    work = std::max(work, 4 * p.seqs[s].k_len * p.D);  // twice an FMA for each of several row-heads
  }
  parallel_for(int64_t(tasks.size()), grain_for(work), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Task& t = tasks[size_t(i)];
      if (t.count <= kFewRows) attention_few_rows(p, t, q, k, v, leaf, out);
      else with_constant<kVecs>(int(num_blocks(t.count, kLanes)), [&](auto n) { many_rows<n>(p, t, q, k, v, leaf, out); });
    }
  });
}

}  // namespace lockstep

namespace {
using lockstep::Sequence;

// 0 = fine, else a key of _FAULTS in attention.py. `rows`: of k; with a table, `pages` of page_size rows hold them.
int check(const Sequence* seqs, int64_t num_seqs, const int64_t* q_pos, int64_t M, int64_t rows, bool rising, const int32_t* table,
          int64_t pages_per_seq, int64_t page_size) {
  for (int64_t s = 0; s < num_seqs; s++) {
    const auto [q_start, q_stop, k_start, k_len] = seqs[s];
    if (q_start < 0 || q_stop < q_start || q_stop > M || k_len < 0) return 1;
    if (!table && (k_start < 0 || k_start + k_len > rows)) return 1;
    for (int64_t page = 0; table && page * page_size < k_len; page++) {
      if (page >= pages_per_seq) return 4;
      const int64_t last = std::min(page_size, k_len - page * page_size), number = table[s * pages_per_seq + page];
      if (number < 0 || number * page_size + last > rows) return 4;
    }
    for (int64_t row = q_start; row < q_stop; row++) {
      if (q_pos[row] < 0 || k_len == 0) return 2;
      if (rising && row > q_start && q_pos[row] <= q_pos[row - 1]) return 3;
    }
  }
  return 0;
}

// Rows of no sequence are zero.
void clear_others(const Sequence* seqs, int64_t num_seqs, int64_t M, int64_t Hq, int64_t D, const lockstep::Output& out) {
  std::vector<char> covered(size_t(M), 0);
  for (int64_t s = 0; s < num_seqs; s++) std::fill(covered.begin() + seqs[s].q_start, covered.begin() + seqs[s].q_stop, char(1));
  for (int64_t row = 0; row < M; row++) {
    if (covered[size_t(row)]) continue;
    std::fill_n(out.o + row * Hq * D, Hq * D, 0.0f);
    std::fill_n(out.m + row * Hq, Hq, 0.0f);
    std::fill_n(out.l + row * Hq, Hq, 0.0f);
  }
}
}  // namespace

extern "C" {
int attention_check(const int64_t* seqs, int64_t num_seqs, const int64_t* q_pos, int64_t M, int64_t R, int64_t rising) {
  return check(reinterpret_cast<const Sequence*>(seqs), num_seqs, q_pos, M, R, rising, nullptr, 0, 0);
}
// Checks, then computes: a fault as in `check`, with nothing written. `half`: k and v are bf16; q and o are fp32 always.
int attention_forward(const float* q, const void* k, int64_t k_row, int64_t k_head, const void* v, int64_t v_row, int64_t v_head,
                      int64_t half, const int64_t* seqs, int64_t num_seqs, const int64_t* q_pos, int64_t M, int64_t R, int64_t Hq,
                      int64_t Hkv, int64_t D, double scale, int64_t kv_leaf, const int32_t* table, int64_t pages_per_seq,
                      int64_t page_size, float* o, float* m, float* l) {
  using namespace lockstep;
  const Sequence* sequences = reinterpret_cast<const Sequence*>(seqs);
  if (int fault = check(sequences, num_seqs, q_pos, M, R, false, table, pages_per_seq, page_size)) return fault;
  FloatMode mode;
  clear_others(sequences, num_seqs, M, Hq, D, {o, m, l});
  Problem p = {sequences, num_seqs, q_pos, Hq, Hkv, D, float(scale)};
  lockstep::attention_forward(p, q, {k, k_row, k_head, half != 0, table, pages_per_seq, page_size},
                              {v, v_row, v_head, half != 0, table, pages_per_seq, page_size}, kv_leaf, {o, m, l});
  return 0;
}
}
