// Scales of tokens, as attention multiplies by them.
#pragma once

#include "q4h.hpp"
#include "softmax.hpp"

namespace scales {

using simd::Bits;
using simd::LANES;
using softmax::TOKENS;

// Up to four bytes of LANES tokens from the `first` on, of `groups` that each token has: a word for each token.
INLINE Bits load_bytes(const uint8_t* from, int groups, int first) {
  if (groups == 4) return simd::load_bits(from);
  if (groups == 2) return simd::shift_right(simd::as_bits(simd::load_bf16((const uint16_t*)from)), 16);
  if (groups == 1) return simd::load_bytes(from);
  alignas(64) uint32_t words[LANES] = {};
  if (groups == 3) {  // a token's bytes alone: reading four might go past the end of the blocks
    for (int i = 0; i < LANES; i++) memcpy(words + i, from + i * groups, 3);
    return simd::load_bits(words);
  }
  for (int i = 0; i < LANES; i++) words[i] = (uint32_t)(i * groups + first);
  return simd::gather_bits(from, simd::load_bits(words));
}

// scale / 16 of `count` tokens: bytes [token][groups] -> [group][TOKENS], of which `out` is the first token.
inline void unpack(const uint8_t* bytes, int groups, int count, float* out) {
  for (int t = 0; t < count; t += LANES) {
    for (int g = 0; g < groups; g += 4) {
      const int first = groups < 4 ? 0 : (g + 4 <= groups ? g : groups - 4);
      const Bits four = load_bytes(bytes + t * groups, groups, first);
      for (int i = first; i < first + 4 && i < groups; i++) {
        const Bits byte = simd::both(simd::shift_right(four, 8 * (i - first)), simd::broadcast_bits(255));
        simd::store(out + i * TOKENS + t, q4h::steps_of(byte));
      }
    }
  }
}

// Pairs of levels times the steps of their firsts and their seconds: exact.
INLINE Bits numbers(Bits pairs, simd::Vec first, simd::Vec second) {
  const simd::Vec low = simd::mul(simd::as_floats(simd::shift_left(pairs, 16)), first);
  const simd::Vec high = simd::mul(simd::as_floats(simd::both(pairs, simd::broadcast_bits(0xffff0000u))), second);
  return simd::either(simd::shift_right(simd::as_bits(low), 16), simd::as_bits(high));
}

INLINE int power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

}  // namespace scales
