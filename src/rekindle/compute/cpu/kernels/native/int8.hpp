// Vectors as int8 numbers with one scale: the rows and the weights of a linear layer in 8 bits.
//
// A vector is rotated first, in pieces of up to 256 values: signs that are always the same, then a Hadamard transform.
// Both sides of a product are rotated alike, which leaves it as it is, and a value that is much larger than the others
// becomes a small part of a whole piece instead of setting a scale that nothing else fits (Ashkboos et al. 2024, QuaRot,
// §4). Rounding is the same at every level, and sums of int8 products are exact, so all levels give the same bits.
#pragma once

#include "q4h.hpp"

namespace int8 {

constexpr int MOST_ROTATED = 256;
constexpr float LARGEST = 127.f;
constexpr int BLOCK = 64;  // values of a block of depth

struct Signs {
  float of[MOST_ROTATED];
  Signs() {
    uint32_t state = 1;
    for (float& sign : of) {
      state = state * 1664525u + 1013904223u;  // a linear congruential generator, Numerical Recipes §7.1
      sign = state >> 31 ? -1.f : 1.f;
    }
  }
};

static const Signs SIGNS;

INLINE void rotate(float* x, int64_t depth) {
  const int size = (int)std::min<int64_t>(depth & -depth, MOST_ROTATED);
  for (int64_t i = 0; i < depth; i += size) {
    q4h::flip(x + i, size, size, SIGNS.of);
    q4h::transform(x + i, size, size);
  }
}

// Rotates and rounds `depth` values; x has room for whole blocks, and is overwritten. Block b goes to out + b * stride,
// filled up with zeros. Returns the scale: 0 where all values are nearly 0, NaN where one is not finite.
INLINE float quantise(float* x, int64_t depth, int8_t* out, int64_t stride) {
  rotate(x, depth);
  const float largest = q4h::worst_of(x, depth);
  const bool plain = largest > 0x1p-100f && largest < INFINITY;
  const float inverse = plain ? LARGEST / largest : 0.f;
  for (int64_t k = depth; k % BLOCK != 0; k++) x[k] = 0.f;
  for (int64_t first = 0; first < depth; first += BLOCK, out += stride) {
    for (int k = 0; k < BLOCK; k++) out[k] = plain ? (int8_t)(int)__builtin_rintf(x[first + k] * inverse) : 0;
  }
  return plain ? largest / LARGEST : (largest <= 0x1p-100f ? 0.f : NAN);
}

}  // namespace int8
