// Weights in 4 bits: int8 numbers of a coarser grid, from which the products in int8 are computed.
//
// A column is rotated as in int8 and measured in units of its scale. Every 32 values are rounded to codes, -7 to 7,
// times a whole number from 1 to 16: the one with the least squared error. Such a product is an int8 number, so rows
// are rounded as for int8, sums are exact, and all levels give the same bits.
#pragma once

#include "int8.hpp"
#include "panel.hpp"

namespace int4 {

constexpr int GROUP = 32;      // values that share a multiplier
constexpr int MULTIPLES = 16;  // the multipliers 1 to 16
constexpr int HIGHEST = 7;     // code; the lowest is -7
constexpr float LARGEST = HIGHEST * MULTIPLES;  // of a column, in units of its scale
constexpr int HALF_WORDS = panel::WORDS / 2;

struct Multiples {
  alignas(64) float of[MULTIPLES], inverse[MULTIPLES];
  Multiples() {
    for (int i = 0; i < MULTIPLES; i++) of[i] = (float)(i + 1), inverse[i] = 1.f / of[i];
  }
};

static const Multiples MULTIPLIERS;

// The multiplier of GROUP values with the least squared error, summed in their order; the smallest of several.
INLINE int best_multiplier(const float* x) {
  const simd::Vec lowest = simd::broadcast(-(float)HIGHEST), highest = simd::broadcast((float)HIGHEST);
  alignas(64) float errors[MULTIPLES];
  for (int i = 0; i < MULTIPLES; i += simd::LANES) {
    const simd::Vec multiple = simd::load(MULTIPLIERS.of + i), inverse = simd::load(MULTIPLIERS.inverse + i);
    simd::Vec error = simd::zero();
    for (int k = 0; k < GROUP; k++) {
      const simd::Vec value = simd::broadcast(x[k]), code = simd::rounded(simd::mul(value, inverse));
      const simd::Vec within = simd::smaller(simd::larger(code, lowest), highest);
      const simd::Vec off = simd::sub(value, simd::mul(within, multiple));
      error = simd::add(error, simd::mul(off, off));
    }
    simd::store(errors + i, error);
  }
  return (int)(std::min_element(errors, errors + MULTIPLES) - errors) + 1;
}

// Rotates and rounds `depth` values; x has room for whole blocks, and is overwritten. Writes a code for each, and a
// multiplier for every GROUP. Returns the scale: 0 where all values are nearly 0, NaN where one is not finite.
INLINE float quantise(float* x, int64_t depth, int8_t* codes, uint8_t* multipliers) {
  int8::rotate(x, depth);
  const float largest = q4h::worst_of(x, depth);
  const bool plain = largest > 0x1p-100f && largest < INFINITY;
  const float inverse = plain ? LARGEST / largest : 0.f;
  for (int64_t k = depth; k % int8::BLOCK != 0; k++) x[k] = 0.f;
  for (int64_t first = 0; first < depth || first % int8::BLOCK != 0; first += GROUP) {
    for (int64_t k = first; k < first + GROUP; k++) x[k] = plain ? x[k] * inverse : 0.f;
    const int multiplier = best_multiplier(x + first);
    for (int k = 0; k < GROUP; k++) {
      const int code = (int)__builtin_rintf(x[first + k] * MULTIPLIERS.inverse[multiplier - 1]);
      codes[first + k] = (int8_t)std::min(std::max(code, -HIGHEST), HIGHEST);
    }
    multipliers[first / GROUP] = (uint8_t)multiplier;
  }
  return plain ? largest / LARGEST : (largest <= 0x1p-100f ? 0.f : NAN);
}

// The multipliers of columns, which are given less 1: in both halves of a column's word, and times 8 in its bytes.
struct Factors {
  simd::Bits multiplier, offset;

  explicit Factors(simd::Bits less_one) {
    const simd::Bits one = simd::plus(less_one, simd::broadcast_bits(1));
    multiplier = simd::either(one, simd::shift_left(one, 16));
    const simd::Bits times_8 = simd::shift_left(multiplier, 3);
    offset = simd::either(times_8, simd::shift_left(times_8, 8));
  }
  // Of codes plus 8 in every byte: at most 15 times 16, so no product reaches the next byte.
  simd::Bits values(simd::Bits codes) const { return simd::minus_bytes(simd::times_halves(codes, multiplier), offset); }
};

// STRIPS strips of a block as those of int8: [strip][word 16][column 16].
template <int STRIPS>
INLINE void unpack(const uint32_t* block, int strip, uint32_t* out) {
  const simd::Bits nibbles = simd::broadcast_bits(0x0f0f0f0fu), nibble = simd::broadcast_bits(0xfu);
  const uint8_t* multipliers = (const uint8_t*)(block + panel::Int4::CODE_WORDS) + strip * panel::STRIP;
  const uint32_t* from = block + strip * panel::STRIP * HALF_WORDS;
  UNROLL for (int n = 0; n < STRIPS * panel::STRIP; n += simd::LANES) {
    const simd::Bits both = simd::load_bytes(multipliers + n);
    const Factors first(simd::both(both, nibble)), second(simd::shift_right(both, 4));
    const uint32_t* codes = from + n / panel::STRIP * panel::STRIP * HALF_WORDS + n % panel::STRIP;
    uint32_t* to = out + n / panel::STRIP * panel::STRIP_WORDS + n % panel::STRIP;
    UNROLL for (int word = 0; word < HALF_WORDS; word++) {
      const simd::Bits pairs = simd::load_bits(codes + word * panel::STRIP);
      simd::store_bits(to + word * panel::STRIP, first.values(simd::both(pairs, nibbles)));
      simd::store_bits(to + (word + HALF_WORDS) * panel::STRIP,
                       second.values(simd::both(simd::shift_right(pairs, 4), nibbles)));
    }
  }
}

// Some blocks one after the other as those of int8.
INLINE void unpack_blocks(const uint32_t* block, int64_t count, uint32_t* out) {
  for (; count > 0; count--, block += panel::Int4::BLOCK_WORDS, out += panel::BLOCK_WORDS) {
    unpack<panel::STRIPS>(block, 0, out);
  }
}

// A whole panel as one of int8, with its tail.
INLINE void unpack_panel(const uint32_t* panel, int64_t blocks, uint32_t* out) {
  unpack_blocks(panel, blocks, out);
  const uint32_t* tail = panel + blocks * panel::Int4::BLOCK_WORDS;
  memcpy(out + blocks * panel::BLOCK_WORDS, tail, panel::Int4::TAIL_WORDS * sizeof *out);
}

}  // namespace int4
