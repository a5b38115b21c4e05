// Elementary functions: each element by itself, so cuts, threads and register width cannot matter.
#include "parallel.h"
#include "rowwise.h"
#include "vmath.h"

using namespace lockstep;

namespace {

template <class F>
void map(const float* x, float* y, int64_t n, F f) {
  FloatMode mode;
  parallel_for(n, 1 << 14, [&](int64_t begin, int64_t end) {
    each_vector(end - begin, [&](int64_t i, int lanes) { store_n(y + begin + i, f(load_n(x + begin + i, lanes)), lanes); });
  });
}

}  // namespace

extern "C" {

void elementwise_exp(const float* x, float* y, int64_t n) { map(x, y, n, [](Vec v) { return exp(v); }); }
void elementwise_log(const float* x, float* y, int64_t n) { map(x, y, n, [](Vec v) { return log(v); }); }
void elementwise_sqrt(const float* x, float* y, int64_t n) { map(x, y, n, [](Vec v) { return sqrt(v); }); }
void elementwise_rsqrt(const float* x, float* y, int64_t n) { map(x, y, n, [](Vec v) { return rsqrt(v); }); }
void elementwise_silu(const float* x, float* y, int64_t n) { map(x, y, n, [](Vec v) { return silu(v); }); }
}
