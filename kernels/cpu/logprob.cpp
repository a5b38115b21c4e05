// The fused head: statistics of vocabulary leaves and the gradient of their logits (kernels/logprob.py). One leaf of logits exists at a
// time: a leaf is a product of its own, so nothing is lost by throwing it away.
#include <algorithm>
#include <cfloat>
#include <memory>

#include "linear.h"
#include "parallel.h"
#include "rowwise.h"
#include "vmath.h"

extern "C" int linear_weight_grad(int64_t* acc, const void* dy, int64_t dy_stride, const void* x, int64_t x_stride, int64_t N, int64_t K,
                                  const int64_t* tiles, int64_t num_tiles, double scale, int64_t half);

using namespace lockstep;

namespace {

// exp(-128) is 0, and 0 * -128 adds nothing: it stands for logits of -inf and for lanes past the end.
constexpr float kFarBelow = -128.0f;
constexpr float kInfinity = __builtin_inff();
constexpr int64_t kFewRows = 8;  // up to so many rows, threads share out leaves; above, each leaf's product

std::unique_ptr<float[]> floats(int64_t count) { return std::unique_ptr<float[]>(new float[size_t(count)]); }

// h [M,H] fp32 against w [V,H] fp32 or bf16 in leaves of `leaf` rows; the last may be shorter.
struct Head {
  const float* h;
  int64_t h_stride;
  const void* w;
  int64_t w_stride, rows, vocab, hidden, k_leaf, leaf;
  bool half;

  int64_t first(int64_t i) const { return i * leaf; }
  int64_t size(int64_t i) const { return std::min(leaf, vocab - i * leaf); }
  void logits(int64_t i, float* y) const {
    if (half) linear_forward(h, h_stride, static_cast<const bf16*>(w) + first(i) * w_stride, w_stride, y, size(i), rows, size(i), hidden, k_leaf);
    else linear_forward(h, h_stride, static_cast<const float*>(w) + first(i) * w_stride, w_stride, y, size(i), rows, size(i), hidden, k_leaf);
  }
  void input_grad(int64_t i, const float* dy, float* dx) const {
    if (half) linear_input_grad(dy, size(i), static_cast<const bf16*>(w) + first(i) * w_stride, w_stride, dx, hidden, rows, size(i), hidden, size(i));
    else linear_input_grad(dy, size(i), static_cast<const float*>(w) + first(i) * w_stride, w_stride, dx, hidden, rows, size(i), hidden, size(i));
  }
};

void leaf_row(const float* logits, int64_t n, float inv_temp, float* stats) {
  const Vec factor = splat(inv_temp);
  Vec most = splat(-FLT_MAX);
  each_vector(n, [&](int64_t i, int lanes) { most = max(most, load_n(logits + i, lanes, -kInfinity) * factor); });
  float m = most[0];
  for (int j = 1; j < kLanes; j++) m = std::max(m, most[j]);
  Lanes16 s = splat16(0.0f), t = splat16(0.0f);
  each_lane_group(n, [&](int g, int64_t i, int lanes) {
    const Vec d = max(load_n(logits + i, lanes, -kInfinity) * factor - splat(m), splat(kFarBelow)), e = exp(d);
    s.r[g] = s.r[g] + e;
    t.r[g] = fma(e, d, t.r[g]);
  });
  stats[0] = m, stats[1] = sum16(s), stats[2] = sum16(t);
}

// Statistics [rows,3] of one leaf whose first id is `id`; target[row] = y of the row's target where that lies in this leaf.
void leaf_stats(const float* logits, int64_t stride, int64_t rows, int64_t columns, float inv_temp, const int64_t* targets, int64_t id,
                float* stats, float* target) {
  parallel_for(rows, grain_for(24 * columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      leaf_row(logits + r * stride, columns, inv_temp, stats + 3 * r);
      const int64_t local = targets[r] - id;
      if (local >= 0 && local < columns) target[r] = logits[r * stride + local] * inv_temp;
    }
  });
}

// left = merge of two nodes, [rows,3] each.
void merge(float* left, const float* right, int64_t rows) {
  for (int64_t r = 0; r < rows; r++, left += 3, right += 3) {
    const float m = std::max(left[0], right[0]), dl = left[0] - m, dr = right[0] - m;
    const float el = lockstep::exp(dl), er = lockstep::exp(dr);
    const float s = left[1] * el + right[1] * er, t = (left[2] + left[1] * dl) * el + (right[2] + right[1] * dr) * er;
    left[0] = m, left[1] = s, left[2] = t;
  }
}

// Node (lo, hi) of the halving tree, in place: its value ends up where leaf lo was.
float* merge_node(float* leaves, int64_t lo, int64_t hi, int64_t rows) {
  float* left = leaves + lo * 3 * rows;
  if (hi - lo > 1) {
    const int64_t mid = (lo + hi) / 2;
    merge_node(leaves, lo, mid, rows);
    merge(left, merge_node(leaves, mid, hi, rows), rows);
  }
  return left;
}

// out [nodes, rows, 3]. `first_leaf` is the number of leaf 0 in the nodes' numbering.
void merge_nodes(float* leaves, const int64_t* nodes, int64_t num_nodes, int64_t first_leaf, int64_t rows, float* out) {
  for (int64_t i = 0; i < num_nodes; i++) {
    const float* root = merge_node(leaves, nodes[2 * i] - first_leaf, nodes[2 * i + 1] - first_leaf, rows);
    std::copy(root, root + 3 * rows, out + i * 3 * rows);
  }
}

struct LogitGrad {
  const int64_t* targets;
  const float *lse, *entropy, *g_logprob, *g_entropy;
  float inv_temp;
  bool half;  // the gradient is stored in bf16: rounded once here, and widened again for the products that follow

  // logits [rows, columns] become their gradient; `id` is the id of column 0.
  void operator()(float* logits, int64_t rows, int64_t columns, int64_t id) const {
    parallel_for(rows, grain_for(24 * columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        float* row = logits + r * columns;
        const Vec factor = splat(inv_temp), log_sum = splat(lse[r]), h = splat(entropy[r]);
        const Vec gl = splat(g_logprob[r]), ge = splat(g_entropy[r]);
        const auto gradient = [&](Vec logit, Vec hit) {
          const Vec d = max(logit * factor - log_sum, splat(kFarBelow)), p = exp(d);
          const Vec g = factor * (gl * (hit - p) - ge * (p * (d + h)));
          return half ? widen(narrow(g)) : g;
        };
        const int64_t local = targets[r] - id;
        const bool owned = local >= 0 && local < columns;
        const float target = owned ? gradient(splat(row[local]), splat(1.0f))[0] : 0.0f;
        each_vector(columns, [&](int64_t i, int n) { store_n(row + i, gradient(load_n(row + i, n), splat(0.0f)), n); });
        if (owned) row[local] = target;
      }
    });
  }
};

// Gradients of the hidden state and the head over the halving tree of leaves.
struct Backward {
  const Head& head;
  const LogitGrad& logit_grad;
  int64_t first_id;
  int64_t* acc;  // [V,H], or null: not wanted
  const int64_t* tiles;
  int64_t num_tiles;
  double scale;
  float* logits;
  bool overflow = false;

  // dh [rows,H] of node (lo, hi), leaves numbered from this rank's first.
  void node(int64_t lo, int64_t hi, float* dh) {
    if (hi - lo > 1) {
      const int64_t mid = (lo + hi) / 2, count = head.rows * head.hidden;
      node(lo, mid, dh);
      const auto right = floats(count);
      node(mid, hi, right.get());
      parallel_for(count, 1 << 14, [&](int64_t a, int64_t b) {
        each_vector(b - a, [&](int64_t i, int n) { store_n(dh + a + i, load_n(dh + a + i, n) + load_n(right.get() + a + i, n), n); });
      });
      return;
    }
    const int64_t columns = head.size(lo);
    head.logits(lo, logits);
    logit_grad(logits, head.rows, columns, first_id + head.first(lo));
    if (acc) {
      int64_t* rows = acc + head.first(lo) * head.hidden;
      if (linear_weight_grad(rows, logits, columns, head.h, head.h_stride, columns, head.hidden, tiles, num_tiles, scale, 0)) overflow = true;
    }
    head.input_grad(lo, logits, dh);
  }
};

}  // namespace

extern "C" {

// stats [nodes, M, 3] of the rank's nodes, and y of the targets it owns. half: whether w is bf16.
void logprob_partials(const float* h, int64_t h_stride, const void* w, int64_t w_stride, int64_t half, int64_t M, int64_t V, int64_t H,
                      int64_t k_leaf, int64_t vocab_leaf, int64_t first_id, double inv_temp, const int64_t* targets, const int64_t* nodes,
                      int64_t num_nodes, float* stats, float* target) {
  FloatMode mode;
  const Head head{h, h_stride, w, w_stride, M, V, H, k_leaf, vocab_leaf, half != 0};
  const int64_t leaves = (V + vocab_leaf - 1) / vocab_leaf;
  const auto own = floats(leaves * M * 3);
  const auto some = [&](int64_t begin, int64_t end) {
    const auto logits = floats(M * std::min(V, vocab_leaf));
    for (int64_t i = begin; i < end; i++) {
      head.logits(i, logits.get());
      leaf_stats(logits.get(), head.size(i), M, head.size(i), float(inv_temp), targets, first_id + head.first(i), own.get() + i * M * 3, target);
    }
  };
  if (M <= kFewRows) parallel_for(leaves, std::max<int64_t>(1, grain_for(vocab_leaf * H / kLanes)), some);
  else some(0, leaves);
  merge_nodes(own.get(), nodes, num_nodes, first_id / vocab_leaf, M, stats);
}

// The same from logits [M, V] that exist.
void logprob_partials_of_logits(const float* logits, int64_t stride, int64_t M, int64_t V, int64_t vocab_leaf, int64_t first_id,
                                double inv_temp, const int64_t* targets, const int64_t* nodes, int64_t num_nodes, float* stats,
                                float* target) {
  FloatMode mode;
  const int64_t leaves = (V + vocab_leaf - 1) / vocab_leaf;
  const auto own = floats(leaves * M * 3);
  parallel_for(leaves, grain_for(24 * vocab_leaf * M), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t id = i * vocab_leaf, columns = std::min(vocab_leaf, V - id);
      leaf_stats(logits + id, stride, M, columns, float(inv_temp), targets, first_id + id, own.get() + i * M * 3, target);
    }
  });
  merge_nodes(own.get(), nodes, num_nodes, first_id / vocab_leaf, M, stats);
}

void logprob_merge(const float* a, const float* b, float* out, int64_t rows) {
  FloatMode mode;
  std::copy(a, a + 3 * rows, out);
  merge(out, b, rows);
}

// out [3, rows]: logprob, entropy, lse.
void logprob_finish(const float* stats, const float* target, int64_t rows, float* out) {
  FloatMode mode;
  for (int64_t r = 0; r < rows; r++, stats += 3) {
    const float log_s = lockstep::log(stats[1]);
    out[r] = (target[r] - stats[0]) - log_s;
    out[rows + r] = log_s - stats[2] / stats[1];
    out[2 * rows + r] = stats[0] + log_s;
  }
}

// dh [nodes, M, H]; acc [V, H] += dw unless null. 1 when an exact sum overflowed.
int logprob_backward(const float* h, int64_t h_stride, const void* w, int64_t w_stride, int64_t half, int64_t M, int64_t V, int64_t H,
                     int64_t k_leaf, int64_t vocab_leaf, int64_t first_id, double inv_temp, const int64_t* targets, const float* lse,
                     const float* entropy, const float* g_logprob, const float* g_entropy, const int64_t* nodes, int64_t num_nodes,
                     int64_t* acc, const int64_t* tiles, int64_t num_tiles, double scale, float* dh) {
  FloatMode mode;
  const Head head{h, h_stride, w, w_stride, M, V, H, k_leaf, vocab_leaf, half != 0};
  const LogitGrad logit_grad{targets, lse, entropy, g_logprob, g_entropy, float(inv_temp), half != 0};
  const auto logits = floats(M * std::min(V, vocab_leaf));
  Backward backward{head, logit_grad, first_id, acc, tiles, num_tiles, scale, logits.get()};
  const int64_t first_leaf = first_id / vocab_leaf;
  for (int64_t i = 0; i < num_nodes; i++) backward.node(nodes[2 * i] - first_leaf, nodes[2 * i + 1] - first_leaf, dh + i * M * H);
  return backward.overflow;
}
}
