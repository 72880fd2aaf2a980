// Rows times a panel in the tiles of AMX. A tile product takes a block of depth; an output is one element of one tile,
// which takes the depth from first to last whatever the other rows of its tile are, or how many.
//
//     tiles 0 to 3: sums of two times two, or one times four, 16 x 16 pieces   4, 5: rows   6, 7: weights
#pragma once

#include <type_traits>

#include "int4.hpp"
#include "panel.hpp"

namespace tiles {

using panel::Bf16;
using panel::Int4;
using panel::Int8;
using panel::Sums;

constexpr int ROWS = 16;  // of a tile
constexpr int MOST_ROWS = 2 * ROWS;
constexpr int TILE_WORDS = panel::STRIP_WORDS;
constexpr int BLOCK_BYTES = panel::WORDS * sizeof(uint32_t);  // of a row

template <class Format>
using Staged = uint32_t;  // [rows of 16][block][row 16][word 16]: what is missing in the last rows is not read
template <class Format>
constexpr int STAGED_BLOCK = panel::WORDS;

// Stages one row; `scratch` has room for its whole blocks. Returns its scale.
template <class Format>
INLINE float stage_row(const uint16_t* input, int64_t row, int64_t depth, float* scratch, uint32_t* out) {
  const int64_t blocks = panel::blocks_of<Format>(depth);
  uint32_t* to = out + (row / ROWS * blocks * ROWS + row % ROWS) * panel::WORDS;
  if constexpr (!std::is_same_v<Format, Bf16>) {
    q4h::widen(input, depth, scratch);
    return int8::quantise(scratch, depth, (int8_t*)to, TILE_WORDS * sizeof *to);
  }
  for (int64_t block = 0; block < blocks; block++, to += TILE_WORDS) {
    const uint16_t* from = input + block * panel::DEPTH<Bf16>;
    const int64_t left = depth - block * panel::DEPTH<Bf16>;
    if (left >= panel::DEPTH<Bf16>) {
      simd::store_bits(to, simd::load_bits(from));
    } else {
      memset(to, 0, panel::WORDS * sizeof *to);
      memcpy(to, from, left * sizeof *from);
    }
  }
  return 1.f;
}

// The tile registers of one thread, shaped for a number of rows and so many bytes of each; given back at the end.
class Registers {
 public:
  ~Registers() {
    if (rows_ >= 0) _tile_release();
  }

  void shape(int64_t rows, int bytes = BLOCK_BYTES) {
    if (rows == rows_ && bytes == bytes_) return;
    const int first = rows < ROWS ? (int)rows : ROWS, second = rows > ROWS ? (int)rows - ROWS : first;
    alignas(64) Config config = {};
    config.palette = 1;
    const int words = bytes / 4, heights[8] = {first, first, second, second, first, second, words, words};
    for (int tile = 0; tile < 8; tile++) {
      config.bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? bytes : BLOCK_BYTES);
      config.rows[tile] = (uint8_t)heights[tile];
    }
    simd::load_tile_config(&config);
    rows_ = rows, bytes_ = bytes;
  }

 private:
  struct Config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  int64_t rows_ = -1;
  int bytes_ = 0;
};

constexpr int WEIGHT_STRIDE = panel::STRIP * sizeof(uint32_t);
constexpr int INPUT_STRIDE = panel::WORDS * sizeof(uint32_t);
constexpr int SUM_STRIDE = panel::COLUMNS * sizeof(float);
constexpr int AHEAD = 2;  // blocks: what is fetched while one is multiplied

INLINE void fetch(const uint32_t* from, int words) {
  for (int n = 0; n < words; n += panel::LINE) _mm_prefetch((const char*)(from + n), _MM_HINT_T0);
}

// STRIPS strips of a block as they are multiplied: where they lie, or unpacked. Those of a later block are fetched.
template <class Format, int STRIPS>
struct Strips {
  INLINE const uint32_t* of(const uint32_t* block, int strip) {
    const uint32_t* words = block + strip * panel::STRIP_WORDS;
    fetch(words + AHEAD * Format::BLOCK_WORDS, STRIPS * panel::STRIP_WORDS);
    return words;
  }
};

template <int STRIPS>
struct Strips<Int4, STRIPS> {
  alignas(64) uint32_t values[STRIPS * panel::STRIP_WORDS];

  const uint32_t* of(const uint32_t* block, int strip) {
    const uint32_t* later = block + AHEAD * Int4::BLOCK_WORDS;
    fetch(later + strip * panel::STRIP * int4::HALF_WORDS, STRIPS * panel::STRIP * int4::HALF_WORDS);
    if (strip == 0) fetch(later + Int4::CODE_WORDS, panel::LINE);
    int4::unpack<STRIPS>(block, strip, values);
    simd::fence();
    return values;
  }
};

// sums += rows * weights of one block; the intrinsics want the numbers of tiles themselves.
#define TILE_PRODUCT(sums, rows, weights)         \
  if constexpr (std::is_same_v<Format, Bf16>) {   \
    _tile_dpbf16ps(sums, rows, weights);          \
  } else {                                        \
    _tile_dpbssd(sums, rows, weights);            \
  }

// Up to 16 rows times the whole panel: its weights are read once.
template <class Format>
INLINE void multiply_one(const uint32_t* a, int64_t blocks, const uint32_t* weights, Sums& sums) {
  Strips<Format, 4> strips;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < blocks; block++, a += TILE_WORDS, weights += Format::BLOCK_WORDS) {
    const uint32_t* b = strips.of(weights, 0);
    _tile_loadd(4, a, INPUT_STRIDE);
    _tile_loadd(6, b, WEIGHT_STRIDE);
    _tile_loadd(7, b + panel::STRIP_WORDS, WEIGHT_STRIDE);
    TILE_PRODUCT(0, 4, 6);
    TILE_PRODUCT(1, 4, 7);
    _tile_loadd(6, b + 2 * panel::STRIP_WORDS, WEIGHT_STRIDE);
    _tile_loadd(7, b + 3 * panel::STRIP_WORDS, WEIGHT_STRIDE);
    TILE_PRODUCT(2, 4, 6);
    TILE_PRODUCT(3, 4, 7);
  }
  _tile_stored(0, sums.at[0], SUM_STRIDE);
  _tile_stored(1, sums.at[0] + panel::STRIP, SUM_STRIDE);
  _tile_stored(2, sums.at[0] + 2 * panel::STRIP, SUM_STRIDE);
  _tile_stored(3, sums.at[0] + 3 * panel::STRIP, SUM_STRIDE);
}

// 17 to 32 rows times the two strips from `strip` on.
template <class Format>
INLINE void multiply_two(const uint32_t* a, int64_t blocks, const uint32_t* weights, int strip, Sums& sums) {
  float* out = sums.at[0] + strip * panel::STRIP;
  Strips<Format, 2> strips;
  const uint32_t* second = a + blocks * TILE_WORDS;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < blocks; block++, weights += Format::BLOCK_WORDS) {
    const uint32_t* b = strips.of(weights, strip);
    _tile_loadd(6, b, WEIGHT_STRIDE);
    _tile_loadd(4, a + block * TILE_WORDS, INPUT_STRIDE);
    TILE_PRODUCT(0, 4, 6);
    _tile_loadd(7, b + panel::STRIP_WORDS, WEIGHT_STRIDE);
    TILE_PRODUCT(1, 4, 7);
    _tile_loadd(5, second + block * TILE_WORDS, INPUT_STRIDE);
    TILE_PRODUCT(2, 5, 6);
    TILE_PRODUCT(3, 5, 7);
  }
  _tile_stored(0, out, SUM_STRIDE);
  _tile_stored(1, out + panel::STRIP, SUM_STRIDE);
  _tile_stored(2, out + ROWS * panel::COLUMNS, SUM_STRIDE);
  _tile_stored(3, out + ROWS * panel::COLUMNS + panel::STRIP, SUM_STRIDE);
}

INLINE int64_t rows_at_once(int64_t) { return MOST_ROWS; }

constexpr int64_t TOGETHER = ROWS;  // staged rows that are one piece of memory

// Copies a staged row to the place of another one.
template <class Format>
INLINE void copy_row(uint32_t* staged, int64_t from, int64_t to, int64_t blocks) {
  const uint32_t* source = staged + (from / ROWS * blocks * ROWS + from % ROWS) * panel::WORDS;
  uint32_t* target = staged + (to / ROWS * blocks * ROWS + to % ROWS) * panel::WORDS;
  for (int64_t block = 0; block < blocks; block++, source += TILE_WORDS, target += TILE_WORDS) {
    simd::store_bits(target, simd::load_bits(source));
  }
}

template <class Format>
INLINE void multiply(Registers& registers, const uint32_t* a, int64_t rows, int64_t blocks, const uint32_t* b,
                     bool /* near */, Sums& sums) {
  registers.shape(rows);
  simd::fence();
  if (rows <= ROWS) {
    multiply_one<Format>(a, blocks, b, sums);
  } else {
    multiply_two<Format>(a, blocks, b, 0, sums);
    multiply_two<Format>(a, blocks, b, 2, sums);
  }
  simd::fence();
}

#undef TILE_PRODUCT

}  // namespace tiles
