// Numbers as they lie in memory: fp32, or bf16 (the upper half of an fp32 number). Arithmetic is always fp32: loads widen exactly, stores
// round once, to nearest even. Only integer operations: the processor's own bf16 instructions flush subnormals.
#pragma once
#include <type_traits>

#include "vec.h"

namespace lockstep {

struct bf16 {
  uint16_t bits;
};

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  const uint32_t b = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &b, 4);
  return f;
}
// NaN stays NaN, made quiet, with its sign and the upper bits of its payload.
static inline bf16 narrow(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  if ((b & 0x7fffffff) > 0x7f800000) return {uint16_t((b >> 16) | 0x40)};
  return {uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16)};
}
template <class T>
static inline T stored_as(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else return narrow(x);
}

typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef uint16_t HalfVecInMemory __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

static inline Vec widen(HalfVec v) {
#if LOCKSTEP_LANES == 16
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#elif LOCKSTEP_LANES == 8
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)v), 16);
#else
  return (Vec)(__builtin_convertvector(v, IVec) << 16);
#endif
}
static inline HalfVec narrow(Vec v) {
  const IVec b = bits(v), upper = (IVec)((UVec)b >> 16);
  const IVec rounded = (IVec)((UVec)(b + splat(int32_t(0x7fff)) + (upper & splat(int32_t(1)))) >> 16);
  const IVec nan = (b & splat(int32_t(0x7fffffff))) > splat(int32_t(0x7f800000));
  const IVec half = (nan & (upper | splat(int32_t(0x40)))) | (~nan & rounded);
#if LOCKSTEP_LANES == 16
  return (HalfVec)_mm512_cvtepi32_epi16((__m512i)half);
#elif LOCKSTEP_LANES == 8
  return (HalfVec)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)half), _mm256_extracti128_si256((__m256i)half, 1));
#else
  return __builtin_convertvector(half, HalfVec);
#endif
}

static inline Vec load(const bf16* p) { return widen(*(const HalfVecInMemory*)p); }
static inline void store(bf16* p, Vec v) { *(HalfVecInMemory*)p = narrow(v); }

// The first n <= kLanes elements; the other lanes are zero.
static inline Vec load_n(const float* p, int n) { return n == kLanes ? load(p) : load_partial(p, n); }
static inline Vec load_n(const bf16* p, int n) {
  if (n == kLanes) return load(p);
#if LOCKSTEP_LANES == 16
  return widen((HalfVec)_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p));
#else
  bf16 buffer[kLanes] = {};
  memcpy(buffer, p, 2 * size_t(n));
  return load(buffer);
#endif
}
static inline void store_n(float* p, Vec v, int n) { n == kLanes ? store(p, v) : store_partial(p, v, n); }
static inline void store_n(bf16* p, Vec v, int n) {
  if (n == kLanes) return store(p, v);
#if LOCKSTEP_LANES == 16
  _mm256_mask_storeu_epi16(p, __mmask16((1u << n) - 1), (__m256i)narrow(v));
#else
  bf16 buffer[kLanes];
  store(buffer, v);
  memcpy(p, buffer, 2 * size_t(n));
#endif
}

}  // namespace lockstep
