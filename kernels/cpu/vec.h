// One register of fp32 lanes, and what the kernels do with it. The build fixes the width (LOCKSTEP_LANES: 16 = AVX512, 8 = AVX2,
// 4 = portable, without AVX or FMA instructions); the width never decides the order of a sum, so it never decides a bit.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef LOCKSTEP_LANES
#error "compile through kernels/cpu/build.py, which defines LOCKSTEP_LANES"
#endif

namespace lockstep {

constexpr int kLanes = LOCKSTEP_LANES;
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UVec __attribute__((vector_size(4 * kLanes)));
typedef float VecInMemory __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

static inline Vec load(const float* p) { return *(const VecInMemory*)p; }
static inline void store(float* p, Vec v) { *(VecInMemory*)p = v; }
static inline Vec splat(float x) {
#if LOCKSTEP_LANES == 16
  return (Vec)_mm512_set1_ps(x);
#elif LOCKSTEP_LANES == 8
  return (Vec)_mm256_set1_ps(x);
#else
  return Vec{x, x, x, x};
#endif
}
static inline IVec splat(int32_t x) { return IVec{} + x; }
static inline IVec bits(Vec v) { return (IVec)v; }
static inline Vec from_bits(IVec v) { return (Vec)v; }
static inline Vec select(IVec mask, Vec yes, Vec no) { return (Vec)((mask & (IVec)yes) | (~mask & (IVec)no)); }
static inline Vec abs(Vec v) { return (Vec)((IVec)v & splat(int32_t(0x7fffffff))); }
// A NaN in `b` is dropped, a NaN in `a` is kept.
static inline Vec max(Vec a, Vec b) { return select((IVec)(a < b), b, a); }
static inline Vec min(Vec a, Vec b) { return select((IVec)(a > b), b, a); }

// The first n < kLanes elements; the other lanes are zero.
static inline Vec load_partial(const float* p, int n) {
#if LOCKSTEP_LANES == 16
  return (Vec)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
#else
  float buffer[kLanes] = {};
  memcpy(buffer, p, 4 * size_t(n));
  return load(buffer);
#endif
}
static inline void store_partial(float* p, Vec v, int n) {
#if LOCKSTEP_LANES == 16
  _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)v);
#else
  float buffer[kLanes];
  store(buffer, v);
  memcpy(p, buffer, 4 * size_t(n));
#endif
}

// a * b + c with one rounding.
static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline Vec fma(Vec a, Vec b, Vec c) {
#if LOCKSTEP_LANES == 16
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LOCKSTEP_LANES == 8
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int i = 0; i < kLanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// Correctly rounded (IEEE-754) square root.
static inline float sqrt(float x) { return __builtin_sqrtf(x); }
static inline Vec sqrt(Vec v) {
#if LOCKSTEP_LANES == 16
  return (Vec)_mm512_sqrt_ps((__m512)v);
#elif LOCKSTEP_LANES == 8
  return (Vec)_mm256_sqrt_ps((__m256)v);
#else
  for (int i = 0; i < kLanes; i++) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

// r[i][j] <-> r[j][i]
#if LOCKSTEP_LANES == 16
static inline void transpose(Vec (&r)[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps((__m512)r[i], (__m512)r[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps((__m512)r[i], (__m512)r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int h = 0; h < 2; h++) {
      b[i + 2 * h] = _mm512_shuffle_ps(a[i + h], a[i + 2 + h], 0x44);
      b[i + 2 * h + 1] = _mm512_shuffle_ps(a[i + h], a[i + 2 + h], 0xee);
    }
  for (int j = 0; j < 4; j++) {  // 4x4 blocks of 128 bits
    __m512 p = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x44), q = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xee);
    __m512 s = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x44), t = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xee);
    r[j] = (Vec)_mm512_shuffle_f32x4(p, s, 0x88);
    r[4 + j] = (Vec)_mm512_shuffle_f32x4(p, s, 0xdd);
    r[8 + j] = (Vec)_mm512_shuffle_f32x4(q, t, 0x88);
    r[12 + j] = (Vec)_mm512_shuffle_f32x4(q, t, 0xdd);
  }
}
#elif LOCKSTEP_LANES == 8
static inline void transpose(Vec (&r)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int h = 0; h < 2; h++) {
      b[i + 2 * h] = _mm256_shuffle_ps(a[i + h], a[i + 2 + h], 0x44);
      b[i + 2 * h + 1] = _mm256_shuffle_ps(a[i + h], a[i + 2 + h], 0xee);
    }
  for (int j = 0; j < 4; j++) {
    r[j] = (Vec)_mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
    r[4 + j] = (Vec)_mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
  }
}
#else
static inline void transpose(Vec (&r)[4]) {
  for (int i = 0; i < 4; i++)
    for (int j = i + 1; j < 4; j++) {
      float x = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = x;
    }
}
#endif

// kLanes rows of kLanes floats at `from`, transposed into rows at `to`.
static inline void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Vec r[kLanes];
  for (int i = 0; i < kLanes; i++) r[i] = load(from + i * from_stride);
  transpose(r);
  for (int i = 0; i < kLanes; i++) store(to + i * to_stride, r[i]);
}

// 16 logical lanes, whatever the register width: lane j of a row sum is the chain over elements j, j + 16, j + 32, ...
constexpr int kGroup = 16 / kLanes;
struct Lanes16 {
  Vec r[kGroup];
};
static inline Lanes16 splat16(float x) {
  Lanes16 v;
  for (int g = 0; g < kGroup; g++) v.r[g] = splat(x);
  return v;
}
static inline Lanes16 load16(const float* p) {
  Lanes16 v;
  for (int g = 0; g < kGroup; g++) v.r[g] = load(p + g * kLanes);
  return v;
}
// Lanes halved 16-8-4-2-1: lane i takes lane i + width / 2.
static inline float sum16(const Lanes16& v) {
  float s[16];
  for (int g = 0; g < kGroup; g++) store(s + g * kLanes, v.r[g]);
  for (int width = 8; width; width >>= 1)
    for (int i = 0; i < width; i++) s[i] += s[i + width];
  return s[0];
}

}  // namespace lockstep
