// Scales of tokens, as attention multiplies by them.
#pragma once

#include "q4h.hpp"
#include "softmax.hpp"

namespace scales {

using simd::Bits;
using simd::LANES;
using softmax::TOKENS;

// scale / 16 of `count` tokens: bytes [token][groups] -> [group][TOKENS], of which `out` is the first token.
inline void unpack(const uint8_t* bytes, int groups, int count, float* out) {
  for (int t = 0; t < count; t += LANES) {
    const uint8_t* from = bytes + t * groups;
    for (int g = 0; g < groups; g += 4) {
      const int first = groups < 4 ? 0 : (g + 4 <= groups ? g : groups - 4);
      Bits four;
      if (groups < 4) {  // a token's bytes alone: reading four might go past the end of the blocks
        alignas(64) uint32_t words[LANES] = {};
        for (int i = 0; i < LANES; i++) memcpy(words + i, from + i * groups, groups);
        four = simd::load_bits(words);
      } else {
        alignas(64) int32_t at[LANES];
        for (int i = 0; i < LANES; i++) at[i] = i * groups + first;
        four = simd::gather_bits(from, simd::load_bits(at));
      }
      for (int i = first; i < first + 4 && i < groups; i++) {
        const Bits byte = simd::both(simd::shift_right(four, 8 * (i - first)), simd::broadcast_bits(255));
        simd::store(out + i * TOKENS + t, q4h::steps_of(byte));
      }
    }
  }
}

INLINE int power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

}  // namespace scales
