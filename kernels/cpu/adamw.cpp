// The optimizer step: each element by itself, so cuts, threads and register width cannot matter.
#include "parallel.h"
#include "rowwise.h"

using namespace lockstep;

extern "C" {

// scalars: decay, beta1, 1 - beta1, beta2, 1 - beta2, sqrt(bias correction 2), eps, lr / bias correction 1.
void adamw_step(float* p, const float* g, float* m, float* v, int64_t n, const float* scalars) {
  FloatMode mode;
  const Vec decay = splat(scalars[0]), b1 = splat(scalars[1]), c1 = splat(scalars[2]), b2 = splat(scalars[3]), c2 = splat(scalars[4]);
  const Vec root = splat(scalars[5]), eps = splat(scalars[6]), rate = splat(scalars[7]);
  parallel_for(n, 1 << 14, [&](int64_t begin, int64_t end) {
    each_vector(end - begin, [&](int64_t offset, int lanes) {
      const int64_t i = begin + offset;
      const Vec grad = load_n(g + i, lanes);
      const Vec mean = b1 * load_n(m + i, lanes) + c1 * grad, square = b2 * load_n(v + i, lanes) + c2 * (grad * grad);
      store_n(m + i, mean, lanes);
      store_n(v + i, square, lanes);
      store_n(p + i, load_n(p + i, lanes) * decay - rate * (mean / (sqrt(square) / root + eps)), lanes);
    });
  });
}
}
