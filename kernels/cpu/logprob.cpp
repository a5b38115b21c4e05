// Row operations of the fused head: statistics of one vocabulary leaf, their merge, and the gradient of its logits (kernels/logprob.py).
#include <algorithm>
#include <cfloat>

#include "parallel.h"
#include "rowwise.h"
#include "vmath.h"

using namespace lockstep;

namespace {

// exp(-128) is 0, and 0 * -128 adds nothing: it stands for logits of -inf and for lanes past the end.
constexpr float kFarBelow = -128.0f;
constexpr float kInfinity = __builtin_inff();

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

}  // namespace

extern "C" {

// target[row] = y of the row's target where that lies in this leaf, else unchanged.
void logprob_leaf(const float* logits, int64_t stride, int64_t rows, int64_t columns, float inv_temp, const int64_t* targets,
                  int64_t first_id, float* stats, float* target) {
  FloatMode mode;
  parallel_for(rows, grain_for(24 * columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      leaf_row(logits + r * stride, columns, inv_temp, stats + 3 * r);
      const int64_t local = targets[r] - first_id;
      if (local >= 0 && local < columns) target[r] = logits[r * stride + local] * inv_temp;
    }
  });
}

void logprob_merge(const float* a, const float* b, float* out, int64_t rows) {
  FloatMode mode;
  for (int64_t r = 0; r < rows; r++, a += 3, b += 3, out += 3) {
    const float m = std::max(a[0], b[0]), da = a[0] - m, db = b[0] - m, ea = lockstep::exp(da), eb = lockstep::exp(db);
    const float s = a[1] * ea + b[1] * eb, t = (a[2] + a[1] * da) * ea + (b[2] + b[1] * db) * eb;
    out[0] = m, out[1] = s, out[2] = t;
  }
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

void logprob_logit_grad(float* logits, int64_t rows, int64_t columns, float inv_temp, const int64_t* local, const float* lse,
                        const float* entropy, const float* g_logprob, const float* g_entropy) {
  FloatMode mode;
  parallel_for(rows, grain_for(24 * columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      float* row = logits + r * columns;
      const Vec factor = splat(inv_temp), log_sum = splat(lse[r]), h = splat(entropy[r]);
      const Vec gl = splat(g_logprob[r]), ge = splat(g_entropy[r]);
      const auto gradient = [&](Vec logit, Vec hit) {
        const Vec d = max(logit * factor - log_sum, splat(kFarBelow)), p = exp(d);
        return factor * (gl * (hit - p) - ge * (p * (d + h)));
      };
      const bool owned = local[r] >= 0 && local[r] < columns;
      const float target = owned ? gradient(splat(row[local[r]]), splat(1.0f))[0] : 0.0f;
      each_vector(columns, [&](int64_t i, int n) { store_n(row + i, gradient(load_n(row + i, n), splat(0.0f)), n); });
      if (owned) row[local[r]] = target;
    }
  });
}
}
