// The 4-bit format of the KV cache: rotation, scales, codes. `rekindle.kv.q4h` defines it and has the reference.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "rekindle.h"
#include "simd.hpp"

namespace q4h {

constexpr int K_GROUP = 16;  // codes that share a scale
constexpr int MOST_DIMS = 512;
constexpr int WORD_CODES = 8;
constexpr int SMALLEST_BYTE = 8, LARGEST_BYTE = 0xf7;

constexpr int MOST_QUERY = MOST_DIMS + 128;  // of latents and rotary keys

// Values of a query, and of what attention gives for it.
inline int64_t query_dim(const rk_layer& layer) { return layer.latent ? layer.k_dim + layer.v_dim : layer.k_dim; }
inline int64_t output_dim(const rk_layer& layer) { return layer.latent ? layer.k_dim : layer.v_dim; }
inline int32_t output_format(const rk_layer& layer) { return layer.latent ? layer.k_format : layer.v_format; }

inline int v_group(int dim) { return dim % 32 == 0 ? 32 : 16; }
inline int rotation_size(int dim) { return dim & -dim; }

// fp32(1 / sqrt(size)) of a power of two.
inline float rotation_scale(int size) {
  float scale = 1.f;
  for (; size >= 4; size /= 4) scale *= 0.5f;
  return size == 2 ? scale * 0.70710678f : scale;
}

// One butterfly stage over `dim` values: sums and differences at this distance.
template <int HALF>
INLINE void stage(float* x, int dim) {
  for (int i = 0; i < dim; i += 2 * HALF) {
    UNROLL for (int j = i; j < i + HALF; j++) {
      const float first = x[j], second = x[j + HALF];
      x[j] = first + second;
      x[j + HALF] = first - second;
    }
  }
}

// The stages within vectors, which `size` fills.
INLINE void vector_stages(float* x, int dim) {
  for (int i = 0; i < dim; i += simd::LANES) simd::store(x + i, simd::hadamard(simd::load(x + i)));
}

INLINE void wide_stage(float* x, int dim, int half) {
  for (int i = 0; i < dim; i += 2 * half) {
    for (int j = i; j < i + half; j += simd::LANES) {
      const simd::Vec first = simd::load(x + j), second = simd::load(x + j + half);
      simd::store(x + j, simd::add(first, second));
      simd::store(x + j + half, simd::sub(first, second));
    }
  }
}

// Walsh-Hadamard transform of each sub-block of `size` values, at distance 1, 2, 4, ...; then the scale.
INLINE void transform(float* x, int dim, int size) {
  if (size >= simd::LANES) {
    vector_stages(x, dim);
    for (int half = simd::LANES; half < size; half *= 2) wide_stage(x, dim, half);
  } else {
    if (size >= 2) stage<1>(x, dim);
    if (size >= 4) stage<2>(x, dim);
    if (size >= 8) stage<4>(x, dim);
  }
  const float scale = rotation_scale(size);
  for (int i = 0; i < dim; i++) x[i] *= scale;
}

INLINE void flip(float* x, int dim, int size, const float* signs) {
  for (int i = 0; i < dim; i += size) {
    for (int j = 0; j < size; j++) x[i + j] *= signs[j];
  }
}

INLINE void rotate(float* x, int dim, const float* signs) {
  const int size = rotation_size(dim);
  flip(x, dim, size, signs);
  transform(x, dim, size);
}

INLINE void unrotate(float* x, int dim, const float* signs) {
  const int size = rotation_size(dim);
  transform(x, dim, size);
  flip(x, dim, size, signs);
}

// The largest magnitude; as bits, in which NaN is the largest of all.
INLINE float worst_of(const float* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  float worst;
  memcpy(&worst, &most, sizeof worst);
  return worst;
}

// bf16 values as fp32.
INLINE void widen(const uint16_t* from, int64_t count, float* x) {
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = (uint32_t)from[i] << 16;
    memcpy(x + i, &bits, sizeof bits);
  }
}

// fp32(8 / scale) of every byte that an encoder writes.
struct InverseScales {
  float of[256];
  InverseScales() {
    for (int byte = 0; byte < 256; byte++) {
      const float scale = _cvtsh_ss((unsigned short)(byte << 7));
      of[byte] = byte < SMALLEST_BYTE || byte > LARGEST_BYTE ? 0.f : (float)(8.0 / (double)scale);
    }
  }
};

// scale / 16 of bytes in 32-bit lanes; 0 for byte 0.
INLINE simd::Vec steps_of(simd::Bits bytes) {
  const simd::Bits exponent = simd::broadcast_bits(108u << 23);  // fp16's bias is 15, fp32's 127, and / 16
  return simd::as_floats(simd::unless_zero(bytes, simd::plus(simd::shift_left(bytes, 20), exponent)));
}

}  // namespace q4h
