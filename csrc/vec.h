// Vectors of the instruction set that this file is compiled for. Kernels are written over these types and are compiled
// once for each level (CMakeLists.txt), in a namespace of that level: no kernel is written twice.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace archerfish::LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;  // numbers of 4 bytes in a vector
constexpr int kParts = kGroup / kLanes;   // vectors that hold a number for each output of a group

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef float FloatsAt __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef uint32_t WordsAt __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));

INLINE Floats load(const float* at) { return *reinterpret_cast<const FloatsAt*>(at); }
INLINE void store(float* at, Floats x) { *reinterpret_cast<FloatsAt*>(at) = x; }
INLINE Words load_words(const void* at) { return *reinterpret_cast<const WordsAt*>(at); }
INLINE Floats all(float x) { return x - Floats{}; }
INLINE Ints all_ints(int32_t x) { return x - Ints{}; }
INLINE Words all_words(uint32_t x) { return x - Words{}; }
INLINE Floats as_floats(Words x) {
  Floats y;
  memcpy(&y, &x, sizeof y);
  return y;
}
INLINE Words as_words(Floats x) {
  Words y;
  memcpy(&y, &x, sizeof y);
  return y;
}
INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }  // towards zero
INLINE Floats choose(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }
#if defined(__aarch64__)
INLINE Floats larger(Floats a, Floats b) { return (Floats)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE Floats smaller(Floats a, Floats b) { return (Floats)vminq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE Floats larger_or_nan(Floats a, Floats b) { return larger(a, b); }
#else  // the first two become one instruction, and give b if there is a NaN
INLINE Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }
INLINE Floats smaller(Floats a, Floats b) { return choose(a < b, a, b); }
INLINE Floats larger_or_nan(Floats a, Floats b) { return choose((a >= b) | (a != a), a, b); }
#endif
INLINE Floats magnitude(Floats x) { return as_floats(as_words(x) & all_words(0x7fffffffu)); }
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE float sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__aarch64__)
  return vaddvq_f32((float32x4_t)x);
#else
  float total = 0;
  UNROLL for (int i = 0; i < kLanes; i++) total += x[i];
  return total;
#endif
}
INLINE float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__aarch64__)
  return vmaxvq_f32((float32x4_t)x);
#else
  float found = x[0];
  UNROLL for (int i = 1; i < kLanes; i++) found = x[i] > found ? x[i] : found;
  return found;
#endif
}
INLINE int32_t sum(Ints x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__aarch64__)
  return vaddvq_s32((int32x4_t)x);
#else
  int32_t total = 0;
  UNROLL for (int i = 0; i < kLanes; i++) total += x[i];
  return total;
#endif
}

// a * b + c in one rounding at every level with such an instruction: compilers take it or leave it from place to place,
// and the same numbers must give the same results wherever they stand.
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
INLINE Floats multiply_add(Floats a, float b, Floats c) { return multiply_add(a, all(b), c); }

// ---- 16-bit numbers ----
INLINE float from_half(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#elif defined(__aarch64__)
  __fp16 x;
  memcpy(&x, &bits, 2);
  return x;
#else
  uint32_t sign = uint32_t(bits & 0x8000u) << 16, rest = bits & 0x7fffu, word;
  if (rest >= 0x7c00u)
    word = sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
  else if (rest >= 0x400u)
    word = sign | ((rest << 13) + (112u << 23));
  else {
    float small = float(rest) * 5.9604644775390625e-8f;
    memcpy(&word, &small, 4);
    word |= sign;
  }
  float x;
  memcpy(&x, &word, 4);
  return x;
#endif
}
INLINE uint16_t to_half(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#elif defined(__aarch64__)
  __fp16 y = x;
  uint16_t bits;
  memcpy(&bits, &y, 2);
  return bits;
#else
  uint32_t word;
  memcpy(&word, &x, 4);
  uint32_t sign = (word >> 16) & 0x8000u, rest = word & 0x7fffffffu;
  if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (rest >= 0x47800000u) return uint16_t(sign | 0x7c00u);
  if (rest < 0x38800000u) {
    float scaled;
    memcpy(&scaled, &rest, 4);
    return uint16_t(sign | uint32_t(std::nearbyint(scaled * 16777216.0f)));
  }
  return uint16_t(sign | ((rest + 0xfffu + ((rest >> 13) & 1u) - (112u << 23)) >> 13));
#endif
}
INLINE float from_bfloat(uint16_t bits) {
  uint32_t word = uint32_t(bits) << 16;
  float x;
  memcpy(&x, &word, 4);
  return x;
}
INLINE uint16_t to_bfloat(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  if ((word & 0x7fffffffu) > 0x7f800000u) return uint16_t((word >> 16) | 0x40u);
  return uint16_t((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}
INLINE Floats load_halves(const uint16_t* at) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)));
#else
  Floats x;
  for (int i = 0; i < kLanes; i++) x[i] = from_half(at[i]);
  return x;
#endif
}
INLINE Floats load_bfloats(const uint16_t* at) {
#if defined(__AVX512F__)
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  return (Floats)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__)
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return (Floats)_mm256_slli_epi32(wide, 16);
#elif defined(__aarch64__)
  return (Floats)vshll_n_u16(vld1_u16(at), 16);
#else
  typedef uint16_t Narrow __attribute__((vector_size(kVectorBytes / 2)));
  Narrow bits;
  memcpy(&bits, at, sizeof bits);
  return as_floats(__builtin_convertvector(bits, Words) << 16);
#endif
}
INLINE Floats load_bytes(const uint8_t* at) {  // unsigned
  typedef uint8_t Narrow __attribute__((vector_size(kLanes)));
  Narrow bytes;
  memcpy(&bytes, at, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
}
INLINE Floats load_signed(const int8_t* at) {
#if defined(__aarch64__)
  int32x2_t bytes = {};
  memcpy(&bytes, at, 4);
  return (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(bytes)))));
#else
  typedef int8_t Narrow __attribute__((vector_size(kLanes)));
  Narrow bytes;
  memcpy(&bytes, at, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}
INLINE Floats load_as(Type type, const void* memory, int64_t place) {
  switch (type) {
    case Type::kHalf:
      return load_halves(static_cast<const uint16_t*>(memory) + place);
    case Type::kBfloat:
      return load_bfloats(static_cast<const uint16_t*>(memory) + place);
    case Type::kByte:
      return load_signed(static_cast<const int8_t*>(memory) + place);
    default:
      return load(static_cast<const float*>(memory) + place);
  }
}
INLINE float read_as(Type type, const void* memory, int64_t place) {
  switch (type) {
    case Type::kHalf:
      return from_half(static_cast<const uint16_t*>(memory)[place]);
    case Type::kBfloat:
      return from_bfloat(static_cast<const uint16_t*>(memory)[place]);
    case Type::kByte:
      return static_cast<const int8_t*>(memory)[place];
    default:
      return static_cast<const float*>(memory)[place];
  }
}
INLINE void write_as(Type type, void* memory, int64_t place, float x) {
  switch (type) {
    case Type::kHalf:
      static_cast<uint16_t*>(memory)[place] = to_half(x);
      break;
    case Type::kBfloat:
      static_cast<uint16_t*>(memory)[place] = to_bfloat(x);
      break;
    default:
      static_cast<float*>(memory)[place] = x;
  }
}

// The bytes of a table at places below 16.
INLINE Words look_up(const uint8_t (&table)[16], Words places) {
#if defined(__AVX512BW__)
  return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))),
                                    (__m512i)places);
#elif defined(__AVX2__)
  return (Words)_mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), (__m256i)places);
#elif defined(__aarch64__)
  return (Words)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)places);
#else
  uint8_t bytes[kVectorBytes];
  memcpy(bytes, &places, sizeof bytes);
  for (uint8_t& byte : bytes) byte = table[byte];
  return load_words(bytes);
#endif
}

// ---- products of bytes: each 4-byte lane of `sums` gets the sum of its four products ----
// weights: 0 to 63 in `dot_small`, any int8 in `dot_signed`, whose result has 128 * (sum of b) in it where kSignedShift
// is 128.
#if defined(__AVX512VNNI__)
constexpr int kSignedShift = 128;
INLINE Ints dot_small(Ints sums, Words weights, Words b) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)b);
}
INLINE Ints dot_signed(Ints sums, Words weights, Words b) {
  return dot_small(sums, weights ^ all_words(0x80808080u), b);
}
#elif defined(__AVX512BW__)
constexpr int kSignedShift = 0;
INLINE Ints dot_small(Ints sums, Words weights, Words b) {
  __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)b);
  return sums + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
INLINE Ints dot_signed(Ints sums, Words weights, Words b) {
  __m512i w = (__m512i)weights, x = (__m512i)b;
  __mmask64 negative = _mm512_movepi8_mask(w);
  x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
  return dot_small(sums, (Words)_mm512_abs_epi8(w), (Words)x);
}
#elif defined(__AVX2__)
constexpr int kSignedShift = 0;
INLINE Ints dot_small(Ints sums, Words weights, Words b) {
  __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)b);
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
INLINE Ints dot_signed(Ints sums, Words weights, Words b) {
  return dot_small(sums, (Words)_mm256_abs_epi8((__m256i)weights),
                   (Words)_mm256_sign_epi8((__m256i)b, (__m256i)weights));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kSignedShift = 0;
INLINE Ints dot_signed(Ints sums, Words weights, Words b) {
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)b);
}
INLINE Ints dot_small(Ints sums, Words weights, Words b) { return dot_signed(sums, weights, b); }
#elif defined(__aarch64__)
constexpr int kSignedShift = 0;
INLINE Ints dot_signed(Ints sums, Words weights, Words b) {
  int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)weights), vget_low_s8((int8x16_t)b));
  int16x8_t high = vmull_high_s8((int8x16_t)weights, (int8x16_t)b);
  return sums + (Ints)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
INLINE Ints dot_small(Ints sums, Words weights, Words b) { return dot_signed(sums, weights, b); }
#else
constexpr int kSignedShift = 0;
INLINE Ints dot_signed(Ints sums, Words weights, Words b) {
  Ints w = (Ints)weights, x = (Ints)b;
  sums += ((w << 24) >> 24) * ((x << 24) >> 24) + ((w << 16) >> 24) * ((x << 16) >> 24);
  return sums + ((w << 8) >> 24) * ((x << 8) >> 24) + (w >> 24) * (x >> 24);
}
INLINE Ints dot_small(Ints sums, Words weights, Words b) { return dot_signed(sums, weights, b); }
#endif

// Products of rows that are bytes with weights that are signed bytes. A row's bytes have kByteShift subtracted.
#if defined(__AVX512VNNI__)
constexpr int kByteShift = 0;
INLINE Ints dot_bytes(Ints sums, Words row, Words weights) { return dot_small(sums, row, weights); }
#else
constexpr int kByteShift = 128;
INLINE Ints dot_bytes(Ints sums, Words row, Words weights) { return dot_signed(sums, weights, row); }
#endif

// ---- functions ----
INLINE Floats round_even(Floats x) {  // for magnitudes below 2^22
  Floats magic = all(12582912.0f);
  return (x + magic) - magic;
}
INLINE Floats exponential(Floats x) {                            // relative error below 2e-7; 0 below -87
  const Floats c = larger(all(-87.0f), smaller(all(88.0f), x));  // a NaN stays one
  const Floats magic = all(12582912.0f);                         // 1.5 * 2^23: the last bits of the sum are n
  const Floats sum = c * 1.44269504088896341f + magic, n = sum - magic;
  Floats r = c - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return choose(x < all(-87.0f), Floats{}, as_floats(as_words(p) + (as_words(sum) << 23)));
}
INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }
INLINE Floats hyperbolic_tangent(Floats x) { return 2.0f / (1.0f + exponential(-2.0f * x)) - 1.0f; }
INLINE Floats gelu(Floats x) {  // the error function as a polynomial: absolute error below 6e-7; it is 1 from 5 on
  const Floats c = larger(all(-5.0f), smaller(all(5.0f), x)), v = c * c * 0.08f - 1.0f;
  Floats p = all(0.00122208486f);
  p = p * v - 0.00324730156f;
  p = p * v + 0.00344873732f;
  p = p * v - 0.00532505987f;
  p = p * v + 0.0128005669f;
  p = p * v - 0.0223646108f;
  p = p * v + 0.0328224786f;
  p = p * v - 0.0465256199f;
  p = p * v + 0.062878646f;
  p = p * v - 0.080886662f;
  p = p * v + 0.103041627f;
  p = p * v - 0.140592515f;
  p = p * v + 0.282727569f;
  return 0.5f * x * (1.0f + p * c);
}
constexpr float kSwigluLimit = 7;
INLINE Floats activate(Activation activation, Floats x) {
  switch (activation) {
    case Activation::kGelu:
      return gelu(x);
    case Activation::kGeluTanh:
      return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case Activation::kRelu:
      return larger(Floats{}, x);  // a NaN stays one
    case Activation::kReluSquared:
      x = larger(Floats{}, x);
      return x * x;
    case Activation::kSigmoid:
      return sigmoid(x);
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kTanh:
      return hyperbolic_tangent(x);
    case Activation::kSwigluOai:
      x = smaller(all(kSwigluLimit), x);
      return x * sigmoid(1.702f * x);
    default:
      return x;
  }
}

// What a gate is multiplied with.
INLINE Floats gated_factor(Activation activation, Floats up) {
  return activation == Activation::kSwigluOai ? larger(all(-kSwigluLimit), smaller(all(kSwigluLimit), up)) + 1.0f : up;
}

// Calls with an activation that is known when compiled.
template <class F>
INLINE void with_activation(Activation activation, F call) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kGelu:
      return call(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kGeluTanh:
      return call(std::integral_constant<Activation, Activation::kGeluTanh>{});
    case Activation::kRelu:
      return call(std::integral_constant<Activation, Activation::kRelu>{});
    case Activation::kReluSquared:
      return call(std::integral_constant<Activation, Activation::kReluSquared>{});
    case Activation::kSigmoid:
      return call(std::integral_constant<Activation, Activation::kSigmoid>{});
    case Activation::kSilu:
      return call(std::integral_constant<Activation, Activation::kSilu>{});
    case Activation::kTanh:
      return call(std::integral_constant<Activation, Activation::kTanh>{});
    case Activation::kSwigluOai:
      return call(std::integral_constant<Activation, Activation::kSwigluOai>{});
  }
}

// A function of vectors over `size` numbers; the last ones go through a copy.
template <class F>
INLINE void each(int64_t size, const float* in, float* out, F function) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, function(load(in + i), i));
  if (i < size) {
    float rest[kLanes] = {};
    memcpy(rest, in + i, size_t(size - i) * 4);
    store(rest, function(load(rest), i));
    memcpy(out + i, rest, size_t(size - i) * 4);
  }
}

// Numbers after the end count as zeros.
INLINE Floats load_some(const float* at, int64_t count) {
  if (count >= kLanes) return load(at);
  float rest[kLanes] = {};
  memcpy(rest, at, size_t(count) * 4);
  return load(rest);
}
INLINE void store_some(float* at, Floats x, int64_t count) {
  if (count >= kLanes) return store(at, x);
  float rest[kLanes];
  store(rest, x);
  memcpy(at, rest, size_t(count) * 4);
}

}  // namespace
}  // namespace archerfish::LEVEL
