// Counter-based random numbers (Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and sampling.
// Element i of a stream is a function of (key, stream, i) alone: word i % 4 of the block with counter (i / 4 low, i / 4 high, 0, stream).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "vmath.h"
#include "vmath_extra.h"

namespace lockstep {
namespace {

constexpr uint32_t kUniform = 1, kNormal = 2, kGumbel = 3, kSampleKey = 4;  // streams; 0 derives keys

static inline void philox(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; round++) {
    const uint64_t p = uint64_t(0xD2511F53u) * a, q = uint64_t(0xCD9E8D57u) * c;
    const uint32_t x = uint32_t(q >> 32) ^ b ^ k0, z = uint32_t(p >> 32) ^ d ^ k1;
    a = x, b = uint32_t(q), c = z, d = uint32_t(p);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

constexpr int kBlocks = 64, kTile = 4 * kBlocks;  // blocks and elements generated together

struct Words {
  uint32_t w[4][kBlocks];
};

static inline void tile_words(uint64_t key, uint32_t stream, uint64_t first_block, Words& out) {
  for (int j = 0; j < kBlocks; j++) {
    const uint64_t block = first_block + j;
    uint32_t a = uint32_t(block), b = uint32_t(block >> 32), c = 0, d = stream;
    philox(a, b, c, d, uint32_t(key), uint32_t(key >> 32));
    out.w[0][j] = a, out.w[1][j] = b, out.w[2][j] = c, out.w[3][j] = d;
  }
}

// A 32-bit word as a double in (0, 1), exactly (w + 1/2) / 2^32.
static inline double unit(uint32_t w) { return (from_bits64(0x4330000000000000ull | w) - 4503599627370495.5) * 0x1p-32; }

static inline float gumbel(uint32_t w) { return float(-log_f64(-log_f64(unit(w)))); }

static void uniform_tile(const Words& in, float (&out)[kTile]) {
  for (int j = 0; j < kBlocks; j++)
    for (int i = 0; i < 4; i++) out[4 * j + i] = (float(int32_t(in.w[i][j] >> 9)) + 0.5f) * 0x1p-23f;
}

static void gumbel_tile(const Words& in, float (&out)[kTile]) {
  float noise[4][kBlocks];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < kBlocks; j++) noise[i][j] = gumbel(in.w[i][j]);
  for (int j = 0; j < kBlocks; j++)
    for (int i = 0; i < 4; i++) out[4 * j + i] = noise[i][j];
}

// Box and Muller: words (0, 1) of a block give its elements 0 and 1, words (2, 3) elements 2 and 3.
static void normal_tile(const Words& in, float (&out)[kTile]) {
  float value[4][kBlocks];
  for (int i = 0; i < 4; i += 2)
    for (int j = 0; j < kBlocks; j++) {
      const double radius = __builtin_sqrt(-2.0 * log_f64(unit(in.w[i][j])));
      double sine, cosine;
      sincos_turns(unit(in.w[i + 1][j]), sine, cosine);
      value[i][j] = float(radius * cosine);
      value[i + 1][j] = float(radius * sine);
    }
  for (int j = 0; j < kBlocks; j++)
    for (int i = 0; i < 4; i++) out[4 * j + i] = value[i][j];
}

template <class Tile>
void fill(uint64_t key, uint32_t stream, uint64_t offset, int64_t n, float* out, Tile tile) {
  const uint64_t first = offset / kTile, last = (offset + n + kTile - 1) / kTile;
  parallel_for(int64_t(last - first), 64, [&](int64_t a, int64_t b) {
    Words words;
    float values[kTile];
    for (uint64_t t = first + a; t < first + b; t++) {
      tile_words(key, stream, t * kBlocks, words);
      tile(words, values);
      const uint64_t lo = std::max(offset, t * kTile), hi = std::min(offset + n, (t + 1) * kTile);
      std::copy(values + (lo - t * kTile), values + (hi - t * kTile), out + (lo - offset));
    }
  });
}

// --- sampling ----------------------------------------------------------------------------------------------------------------
struct Best {
  float value = -INFINITY;
  int64_t id = -1;
  void offer(float v, int64_t i) {
    if (v > value || (v == value && (id < 0 || i < id))) value = v, id = i;
  }
};

static Best best_of_all(const float* logits, int64_t vocab, float inv_temp, uint64_t key) {
  Best best;
  Words words;
  float noise[kTile];
  for (int64_t v0 = 0; v0 < vocab; v0 += kTile) {
    const int n = int(std::min<int64_t>(kTile, vocab - v0));
    tile_words(key, kGumbel, uint64_t(v0 / 4), words);
    gumbel_tile(words, noise);
    for (int i = 0; i < n; i++) noise[i] = logits[v0 + i] * inv_temp + noise[i];
    for (int i = 0; i < n; i++) best.offer(noise[i], v0 + i);
  }
  return best;
}

static float noise_of(uint64_t key, int64_t id) {
  uint32_t w[4] = {uint32_t(id / 4), uint32_t(uint64_t(id / 4) >> 32), 0, kGumbel};
  philox(w[0], w[1], w[2], w[3], uint32_t(key), uint32_t(key >> 32));
  return gumbel(w[id % 4]);
}

// Token ids in the order (value descending, id ascending), as one integer each.
static inline uint64_t rank_of(float value, uint32_t id) {
  const float v = value + 0.0f;  // -0 and +0 are one value
  uint32_t b;
  memcpy(&b, &v, 4);
  b = (b & 0x80000000u) ? ~b : b | 0x80000000u;
  return uint64_t(~b) << 32 | id;
}

static inline float value_of(uint64_t rank) {
  uint32_t b = ~uint32_t(rank >> 32);
  b = (b & 0x80000000u) ? b & 0x7fffffffu : ~b;
  float v;
  memcpy(&v, &b, 4);
  return v;
}

// Probability mass relative to the best token, in units of 2^-40: an integer, so its sums need no order.
static inline int64_t mass(float value, float best) { return int64_t(double(lockstep::exp(value - best)) * 0x1p40); }

// Tokens kept by top_k, then by top_p on what is left: the shortest prefix whose mass reaches top_p of the total.
static size_t restrict_tokens(std::vector<uint64_t>& ranks, int64_t top_k, double top_p) {
  size_t kept = ranks.size();
  if (top_k > 0 && size_t(top_k) < kept) {
    kept = size_t(top_k);
    std::nth_element(ranks.begin(), ranks.begin() + (kept - 1), ranks.end());
  }
  if (top_p >= 1.0) return kept;
  const float best = value_of(*std::min_element(ranks.begin(), ranks.begin() + kept));
  int64_t total = 0, sum = 0;
  for (size_t i = 0; i < kept; i++) total += mass(value_of(ranks[i]), best);
  const double target = double(total) * top_p;
  for (size_t a = 0, step = 256; a < kept; a += step, step *= 8) {  // sort no more than needed
    const size_t b = std::min(kept, a + step);
    if (b < kept) std::nth_element(ranks.begin() + a, ranks.begin() + b, ranks.begin() + kept);
    std::sort(ranks.begin() + a, ranks.begin() + b);
    for (size_t i = a; i < b; i++) {
      sum += mass(value_of(ranks[i]), best);
      if (double(sum) >= target) return i + 1;
    }
  }
  return kept;
}

static Best sample_row(const float* logits, int64_t vocab, float inv_temp, uint64_t key, int64_t top_k, double top_p) {
  for (int64_t v = 0; v < vocab; v++)
    if (logits[v] != logits[v] || logits[v] == INFINITY) return Best();
  if (inv_temp == INFINITY) {
    Best best;
    for (int64_t v = 0; v < vocab; v++) best.offer(logits[v], v);
    return best;
  }
  if ((top_k <= 0 || top_k >= vocab) && top_p >= 1.0) return best_of_all(logits, vocab, inv_temp, key);
  std::vector<uint64_t> ranks(vocab);
  for (int64_t v = 0; v < vocab; v++) ranks[v] = rank_of(logits[v] * inv_temp, uint32_t(v));
  const size_t kept = restrict_tokens(ranks, top_k, top_p);
  Best best;
  for (size_t i = 0; i < kept; i++) {
    const int64_t id = uint32_t(ranks[i]);
    best.offer(logits[id] * inv_temp + noise_of(key, id), id);
  }
  return best;
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

extern "C" {

void rng_philox(uint32_t* counter, uint32_t k0, uint32_t k1) { philox(counter[0], counter[1], counter[2], counter[3], k0, k1); }

void rng_uniform(uint64_t key, uint64_t offset, int64_t n, float* out) {
  FloatMode mode;
  fill(key, kUniform, offset, n, out, uniform_tile);
}

void rng_normal(uint64_t key, uint64_t offset, int64_t n, float* out) {
  FloatMode mode;
  fill(key, kNormal, offset, n, out, normal_tile);
}

void rng_gumbel(uint64_t key, uint64_t offset, int64_t n, float* out) {
  FloatMode mode;
  fill(key, kGumbel, offset, n, out, gumbel_tile);
}

void rng_sample_keys(uint64_t key, const int64_t* prompt, const int64_t* sample, const int64_t* position, int64_t n, uint64_t* out) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t w[4] = {uint32_t(prompt[i]), uint32_t(sample[i]), uint32_t(position[i]), kSampleKey};
    philox(w[0], w[1], w[2], w[3], uint32_t(key), uint32_t(key >> 32));
    out[i] = uint64_t(w[1]) << 32 | w[0];
  }
}

// ids[row] = -1 where a row holds NaN or +inf, or no token at all.
void rng_sample(const float* logits, int64_t stride, int64_t rows, int64_t vocab, float inv_temp, const uint64_t* keys, int64_t top_k,
                double top_p, int64_t* ids) {
  FloatMode mode;
  parallel_for(rows, 1, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) ids[r] = sample_row(logits + r * stride, vocab, inv_temp, keys[r], top_k, top_p).id;
  });
}
}
