// Rows times grids in the tiles of AMX, for many rows: the bits of grid.hpp.
//
// A tile product takes a group of depth. The sums of products with high and with low digits are whole numbers, stored
// and multiplied by scales in vectors, as grid.hpp does: one group after another, so no other rounding comes in.
//
//     tiles 0, 1: sums of the first 16 rows with high and low digits   2, 3: of the others
//     4, 5: of these rows, one kind of digits      6: codes
#pragma once

#include "grid.hpp"
#include "tiles.hpp"

namespace grid_tiles {

using grid::GROUP_WORDS;
using grid::GROUPS;
using grid::STAGED_GROUP;
using panel::Grid4;
using panel::Sums;
using tiles::ROWS;

constexpr int64_t LEAST_ROWS = 8;  // for fewer, vectors take less time
constexpr int GROUP_BYTES = GROUP_WORDS * sizeof(uint32_t);
static_assert(simd::LANES == panel::STRIP, "a row of a tile of sums is a vector");

using Scales = grid::Scales<tiles::MOST_ROWS>;

// The codes of a block in bytes, where they lie or unpacked: strip by strip, GROUP_WORDS of one group and then of the
// other.
template <class Format>
INLINE const uint32_t* bytes_of(const uint32_t* block, uint32_t* unpacked) {
  if constexpr (!std::is_same_v<Format, Grid4>) return block;
  const simd::Bits nibbles = simd::broadcast_bits(0x0f0f0f0fu);
  for (int strip = 0; strip < panel::STRIPS; strip++, unpacked += panel::STRIP_WORDS) {
    UNROLL for (int word = 0; word < GROUP_WORDS; word++, block += panel::STRIP) {
      const simd::Bits both = simd::load_bits(block);
      simd::store_bits(unpacked + word * panel::STRIP, simd::both(both, nibbles));
      simd::store_bits(unpacked + (GROUP_WORDS + word) * panel::STRIP, simd::both(simd::shift_right(both, 4), nibbles));
    }
  }
  return unpacked - panel::STRIPS * panel::STRIP_WORDS;
}

// Up to 16 rows from `row` on of one strip: the whole sums of a group, times scales, are added to what is there.
template <class Format>
INLINE void add_scaled(const int32_t (&high)[ROWS][panel::STRIP], const int32_t (&low)[ROWS][panel::STRIP],
                       const Scales& scales, simd::Vec step, simd::Vec offset, int64_t row, int64_t rows, int strip,
                       Sums& sums) {
  for (int64_t r = 0; r < rows; r++) {
    float* at = sums.at[row + r] + strip * panel::STRIP;
    const simd::Bits value = grid::whole({simd::load_bits(high[r]), simd::load_bits(low[r])});
    simd::store(at, grid::added<Format>(simd::load(at), value, scales, row + r, step, offset));
  }
}

// Tile `sums`: rows of one kind of digits from an address on, times the codes in tile 6.
#define TILE_SUMS(sums, rows, from)      \
  _tile_loadd(rows, from, bytes);        \
  _tile_zero(sums);                      \
  _tile_dpbsud(sums, rows, 6);

// Sums of one strip: with high and low digits of the first 16 rows, and of the others.
struct Strip {
  alignas(64) int32_t sums[4][ROWS][panel::STRIP];

  void multiply(const uint32_t* staged, int64_t stride, bool has_others, const uint32_t* codes) {
    const int64_t bytes = stride * sizeof *staged;
    constexpr int ROW = panel::STRIP * sizeof(int32_t);
    _tile_loadd(6, codes, tiles::WEIGHT_STRIDE);
    TILE_SUMS(0, 4, staged);
    TILE_SUMS(1, 4, staged + GROUP_WORDS);
    if (has_others) {
      const uint32_t* others = staged + ROWS * stride;
      TILE_SUMS(2, 5, others);
      TILE_SUMS(3, 5, others + GROUP_WORDS);
    }
    _tile_stored(0, sums[0], ROW);
    _tile_stored(1, sums[1], ROW);
    if (has_others) {
      _tile_stored(2, sums[2], ROW);
      _tile_stored(3, sums[3], ROW);
    }
    simd::fence();
  }
};

#undef TILE_SUMS

// One group of up to 32 rows times the whole panel: while a strip is scaled, the tiles multiply the next.
template <class Format>
INLINE void add_group(const uint32_t* staged, int64_t stride, int64_t rows, const uint32_t* block,
                      const uint32_t* codes, int which, Sums& sums) {
  Strip strips[2];
  Scales scales;
  for (int64_t r = 0; r < rows; r++) scales.read(r, staged + r * stride);
  const uint16_t* steps = grid::steps_of(block, Format::CODE_WORDS, which);
  const uint16_t* offsets = grid::steps_of(block, Format::CODE_WORDS, GROUPS + which);  // of Grid4
  codes += which * GROUP_WORDS * panel::STRIP;
  strips[0].multiply(staged, stride, rows > ROWS, codes);
  UNROLL for (int strip = 0; strip < panel::STRIPS; strip++) {
    const int next = strip + 1;
    if (next < panel::STRIPS) {
      strips[next % 2].multiply(staged, stride, rows > ROWS, codes + next * panel::STRIP_WORDS);
    }
    const auto& found = strips[strip % 2].sums;
    const simd::Vec step = simd::load_halves(steps + strip * panel::STRIP);
    const simd::Vec offset = std::is_same_v<Format, Grid4> ? simd::load_halves(offsets + strip * panel::STRIP) : step;
    add_scaled<Format>(found[0], found[1], scales, step, offset, 0, std::min<int64_t>(rows, ROWS), strip, sums);
    if (rows > ROWS) add_scaled<Format>(found[2], found[3], scales, step, offset, ROWS, rows - ROWS, strip, sums);
  }
}

template <class Format>
INLINE void multiply(tiles::Registers& registers, const uint32_t* staged, int64_t rows, int64_t blocks,
                     const uint32_t* weights, bool near, Sums& sums) {
  alignas(64) uint32_t unpacked[panel::BLOCK_WORDS];
  const int64_t stride = blocks * grid::STAGED_BLOCK;
  registers.shape(rows, GROUP_BYTES);
  memset(sums.at, 0, rows * sizeof sums.at[0]);
  for (int64_t n = 0; n < blocks; n++, staged += grid::STAGED_BLOCK, weights += Format::BLOCK_WORDS) {
    if (!near) tiles::fetch(weights + grid::AHEAD * Format::BLOCK_WORDS, Format::BLOCK_WORDS);
    const uint32_t* codes = bytes_of<Format>(weights, unpacked);
    simd::fence();
    for (int which = 0; which < GROUPS; which++) {
      add_group<Format>(staged + which * STAGED_GROUP, stride, rows, weights, codes, which, sums);
    }
  }
}

}  // namespace grid_tiles
