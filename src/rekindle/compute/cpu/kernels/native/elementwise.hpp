// What a model computes between its products, row by row: RMSNorm, gates, positions, residuals, over bf16.
//
// Everything rounds where the modules of transformers do, so that most results are theirs, to the bit. A result depends
// on its own row alone. Rows may have any number of values: the last vector is completed with zeros.
#pragma once

#include "simd.hpp"

namespace elementwise {

using simd::LANES;
using simd::Vec;

INLINE Vec load(const uint16_t* p, int64_t count) {
  if (count >= LANES) return simd::load_bf16(p);
  alignas(64) uint16_t part[LANES] = {};
  memcpy(part, p, count * sizeof *p);
  return simd::load_bf16(part);
}

INLINE void store(uint16_t* p, Vec x, int64_t count) {
  if (count >= LANES) return simd::store_bf16(p, x);
  alignas(64) uint16_t part[LANES];
  simd::store_bf16(part, x);
  memcpy(p, part, count * sizeof *p);
}

// The sum of squares, in an order that depends on the number of values alone.
INLINE float sum_of_squares(const uint16_t* row, int64_t count) {
  Vec sums[4] = {simd::zero(), simd::zero(), simd::zero(), simd::zero()};
  int64_t at = 0;
  for (; at + 4 * LANES <= count; at += 4 * LANES) {
    UNROLL for (int i = 0; i < 4; i++) {
      const Vec x = simd::load_bf16(row + at + i * LANES);
      sums[i] = simd::fmadd(x, x, sums[i]);
    }
  }
  for (; at < count; at += LANES) {
    const Vec x = load(row + at, count - at);
    sums[0] = simd::fmadd(x, x, sums[0]);
  }
  return simd::sum(simd::add(simd::add(sums[0], sums[1]), simd::add(sums[2], sums[3])));
}

// `weight` is readable up to a whole number of vectors. `out` may be `row`.
INLINE void normalise(const uint16_t* row, const float* weight, float epsilon, bool rounds_first, int64_t count,
                      uint16_t* out) {
  const float mean = sum_of_squares(row, count) / (float)count;
  const Vec scale = simd::broadcast(1.f / sqrtf(mean + epsilon));
  for (int64_t at = 0; at < count; at += LANES) {
    Vec x = simd::mul(load(row + at, count - at), scale);
    if (rounds_first) x = simd::round_bf16(x);
    store(out + at, simd::mul(x, simd::load(weight + at)), count - at);
  }
}

INLINE Vec silu(Vec x) { return simd::mul(x, simd::sigmoid(x)); }

// x / 2 * (1 + tanh(u)) is x * sigmoid(2 * u).
INLINE Vec gelu_tanh(Vec x) {
  const Vec cubed = simd::mul(simd::mul(x, x), x);
  const Vec u = simd::fmadd(simd::broadcast(0.044715f), cubed, x);
  return simd::mul(x, simd::sigmoid(simd::mul(u, simd::broadcast(1.5957691216f))));  // 2 * sqrt(2 / pi)
}

// gate = activation(gate) * up
template <Vec (*ACTIVATION)(Vec)>
INLINE void gate(uint16_t* gates, const uint16_t* up, int64_t count) {
  for (int64_t at = 0; at < count; at += LANES) {
    const Vec active = simd::round_bf16(ACTIVATION(load(gates + at, count - at)));
    store(gates + at, simd::mul(active, load(up + at, count - at)), count - at);
  }
}

// x cos + (-second half, first half) sin, each product rounded (Su et al. 2021, RoFormer, §3.4.2). Halves are whole
// vectors.
INLINE void rotate(uint16_t* x, int64_t size, const uint16_t* cos, const uint16_t* sin) {
  const int64_t half = size / 2;
  const auto product = [](Vec value, const uint16_t* factor) {
    return simd::round_bf16(simd::mul(value, simd::load_bf16(factor)));
  };
  for (int64_t i = 0; i < half; i += LANES) {
    const Vec first = simd::load_bf16(x + i), second = simd::load_bf16(x + half + i);
    simd::store_bf16(x + i, simd::sub(product(first, cos + i), product(second, sin + i)));
    simd::store_bf16(x + half + i, simd::add(product(second, cos + half + i), product(first, sin + half + i)));
  }
}

INLINE void add(const uint16_t* x, const uint16_t* added, int64_t count, uint16_t* out) {
  for (int64_t at = 0; at < count; at += LANES) {
    store(out + at, simd::add(load(x + at, count - at), load(added + at, count - at)), count - at);
  }
}

}  // namespace elementwise
