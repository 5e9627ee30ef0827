// Vectors of floats, as wide as the instruction set that this file is compiled for, and what attention needs of them.
// GCC's vector types carry the arithmetic, so that one source serves AVX-512, AVX2 and plain x86-64.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef KVDRIVE_VECTOR_BYTES
#if defined(__AVX512F__)
#define KVDRIVE_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define KVDRIVE_VECTOR_BYTES 32
#else
#define KVDRIVE_VECTOR_BYTES 16
#endif
#endif

namespace kvdrive {

constexpr int W = KVDRIVE_VECTOR_BYTES / 4;  // floats per vector

typedef float vfloat __attribute__((vector_size(KVDRIVE_VECTOR_BYTES)));
typedef int32_t vint __attribute__((vector_size(KVDRIVE_VECTOR_BYTES)));
typedef uint32_t vuint __attribute__((vector_size(KVDRIVE_VECTOR_BYTES)));
typedef uint16_t vhalf __attribute__((vector_size(KVDRIVE_VECTOR_BYTES / 2)));

struct bfloat {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

inline vfloat splat(float x) { return x - vfloat{}; }

inline vfloat load(const float* p) {
  vfloat v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline vfloat load(const bfloat* p) {
  vhalf bits;
  std::memcpy(&bits, p, sizeof bits);
  return (vfloat)(__builtin_convertvector(bits, vuint) << 16);
}

inline float to_float(float x) { return x; }
inline float to_float(bfloat x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline float to_float(half x) {
  uint32_t bits = uint32_t(x.bits & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  value *= 0x1p112f;  // repairs the exponent's bias and makes subnormals right
  std::memcpy(&bits, &value, sizeof bits);
  if ((x.bits & 0x7c00u) == 0x7c00u) bits = 0x7f800000u | uint32_t(x.bits & 0x3ffu) << 13;
  bits |= uint32_t(x.bits & 0x8000u) << 16;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline vfloat load(const half* p) {
#if defined(__F16C__) && KVDRIVE_VECTOR_BYTES == 32
  return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX512F__) && KVDRIVE_VECTOR_BYTES == 64
  return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  vfloat v;
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
  return v;
#endif
}

// 2 W elements as two vectors, in the order that costs least: bf16 splits into its even and its odd elements.
template <typename T>
inline void load_pair(const T* p, vfloat& first, vfloat& second) {
  first = load(p);
  second = load(p + W);
}
inline void load_pair(const bfloat* p, vfloat& even, vfloat& odd) {
  vuint bits;
  std::memcpy(&bits, p, sizeof bits);
  even = (vfloat)(bits << 16);
  odd = (vfloat)(bits & 0xffff0000u);
}

inline void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof v); }

inline uint16_t round_to_bfloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void write(float* p, float x) { *p = x; }
inline void write(bfloat* p, float x) { p->bits = round_to_bfloat(x); }
inline void write(half* p, float x) {
#if defined(__F16C__)
  p->bits = uint16_t(_cvtss_sh(x, 0));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = uint16_t(bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x7f800000u) {
    p->bits = sign | 0x7c00u | (bits > 0x7f800000u ? 0x200u : 0);
  } else if (bits >= 0x477ff000u) {
    p->bits = sign | 0x7c00u;  // rounds beyond the largest half
  } else if (bits < 0x38800000u) {
    float magnitude;  // subnormal: adding 0.5 leaves the rounded value in the last bits
    std::memcpy(&magnitude, &bits, sizeof bits);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof bits);
    p->bits = sign | uint16_t(bits - 0x3f000000u);
  } else {
    bits += 0xfff + ((bits >> 13) & 1);
    p->bits = sign | uint16_t((bits - 0x38000000u) >> 13);
  }
#endif
}

inline void store(bfloat* p, vfloat v) {
  const vuint bits = (vuint)v;
  const vuint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vhalf out = __builtin_convertvector(v == v ? rounded : (bits >> 16 | 0x40), vhalf);
  std::memcpy(p, &out, sizeof out);
}

inline void store(half* p, vfloat v) {
#if defined(__F16C__) && KVDRIVE_VECTOR_BYTES == 32
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#elif defined(__AVX512F__) && KVDRIVE_VECTOR_BYTES == 64
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#else
  for (int i = 0; i < W; i++) write(p + i, v[i]);
#endif
}

inline vfloat vmax(vfloat a, vfloat b) { return a > b ? a : b; }

inline float sum(vfloat v) {
  float lanes[W], total = 0;
  store(lanes, v);
  for (int i = 0; i < W; i++) total += lanes[i];
  return total;
}

inline float largest(vfloat v) {
  float lanes[W], top = lanes[0] = v[0];
  store(lanes, v);
  for (int i = 1; i < W; i++) top = lanes[i] > top ? lanes[i] : top;
  return top;
}

// out[i] = scale * the sum of v[i], for four vectors at once: a transposition that adds.
inline void sum4(const vfloat* v, float scale, float* out) {
#if defined(__AVX2__) && (defined(__AVX512F__) || KVDRIVE_VECTOR_BYTES == 32)
#if KVDRIVE_VECTOR_BYTES == 64
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 lanes = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
#else
  const __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 halves = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
#endif
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  _mm_storeu_ps(out, _mm_mul_ps(sums, _mm_set1_ps(scale)));
#else
  for (int i = 0; i < 4; i++) out[i] = scale * sum(v[i]);
#endif
}

// e^x for x <= 0, relative error below 2e-7; 0 below -87. Cody-Waite reduction and a polynomial of degree 6.
inline vfloat exp_negative(vfloat x) {
  const vfloat magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vfloat clamped = vmax(x, splat(-87.0f));
  const vfloat shifted = clamped * 1.44269504088896341f + magic;
  const vfloat n = shifted - magic;
  vfloat r = clamped - n * 0.693145751953125f;
  r = r - n * 1.42860682030941723e-6f;
  vfloat p = splat(1.3981999507e-3f);
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const vint power = ((vint)shifted - (vint)magic + 127) << 23;
  const vfloat result = p * (vfloat)power;
  return x < splat(-87.0f) ? vfloat{} : result;
}

// tanh x, absolute error below 1e-6.
inline vfloat hyperbolic_tangent(vfloat x) {
  const vfloat shrunk = exp_negative(x > 0 ? -2 * x : 2 * x);
  const vfloat magnitude = (1 - shrunk) / (1 + shrunk);
  return x > 0 ? magnitude : -magnitude;
}

}  // namespace kvdrive
