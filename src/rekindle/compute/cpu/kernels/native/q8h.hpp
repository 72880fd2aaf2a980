// The 8-bit format of the KV cache: scales and codes of rotated vectors. `rekindle.kv.q8h` defines it and has the
// reference. A value is a code times a power of two, exact in bf16: attention reads it as such a number.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "q4h.hpp"

namespace q8h {

constexpr uint32_t SMALLEST_BYTE = 7, LARGEST_BYTE = 254;
constexpr uint32_t STEP_EXPONENT = 6, INVERSE_EXPONENT = 260;  // byte - 6 and 260 - byte are exponents of fp32
constexpr float LARGEST_CODE = 127.f;

inline int group_of(int dim) { return dim % 32 == 0 ? 32 : 16; }  // codes that share a scale

INLINE float power(uint32_t exponent) {
  const uint32_t bits = exponent << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The byte of a group whose largest magnitude this is.
INLINE uint8_t scale_byte(float largest) {
  uint32_t bits;
  memcpy(&bits, &largest, sizeof bits);
  return (uint8_t)std::clamp(bits >> 23 & 255, SMALLEST_BYTE, LARGEST_BYTE);
}

INLINE void encode_group(const float* x, int count, uint8_t byte, int8_t* codes) {
  const float inverse = power(INVERSE_EXPONENT - byte);
  for (int i = 0; i < count; i++) {
    const float level = std::nearbyint(x[i] * inverse);
    const float low = level < LARGEST_CODE ? level : LARGEST_CODE, code = low > -LARGEST_CODE ? low : -LARGEST_CODE;
    codes[i] = level == level ? (int8_t)code : 0;
  }
}

// The bf16 values of one vector of a head. A byte that no encoder writes, as in memory that is not written, is 0.
INLINE void decode(const uint8_t* codes, const uint8_t* scales, int dim, uint16_t* out) {
  const int group = group_of(dim);
  for (int g = 0; g < dim / group; g++) {
    const float step = scales[g] < SMALLEST_BYTE ? 0.f : power(scales[g] - STEP_EXPONENT);
    for (int i = g * group; i < (g + 1) * group; i++) {
      const float value = (float)(int8_t)codes[i] * step;
      uint32_t bits;
      memcpy(&bits, &value, sizeof bits);
      out[i] = (uint16_t)(bits >> 16);
    }
  }
}

}  // namespace q8h
