// Weights on grids: the value of a code is step * code + offset, with a step and an offset for every 32 in depth.
//
// They are what files of quantised models hold, and are computed as they are. Rows are rounded to whole numbers of 16
// bits, with a scale for every 32 as well, which bf16 values lose next to nothing by: with numbers of 8 bits, SmolLM2's
// distributions of next tokens move by a KL of 0.0035, with these by 1e-7. Sums of 32 products are whole numbers, and
// exact; they are multiplied by scales and added up in fp32, group after group, so all levels give the same bits.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <utility>

#include "panel.hpp"
#include "q4h.hpp"

namespace grid {

using panel::Grid4;
using panel::Sums;
using simd::Bits;
using simd::LANES;
using simd::Vec;

constexpr int GROUP = 32;       // values that share a step
constexpr int GROUP_WORDS = 8;  // of codes in bytes
constexpr int GROUPS = panel::GRID_GROUPS;
constexpr float LARGEST = 127.f * 256.f;        // of a group: its numbers are two bytes with signs
constexpr int STAGED_WORDS = 16;                // of a group of a row: two for each word of codes
constexpr int STAGED_GROUP = STAGED_WORDS + 2;  // ... and the sum of its numbers and their scale
constexpr int STAGED_BLOCK = GROUPS * STAGED_GROUP;
constexpr int64_t BLOCKS_AT_ONCE = 4;  // which stay in the L1 cache
constexpr int64_t AHEAD = 4;           // blocks: what is fetched while one is multiplied
constexpr int ZERO8 = 128;             // the code of 0 in 8 bits
constexpr int STRIP_VECS = panel::STRIP / LANES;

// How a level sums products of codes and numbers: the sum of LANES columns, and what it reads of a group of a row.
#if defined(__AVX512F__) || defined(__AVXVNNI__)

constexpr bool WIDE = simd::REGISTERS == 32;
constexpr int MOST_ROWS = WIDE ? 6 : 2;  // that registers can hold
constexpr int strips_at_once(int rows) { return WIDE ? (rows <= 3 ? 4 : 2) : (rows <= 1 ? 2 : 1); }

// Numbers are pairs of digits, 256 * high + low: words of four high ones, then words of four low ones.
INLINE void stage_group(const int32_t* numbers, uint32_t* out) {
  int8_t* high = (int8_t*)out;
  int8_t* low = (int8_t*)(out + GROUP_WORDS);
  for (int k = 0; k < GROUP; k++) {
    high[k] = (int8_t)((numbers[k] + 128) >> 8);
    low[k] = (int8_t)numbers[k];
  }
}

struct Sum {
  Bits high, low;
};
struct Codes {  // four bytes of each column
  Bits bytes;
};

INLINE Sum no_sum() { return {simd::zero_bits(), simd::zero_bits()}; }
INLINE Bits whole(const Sum& sum) { return simd::plus(simd::shift_left(sum.high, 8), sum.low); }
INLINE Codes codes_of(Bits bytes) { return {bytes}; }
INLINE void add(Sum& sum, const Codes& codes, const uint32_t* numbers, int word) {
  sum.high = simd::dot(sum.high, codes.bytes, simd::broadcast_bits(numbers[word]));
  sum.low = simd::dot(sum.low, codes.bytes, simd::broadcast_bits(numbers[GROUP_WORDS + word]));
}

#else

constexpr int MOST_ROWS = 3;
constexpr int strips_at_once(int rows) { return rows <= 2 ? 2 : 1; }

// Two words for each word of codes: the numbers of its even bytes, and those of its odd ones.
INLINE void stage_group(const int32_t* numbers, uint32_t* out) {
  int16_t* to = (int16_t*)out;
  for (int k = 0; k < GROUP; k++) to[k / 4 * 4 + k % 2 * 2 + k % 4 / 2] = (int16_t)numbers[k];
}

struct Sum {
  Bits all;
};
struct Codes {  // of the same bytes as 16 bits each
  Bits even, odd;
};

INLINE Sum no_sum() { return {simd::zero_bits()}; }
INLINE Bits whole(const Sum& sum) { return sum.all; }
INLINE Codes codes_of(Bits bytes) {
  const Bits even = simd::broadcast_bits(0x00ff00ffu);
  return {simd::both(bytes, even), simd::both(simd::shift_right(bytes, 8), even)};
}
INLINE void add(Sum& sum, const Codes& codes, const uint32_t* numbers, int word) {
  sum.all = simd::dot_halves(sum.all, codes.even, simd::broadcast_bits(numbers[2 * word]));
  sum.all = simd::dot_halves(sum.all, codes.odd, simd::broadcast_bits(numbers[2 * word + 1]));
}

#endif

// Stages the values of a group: their numbers, the sum of these, and their scale. It is 0 where all values are nearly 0,
// NaN where one is not finite.
INLINE void stage_values(const float* x, uint32_t* out) {
  const float largest = q4h::worst_of(x, GROUP);
  const bool plain = largest > 0x1p-100f && largest < INFINITY;
  const float inverse = plain ? LARGEST / largest : 0.f;
  const float scale = plain ? largest / LARGEST : (largest <= 0x1p-100f ? 0.f : NAN);
  alignas(64) int32_t numbers[GROUP];
  int32_t sum = 0;
  for (int k = 0; k < GROUP; k++) numbers[k] = plain ? (int32_t)__builtin_rintf(x[k] * inverse) : 0;
  for (int k = 0; k < GROUP; k++) sum += numbers[k];
  stage_group(numbers, out);
  memcpy(out + STAGED_WORDS, &sum, sizeof sum);
  memcpy(out + STAGED_WORDS + 1, &scale, sizeof scale);
}

// Stages one row; `x` has room for its whole blocks.
INLINE void stage_row(const uint16_t* input, int64_t depth, float* x, uint32_t* out) {
  const int64_t padded = panel::blocks_of<Grid4>(depth) * panel::DEPTH<Grid4>;
  q4h::widen(input, depth, x);
  for (int64_t k = depth; k < padded; k++) x[k] = 0.f;
  for (int64_t first = 0; first < padded; first += GROUP, out += STAGED_GROUP) stage_values(x + first, out);
}

// The codes of LANES columns from `column` on: those of one word of a group.
template <class Format>
INLINE Codes load_codes(const uint32_t* block, int group, int column, int word) {
  const int strip = column / panel::STRIP, lane = column % panel::STRIP;
  if constexpr (std::is_same_v<Format, Grid4>) {
    const Bits both = simd::load_bits(block + (strip * GROUP_WORDS + word) * panel::STRIP + lane);
    return codes_of(simd::both(group == 0 ? both : simd::shift_right(both, 4), simd::broadcast_bits(0x0f0f0f0fu)));
  } else {
    const int at = strip * panel::WORDS + group * GROUP_WORDS + word;
    return codes_of(simd::load_bits(block + at * panel::STRIP + lane));
  }
}

INLINE const uint16_t* steps_of(const uint32_t* block, int code_words, int group) {
  return (const uint16_t*)(block + code_words) + group * panel::COLUMNS;
}

// What the sums of a group of some rows are multiplied by, and what is added to them.
template <int ROWS>
struct Scales {
  float scale[ROWS], sum[ROWS];  // the sum of a row's numbers, scaled, is for offsets
  uint32_t zero[ROWS];           // of codes of 8 bits

  __attribute__((always_inline)) void read(int64_t r, const uint32_t* staged) {
    int32_t numbers;
    memcpy(&numbers, staged + STAGED_WORDS, sizeof numbers);
    memcpy(scale + r, staged + STAGED_WORDS + 1, sizeof *scale);
    sum[r] = (float)numbers * scale[r], zero[r] = (uint32_t)(-ZERO8 * numbers);
  }
};

// `total` and the products of a group of row r, whose whole sum is `value`, for columns with these steps and offsets.
template <class Format, int ROWS>
INLINE Vec added(Vec total, Bits value, const Scales<ROWS>& scales, int64_t r, Vec step, Vec offset) {
  constexpr bool HAS_OFFSETS = std::is_same_v<Format, Grid4>;
  if constexpr (!HAS_OFFSETS) value = simd::plus(value, simd::broadcast_bits(scales.zero[r]));
  total = simd::fmadd(simd::to_floats(value), simd::mul(step, simd::broadcast(scales.scale[r])), total);
  return HAS_OFFSETS ? simd::fmadd(simd::broadcast(scales.sum[r]), offset, total) : total;
}

// Adds the products of one group of ROWS rows to their sums over the strips from `strip` on. With every word, so many
// lines from `ahead` on are fetched.
template <class Format, int ROWS>
INLINE void add_group(const uint32_t* const (&rows)[ROWS], const uint32_t* block, int group, int strip,
                      const uint32_t* ahead, int lines, float (*sums)[panel::COLUMNS]) {
  constexpr int VECS = strips_at_once(ROWS) * STRIP_VECS;
  const int first = strip * panel::STRIP;
  Sum acc[ROWS][VECS];
  UNROLL for (int r = 0; r < ROWS; r++) { UNROLL for (int n = 0; n < VECS; n++) acc[r][n] = no_sum(); }
  for (int word = 0; word < GROUP_WORDS; word++) {
    for (int n = 0; n < lines; n++, ahead += panel::LINE) _mm_prefetch((const char*)ahead, _MM_HINT_T0);
    UNROLL for (int n = 0; n < VECS; n++) {
      const Codes codes = load_codes<Format>(block, group, first + n * LANES, word);
      UNROLL for (int r = 0; r < ROWS; r++) add(acc[r][n], codes, rows[r] + group * STAGED_GROUP, word);
    }
  }
  const uint16_t* steps = steps_of(block, Format::CODE_WORDS, group) + first;
  const uint16_t* offsets = steps_of(block, Format::CODE_WORDS, GROUPS + group) + first;  // of Grid4
  Scales<ROWS> scales;
  UNROLL for (int r = 0; r < ROWS; r++) scales.read(r, rows[r] + group * STAGED_GROUP);
  UNROLL for (int n = 0; n < VECS; n++) {
    const Vec step = simd::load_halves(steps + n * LANES);
    const Vec offset = std::is_same_v<Format, Grid4> ? simd::load_halves(offsets + n * LANES) : step;
    UNROLL for (int r = 0; r < ROWS; r++) {
      float* at = sums[r] + first + n * LANES;
      simd::store(at, added<Format>(simd::load(at), whole(acc[r][n]), scales, r, step, offset));
    }
  }
}

// ROWS rows, `stride` words apart, times some blocks.
template <class Format, int ROWS>
static void add_rows(const uint32_t* first, int64_t stride, const uint32_t* weights, int64_t count, bool near,
                     float (*sums)[panel::COLUMNS]) {
  constexpr int STEPS = GROUPS * GROUP_WORDS, LINES = Format::BLOCK_WORDS / panel::LINE;
  for (int strip = 0; strip < panel::STRIPS; strip += strips_at_once(ROWS)) {
    const uint32_t* rows[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) rows[r] = first + r * stride;
    const int lines = near || strip > 0 ? 0 : (LINES + STEPS - 1) / STEPS;
    const uint32_t* block = weights;
    for (int64_t n = 0; n < count; n++, block += Format::BLOCK_WORDS) {
      const uint32_t* ahead = block + AHEAD * Format::BLOCK_WORDS;
      add_group<Format>(rows, block, 0, strip, ahead, lines, sums);
      add_group<Format>(rows, block, 1, strip, ahead + GROUP_WORDS * lines * panel::LINE, lines, sums);
      UNROLL for (int r = 0; r < ROWS; r++) rows[r] += STAGED_BLOCK;
    }
  }
}

template <class AddRows, class Format, int... N>
constexpr std::array<AddRows, sizeof...(N)> for_each_count(std::integer_sequence<int, N...>) {
  return {add_rows<Format, N + 1>...};
}

// Rows are multiplied in groups that registers can hold, some blocks of depth at a time.
template <class Format>
INLINE void multiply(const uint32_t* first, int64_t rows, int64_t blocks, const uint32_t* weights, bool near,
                     Sums& sums) {
  using AddRows = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, bool, float (*)[panel::COLUMNS]);
  static constexpr auto BY_COUNT = for_each_count<AddRows, Format>(std::make_integer_sequence<int, MOST_ROWS>());
  const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS, most = (rows + groups - 1) / groups;
  memset(sums.at, 0, rows * sizeof sums.at[0]);
  for (int64_t block = 0; block < blocks; block += BLOCKS_AT_ONCE) {
    const int64_t count = std::min(BLOCKS_AT_ONCE, blocks - block);
    for (int64_t row = 0; row < rows; row += most) {
      BY_COUNT[std::min(most, rows - row) - 1](first + (row * blocks + block) * STAGED_BLOCK, blocks * STAGED_BLOCK,
                                               weights + block * Format::BLOCK_WORDS, count, near || row > 0,
                                               sums.at + row);
    }
  }
}

}  // namespace grid
