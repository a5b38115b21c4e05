// Token embedding: rows by bytes, and their gradient as exact sums.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "fixed_point.h"
#include "parallel.h"
#include "rowwise.h"

using namespace lockstep;

namespace {

bool accumulate_row(int64_t* acc, const float* row, int64_t n, double scale) { return accumulate_fixed(acc, row, n, scale); }

bool accumulate_row(int64_t* acc, const bf16* row, int64_t n, double scale) {
  constexpr int64_t kChunk = 256;
  float wide[kChunk];
  bool bad = false;
  for (int64_t c = 0; c < n; c += kChunk) {
    const int64_t count = std::min(kChunk, n - c);
    each_vector(count, [&](int64_t i, int lanes) { store_n(wide + i, load_n(row + c + i, lanes), lanes); });
    bad |= accumulate_fixed(acc + c, wide, count, scale);
  }
  return bad;
}

}  // namespace

extern "C" {

// Rows of `row_bytes`; an id outside [first_id, first_id + vocab) gives zeros.
void embedding_forward(const char* table, int64_t first_id, int64_t vocab, int64_t row_bytes, const int64_t* ids, int64_t rows, char* out) {
  parallel_for(rows, grain_for(row_bytes / 4), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const int64_t local = ids[r] - first_id;
      if (local >= 0 && local < vocab)
        memcpy(out + r * row_bytes, table + local * row_bytes, size_t(row_bytes));
      else
        memset(out + r * row_bytes, 0, size_t(row_bytes));
    }
  });
}

// Rows are shared out by column, so that no two threads meet in one accumulator.
int embedding_accumulate(int64_t is_bf16, int64_t* acc, int64_t first_id, int64_t vocab, int64_t dim, const int64_t* ids, int64_t rows,
                         const void* dx, int64_t dx_row, double scale) {
  FloatMode mode;
  std::atomic<int> overflow{0};
  with_storage(is_bf16, [&](auto type) {
    using T = decltype(type);
    const T* grads = static_cast<const T*>(dx);
    parallel_for(dim, std::max<int64_t>(64, grain_for(4 * rows)), [&](int64_t begin, int64_t end) {
      for (int64_t r = 0; r < rows; r++) {
        const int64_t local = ids[r] - first_id;
        if (local < 0 || local >= vocab) continue;
        if (accumulate_row(acc + local * dim + begin, grads + r * dx_row + begin, end - begin, scale)) overflow = 1;
      }
    });
  });
  return overflow;
}
}
