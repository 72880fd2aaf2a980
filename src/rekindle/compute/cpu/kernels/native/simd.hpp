// Vectors of 32-bit lanes: one definition for each instruction set, the same words in all of them.
//
// A `Vec` holds floats. A `Bits` holds 32-bit words: integers, pairs of bf16 (the first in the low half), or four
// bytes. Every operation rounds the same way for the same lane, whatever is in the others.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace simd {

#if defined(__AVX512F__)

constexpr int LANES = 16;
constexpr int REGISTERS = 32;
using Vec = __m512;
using Bits = __m512i;

INLINE Vec zero() { return _mm512_setzero_ps(); }
INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec magnitude(Vec a) { return _mm512_abs_ps(a); }
INLINE Vec rounded(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE float sum(Vec a) { return _mm512_reduce_add_ps(a); }
INLINE float largest(Vec a) { return _mm512_reduce_max_ps(a); }

// Sums and differences of lanes at distance 1, 2, 4, ...: the Walsh-Hadamard transform of a vector, without its scale.
INLINE Vec hadamard(Vec x) {
  const Vec ones = _mm512_set1_ps(1.f), minus = _mm512_set1_ps(-1.f);
  x = _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xaaaa, ones, minus), _mm512_permute_ps(x, 0xb1));
  x = _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xcccc, ones, minus), _mm512_permute_ps(x, 0x4e));
  x = _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xf0f0, ones, minus), _mm512_shuffle_f32x4(x, x, 0xb1));
  return _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xff00, ones, minus), _mm512_shuffle_f32x4(x, x, 0x4e));
}

INLINE Bits load_bits(const void* p) { return _mm512_loadu_si512(p); }
INLINE void store_bits(void* p, Bits x) { _mm512_storeu_si512(p, x); }
INLINE void store(float* p, Bits x) { store_bits(p, x); }
INLINE Bits broadcast_bits(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE Bits zero_bits() { return _mm512_setzero_si512(); }
INLINE Bits both(Bits a, Bits b) { return _mm512_and_si512(a, b); }
INLINE Bits either(Bits a, Bits b) { return _mm512_or_si512(a, b); }
INLINE Bits plus(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
INLINE Bits minus(Bits a, Bits b) { return _mm512_sub_epi32(a, b); }
INLINE Bits minus_bytes(Bits a, Bits b) { return _mm512_sub_epi8(a, b); }
INLINE Bits times_halves(Bits a, Bits b) { return _mm512_mullo_epi16(a, b); }  // 16 bits each, and of the product
INLINE Bits load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE Bits shift_left(Bits a, int count) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(count)); }
INLINE Bits shift_right(Bits a, int count) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(count)); }
INLINE Vec as_floats(Bits a) { return _mm512_castsi512_ps(a); }
INLINE Bits as_bits(Vec a) { return _mm512_castps_si512(a); }
INLINE Bits pick(Bits index, Bits a) { return _mm512_permutexvar_epi32(index, a); }
INLINE Bits gather_bits(const uint8_t* p, Bits bytes) { return _mm512_i32gather_epi32(bytes, p, 1); }
INLINE Bits lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// Lanes first <= lane < end of `a`, `other` in the rest.
INLINE Vec within(int first, int end, Vec a, Vec other) {
  const Bits lane = lane_numbers();
  const __mmask16 chosen =
      _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first)) & _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end));
  return _mm512_mask_blend_ps(chosen, other, a);
}

// `a` where the word `test` is not zero, else zero.
INLINE Bits unless_zero(Bits test, Bits a) { return _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(test, test), a); }

// a0 b0 a1 b1 ...: the first LANES words, and the rest.
INLINE void zip(Bits a, Bits b, Bits& low, Bits& high) {
  const Bits first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Bits second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  low = _mm512_permutex2var_epi32(a, first, b);
  high = _mm512_permutex2var_epi32(a, second, b);
}

// Eight words of LANES tokens, `stride` bytes from token to token, as one vector for each word.
INLINE void load_transposed(const uint8_t* p, int64_t stride, Bits (&out)[8]) {
  Bits a[8], b[8];
  UNROLL for (int i = 0; i < 8; i++) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)(p + i * stride));
    a[i] =
        _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_loadu_si256((const __m256i*)(p + (i + 8) * stride)), 1);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    UNROLL for (int j = 0; j < 2; j++) {
      a[4 * i + 2 * j] = _mm512_unpacklo_epi64(b[4 * i + j], b[4 * i + 2 + j]);
      a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(b[4 * i + j], b[4 * i + 2 + j]);
    }
  }
  // Now a[j] holds word j of tokens 0..3 and word 4 + j, and the same of tokens 8..11; a[4 + j] of tokens 4..7, 12..15.
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  UNROLL for (int j = 0; j < 4; j++) {
    out[j] = _mm512_permutex2var_epi64(a[j], first, a[4 + j]);
    out[4 + j] = _mm512_permutex2var_epi64(a[j], second, a[4 + j]);
  }
}

INLINE Bits to_exponent(Vec n) { return _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23); }
INLINE Vec to_floats(Bits integers) { return _mm512_cvtepi32_ps(integers); }

// acc + the sum of a's bytes (0 to 255) times b's (-128 to 127), four of them in a word.
constexpr bool UNSIGNED_DOTS = true;  // of the bytes of `a`
INLINE Bits dot(Bits acc, Bits a, Bits b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}

INLINE Vec load_halves(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }  // fp16

INLINE Vec load_bf16(const uint16_t* p) {
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

#if defined(__AVX512BF16__)
INLINE void store_bf16(uint16_t* p, Vec x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
INLINE Vec round_bf16(Vec x) {
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}
// 2 * LANES bf16 in order, those of `low` first.
INLINE Bits narrow(Vec low, Vec high) { return (Bits)_mm512_cvtne2ps_pbh(high, low); }
// acc + a's first * b's first + a's second * b's second, by pairs of bf16. gcc 12 spills the intrinsic's accumulators.
INLINE Vec dot(Vec acc, Bits a, Bits b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
#else
#error "this level needs AVX512-BF16"
#endif

// bf16 pairs 2 * code - 15 of the codes in the lowest nibbles of both halves of each word.
INLINE Bits levels(Bits words) {
  alignas(64) static constexpr uint16_t TABLE[32] = {0xc170, 0xc150, 0xc130, 0xc110, 0xc0e0, 0xc0a0, 0xc040, 0xbf80,
                                                     0x3f80, 0x4040, 0x40a0, 0x40e0, 0x4110, 0x4130, 0x4150, 0x4170,
                                                     0xc170, 0xc150, 0xc130, 0xc110, 0xc0e0, 0xc0a0, 0xc040, 0xbf80,
                                                     0x3f80, 0x4040, 0x40a0, 0x40e0, 0x4110, 0x4130, 0x4150, 0x4170};
  return _mm512_permutexvar_epi16(words, _mm512_load_si512(TABLE));
}

#else  // AVX2 with FMA and F16C, and with or without AVX-VNNI

constexpr int LANES = 8;
constexpr int REGISTERS = 16;
using Vec = __m256;
using Bits = __m256i;

INLINE Vec zero() { return _mm256_setzero_ps(); }
INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
INLINE Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE Vec fmadd(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec magnitude(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), a); }
INLINE Vec rounded(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE float sum(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
INLINE float largest(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

INLINE Vec hadamard(Vec x) {
  const Vec ones = _mm256_set1_ps(1.f), minus = _mm256_set1_ps(-1.f);
  x = _mm256_fmadd_ps(x, _mm256_blend_ps(ones, minus, 0xaa), _mm256_permute_ps(x, 0xb1));
  x = _mm256_fmadd_ps(x, _mm256_blend_ps(ones, minus, 0xcc), _mm256_permute_ps(x, 0x4e));
  return _mm256_fmadd_ps(x, _mm256_blend_ps(ones, minus, 0xf0), _mm256_permute2f128_ps(x, x, 0x01));
}

INLINE Bits load_bits(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void store_bits(void* p, Bits x) { _mm256_storeu_si256((__m256i*)p, x); }
INLINE void store(float* p, Bits x) { store_bits(p, x); }
INLINE Bits broadcast_bits(uint32_t x) { return _mm256_set1_epi32((int)x); }
INLINE Bits zero_bits() { return _mm256_setzero_si256(); }
INLINE Bits both(Bits a, Bits b) { return _mm256_and_si256(a, b); }
INLINE Bits either(Bits a, Bits b) { return _mm256_or_si256(a, b); }
INLINE Bits plus(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
INLINE Bits minus(Bits a, Bits b) { return _mm256_sub_epi32(a, b); }
INLINE Bits minus_bytes(Bits a, Bits b) { return _mm256_sub_epi8(a, b); }
INLINE Bits times_halves(Bits a, Bits b) { return _mm256_mullo_epi16(a, b); }
INLINE Bits load_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE Bits shift_left(Bits a, int count) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(count)); }
INLINE Bits shift_right(Bits a, int count) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(count)); }
INLINE Vec as_floats(Bits a) { return _mm256_castsi256_ps(a); }
INLINE Bits as_bits(Vec a) { return _mm256_castps_si256(a); }
INLINE Bits pick(Bits index, Bits a) { return _mm256_permutevar8x32_epi32(a, index); }
INLINE Bits gather_bits(const uint8_t* p, Bits bytes) { return _mm256_i32gather_epi32((const int*)p, bytes, 1); }
INLINE Bits lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

INLINE Vec within(int first, int end, Vec a, Vec other) {
  const Bits lane = lane_numbers();
  const Bits chosen = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(first - 1)),
                                       _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
  return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(chosen));
}

INLINE Bits unless_zero(Bits test, Bits a) {
  return _mm256_andnot_si256(_mm256_cmpeq_epi32(test, _mm256_setzero_si256()), a);
}

INLINE void zip(Bits a, Bits b, Bits& low, Bits& high) {
  const Bits first = _mm256_unpacklo_epi32(a, b), second = _mm256_unpackhi_epi32(a, b);
  low = _mm256_permute2x128_si256(first, second, 0x20);
  high = _mm256_permute2x128_si256(first, second, 0x31);
}

INLINE void load_transposed(const uint8_t* p, int64_t stride, Bits (&out)[8]) {
  Bits a[8], b[8];
  UNROLL for (int i = 0; i < 8; i++) a[i] = load_bits(p + i * stride);
  UNROLL for (int i = 0; i < 4; i++) {
    b[2 * i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    UNROLL for (int j = 0; j < 2; j++) {
      a[4 * i + 2 * j] = _mm256_unpacklo_epi64(b[4 * i + j], b[4 * i + 2 + j]);
      a[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(b[4 * i + j], b[4 * i + 2 + j]);
    }
  }
  UNROLL for (int j = 0; j < 4; j++) {
    out[j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x20);
    out[4 + j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x31);
  }
}

INLINE Bits to_exponent(Vec n) { return _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23); }
INLINE Vec to_floats(Bits integers) { return _mm256_cvtepi32_ps(integers); }

// `dot`: acc + the sum of a's bytes times b's, four of them in a word. `dot_halves`: acc + a's first * b's first + a's
// second * b's second, by pairs of whole numbers of 16 bits.
#if defined(__AVXVNNI__)
constexpr bool UNSIGNED_DOTS = true;
INLINE Bits dot(Bits acc, Bits a, Bits b) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}
INLINE Bits dot_halves(Bits acc, Bits a, Bits b) {
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}
#else
constexpr bool UNSIGNED_DOTS = false;  // all bytes are from -127 to 127, so two products fit 16 bits
INLINE Bits dot(Bits acc, Bits a, Bits b) {
  const Bits pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE Bits dot_halves(Bits acc, Bits a, Bits b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
#endif

INLINE Vec load_halves(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

INLINE Vec load_bf16(const uint16_t* p) {
  return as_floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
// bf16 in the upper halves, rounded to nearest even; NaN stays NaN.
INLINE Bits to_upper_bf16(Vec x) {
  const Bits bits = as_bits(x);
  const Bits odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const Bits up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const Vec nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const Bits quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  return _mm256_and_si256(as_bits(_mm256_blendv_ps(as_floats(up), as_floats(quiet), nan)),
                          _mm256_set1_epi32((int)0xffff0000));
}
INLINE Vec round_bf16(Vec x) { return as_floats(to_upper_bf16(x)); }
INLINE Bits narrow(Vec low, Vec high) {
  const Bits packed =
      _mm256_packus_epi32(_mm256_srli_epi32(to_upper_bf16(low), 16), _mm256_srli_epi32(to_upper_bf16(high), 16));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
INLINE void store_bf16(uint16_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(narrow(x, x))); }
INLINE Vec dot(Vec acc, Bits a, Bits b) {
  const Bits upper = _mm256_set1_epi32((int)0xffff0000);
  acc = _mm256_fmadd_ps(as_floats(_mm256_slli_epi32(a, 16)), as_floats(_mm256_slli_epi32(b, 16)), acc);
  return _mm256_fmadd_ps(as_floats(_mm256_and_si256(a, upper)), as_floats(_mm256_and_si256(b, upper)), acc);
}

INLINE Bits levels(Bits words) {
  const __m256i low_bytes =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0x70, 0x50, 0x30, 0x10, (char)0xe0, (char)0xa0, 0x40, (char)0x80,
                                                (char)0x80, 0x40, (char)0xa0, (char)0xe0, 0x10, 0x30, 0x50, 0x70));
  const __m256i high_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8((char)0xc1, (char)0xc1, (char)0xc1, (char)0xc1,
                                                                       (char)0xc0, (char)0xc0, (char)0xc0, (char)0xbf,
                                                                       0x3f, 0x40, 0x40, 0x40, 0x41, 0x41, 0x41, 0x41));
  const Bits codes = _mm256_and_si256(words, _mm256_set1_epi32(0x000f000f));
  const Bits low = _mm256_shuffle_epi8(low_bytes, _mm256_or_si256(codes, _mm256_set1_epi32((int)0x80008000)));
  const Bits high =
      _mm256_shuffle_epi8(high_bytes, _mm256_or_si256(_mm256_slli_epi32(codes, 8), _mm256_set1_epi32(0x00800080)));
  return _mm256_or_si256(low, high);
}

// The first and the second bf16 of each pair.
INLINE Vec firsts(Bits pairs) { return as_floats(_mm256_slli_epi32(pairs, 16)); }
INLINE Vec seconds(Bits pairs) { return as_floats(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000))); }

#endif

// `negative` where the sign of x is set, else `other`.
#if defined(__AVX512F__)
INLINE Vec by_sign(Vec x, Vec negative, Vec other) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(as_bits(x)), other, negative);
}
#else
INLINE Vec by_sign(Vec x, Vec negative, Vec other) { return _mm256_blendv_ps(other, negative, x); }
#endif

// 2^x for x <= 0; anything from -127 down gives 0, NaN gives NaN.
INLINE Vec exp2(Vec x) {
  x = larger(broadcast(-127.f), x);
  const Vec n = rounded(x), f = sub(x, n);
  Vec p = broadcast(1.3333558e-3f);
  p = fmadd(p, f, broadcast(9.6181291e-3f));
  p = fmadd(p, f, broadcast(5.5504109e-2f));
  p = fmadd(p, f, broadcast(2.4022651e-1f));
  p = fmadd(p, f, broadcast(6.9314718e-1f));
  p = fmadd(p, f, broadcast(1.f));
  return as_floats(plus(as_bits(p), to_exponent(n)));  // p is 1 where x is -127
}

// As exp2. Where it saves time the relative error is 7.5e-5, a twentieth of bf16's. For -inf the cubic gives NaN, which
// scaled by 2^-inf is 0.
#if defined(__AVX512F__)
INLINE Vec near_exp2(Vec x) {
  const Vec n = rounded(x), f = sub(x, n);
  Vec p = broadcast(5.517166e-2f);
  p = fmadd(p, f, broadcast(2.4261114e-1f));
  p = fmadd(p, f, broadcast(6.9326099e-1f));
  p = fmadd(p, f, broadcast(9.9992807e-1f));
  return _mm512_scalef_ps(p, n);
}
#else
INLINE Vec near_exp2(Vec x) { return exp2(x); }
#endif

// tanh(x) = 1 - 2 / (1 + e^(2|x|)), with the sign of x; absolute error 2e-7.
INLINE Vec tanh(Vec x) {
  const Vec e = exp2(mul(magnitude(x), broadcast(-2.885390082f)));  // e^(-2|x|)
  const Vec t = div(sub(broadcast(1.f), e), add(broadcast(1.f), e));
  const Bits sign = both(as_bits(x), broadcast_bits(0x80000000u));
  return as_floats(either(as_bits(t), sign));
}

// 1 / (1 + e^-x), with a relative error of 1e-6 where x is negative, too.
INLINE Vec sigmoid(Vec x) {
  const Vec e = exp2(mul(magnitude(x), broadcast(-1.442695041f)));  // e^-|x|
  return div(by_sign(x, e, broadcast(1.f)), add(broadcast(1.f), e));
}

#if defined(__AMX_TILE__)
// Tiles are loaded and stored by assembly of which gcc 12 does not know that it reads and writes memory: what is stored
// before a fence is there for it, and what is loaded after one comes from there.
INLINE void fence() { asm volatile("" ::: "memory"); }

// Shapes the tile registers by 64 bytes. gcc 12 takes the instruction to read the first 8 of them, and may leave out
// what is written to the others.
INLINE void load_tile_config(const void* config) {
  asm volatile("" ::"r"(config) : "memory");
  _tile_loadconfig(config);
}
#endif

}  // namespace simd
