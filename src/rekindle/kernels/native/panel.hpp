// Packed weights of a linear layer: where each value is.
//
// Weights [columns, depth] are cut into panels of 64 columns, panels into blocks of 32 steps of depth, blocks into four
// strips of 16 columns. A strip holds 16 pairs of steps, a pair the two bf16 of each of its columns:
//
//     [panel][block][strip 4][pair 16][column 16][2]        a strip is 1 KiB, a block 4 KiB
//
// Both sizes are rounded up and filled with zeros, so kernels meet whole blocks only. A strip is a tile of AMX as well
// as a run of vectors.
#pragma once

#include <cstdint>

#include "simd.hpp"

namespace panel {

constexpr int COLUMNS = 64;
constexpr int STRIP = 16;  // columns
constexpr int DEPTH = 32;  // of a block
constexpr int STRIP_VALUES = STRIP * DEPTH;
constexpr int BLOCK_VALUES = COLUMNS * DEPTH;

INLINE int64_t panels_of(int64_t columns) { return (columns + COLUMNS - 1) / COLUMNS; }
INLINE int64_t blocks_of(int64_t depth) { return (depth + DEPTH - 1) / DEPTH; }

// One row after another of a few rows' sums over one panel, before bias and rounding.
struct Sums {
  static constexpr int ROWS = 32;
  alignas(64) float at[ROWS][COLUMNS];
};

}  // namespace panel
