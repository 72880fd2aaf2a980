// Rows times a panel in the tiles of AMX. A tile product takes 32 steps of depth; an output is one element of one tile,
// which takes the depth from first to last whatever the other rows of its tile are, or how many.
//
//     tiles 0 to 3: sums of two times two, or one times four, 16 x 16 pieces   4, 5: rows   6, 7: weights
#pragma once

#include "panel.hpp"

namespace tiles {

using panel::Sums;

constexpr int ROWS = 16;  // of a tile
constexpr int MOST_ROWS = 2 * ROWS;
constexpr int TILE_VALUES = panel::STRIP_VALUES;

using Staged = uint16_t;  // [rows of 16][block][row 16][32]: what is missing in the last rows is not read

INLINE void stage_row(const uint16_t* input, int64_t row, int64_t depth, Staged* out) {
  const int64_t blocks = panel::blocks_of(depth);
  Staged* to = out + (row / ROWS * blocks * ROWS + row % ROWS) * panel::DEPTH;
  for (int64_t block = 0; block < blocks; block++, to += TILE_VALUES) {
    const int64_t left = depth - block * panel::DEPTH;
    if (left >= panel::DEPTH) {
      simd::store_bits(to, simd::load_bits(input + block * panel::DEPTH));
    } else {
      memset(to, 0, panel::DEPTH * sizeof(Staged));
      memcpy(to, input + block * panel::DEPTH, left * sizeof(Staged));
    }
  }
}

// The tile registers of one thread, shaped for a number of rows; given back at the end.
class Registers {
 public:
  ~Registers() {
    if (rows_ >= 0) _tile_release();
  }

  void shape(int64_t rows) {
    if (rows == rows_) return;
    const int first = rows < ROWS ? (int)rows : ROWS, second = rows > ROWS ? (int)rows - ROWS : first;
    alignas(64) Config config = {};
    config.palette = 1;
    const int heights[8] = {first, first, second, second, first, second, ROWS, ROWS};
    for (int tile = 0; tile < 8; tile++) {
      config.bytes[tile] = 64;
      config.rows[tile] = (uint8_t)heights[tile];
    }
    _tile_loadconfig(&config);
    rows_ = rows;
  }

 private:
  struct Config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  int64_t rows_ = -1;
};

constexpr int WEIGHT_STRIDE = 2 * panel::STRIP * sizeof(uint16_t);
constexpr int INPUT_STRIDE = panel::DEPTH * sizeof(uint16_t);
constexpr int SUM_STRIDE = panel::COLUMNS * sizeof(float);

constexpr int AHEAD = 2 * panel::BLOCK_VALUES;  // what is fetched while a block is multiplied

INLINE void prefetch(const uint16_t* weights, int count) {
  for (int value = 0; value < count; value += 32) _mm_prefetch((const char*)(weights + value), _MM_HINT_T0);
}

// Up to 16 rows times the whole panel: its weights are read once.
INLINE void multiply_one(const Staged* a, int64_t blocks, const uint16_t* b, Sums& sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < blocks; block++, a += TILE_VALUES, b += panel::BLOCK_VALUES) {
    prefetch(b + AHEAD, panel::BLOCK_VALUES);
    _tile_loadd(4, a, INPUT_STRIDE);
    _tile_loadd(6, b, WEIGHT_STRIDE);
    _tile_loadd(7, b + panel::STRIP_VALUES, WEIGHT_STRIDE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, b + 2 * panel::STRIP_VALUES, WEIGHT_STRIDE);
    _tile_loadd(7, b + 3 * panel::STRIP_VALUES, WEIGHT_STRIDE);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums.at[0], SUM_STRIDE);
  _tile_stored(1, sums.at[0] + panel::STRIP, SUM_STRIDE);
  _tile_stored(2, sums.at[0] + 2 * panel::STRIP, SUM_STRIDE);
  _tile_stored(3, sums.at[0] + 3 * panel::STRIP, SUM_STRIDE);
}

// 17 to 32 rows times two strips.
INLINE void multiply_two(const Staged* a, int64_t blocks, const uint16_t* b, float* out) {
  const Staged* second = a + blocks * TILE_VALUES;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < blocks; block++, b += panel::BLOCK_VALUES) {
    prefetch(b + AHEAD, 2 * panel::STRIP_VALUES);
    _tile_loadd(6, b, WEIGHT_STRIDE);
    _tile_loadd(4, a + block * TILE_VALUES, INPUT_STRIDE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + panel::STRIP_VALUES, WEIGHT_STRIDE);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, second + block * TILE_VALUES, INPUT_STRIDE);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, SUM_STRIDE);
  _tile_stored(1, out + panel::STRIP, SUM_STRIDE);
  _tile_stored(2, out + ROWS * panel::COLUMNS, SUM_STRIDE);
  _tile_stored(3, out + ROWS * panel::COLUMNS + panel::STRIP, SUM_STRIDE);
}

INLINE int64_t rows_at_once(int64_t) { return MOST_ROWS; }

INLINE void multiply(Registers& registers, const Staged* a, int64_t rows, int64_t blocks, const uint16_t* b,
                     Sums& sums) {
  registers.shape(rows);
  if (rows <= ROWS) return multiply_one(a, blocks, b, sums);
  multiply_two(a, blocks, b, sums.at[0]);
  multiply_two(a, blocks, b + 2 * panel::STRIP_VALUES, sums.at[0] + 2 * panel::STRIP);
}

}  // namespace tiles
