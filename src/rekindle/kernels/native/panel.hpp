// Packed weights of a linear layer: where each value is.
//
// Weights [columns, depth] are cut into panels of 64 columns, panels into blocks, blocks into four strips of 16 columns.
// A strip has 16 words of each of its columns. A word holds values that follow each other in depth, two of bf16 or four
// of int8, so that a block is 32 or 64 steps deep:
//
//     [panel][block][strip 4][word 16][column 16]        a strip is 1 KiB, a block 4 KiB
//
// Both sizes are rounded up and filled with zeros, so kernels meet whole blocks only. A strip is a tile of AMX as well
// as a run of vectors. A panel of int8 ends with its columns' scales (fp32 [64]) and sums of values (int32 [64]).
#pragma once

#include <cstdint>

#include "simd.hpp"

namespace panel {

constexpr int COLUMNS = 64;
constexpr int STRIP = 16;  // columns
constexpr int WORDS = 16;  // of a column in a block
constexpr int STRIP_WORDS = STRIP * WORDS;
constexpr int BLOCK_WORDS = COLUMNS * WORDS;

// Formats of weights; rows are multiplied in the same one.
struct Bf16 {
  static constexpr int WORD_VALUES = 2;
  static constexpr int TAIL_WORDS = 0;  // of a panel, after its blocks
};
struct Int8 {
  static constexpr int WORD_VALUES = 4;
  static constexpr int TAIL_WORDS = 2 * COLUMNS;
};

template <class Format>
constexpr int DEPTH = WORDS * Format::WORD_VALUES;  // of a block

INLINE int64_t panels_of(int64_t columns) { return (columns + COLUMNS - 1) / COLUMNS; }
template <class Format>
INLINE int64_t blocks_of(int64_t depth) {
  return (depth + DEPTH<Format> - 1) / DEPTH<Format>;
}
template <class Format>
INLINE int64_t panel_words(int64_t blocks) {
  return blocks * BLOCK_WORDS + Format::TAIL_WORDS;
}

// One row after another of a few rows' sums over one panel, before scales, bias and rounding; of int8 they are int32.
struct Sums {
  static constexpr int ROWS = 32;
  alignas(64) float at[ROWS][COLUMNS];
};

}  // namespace panel
