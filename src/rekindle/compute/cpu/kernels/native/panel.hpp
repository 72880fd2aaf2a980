// Packed weights of a linear layer: where each value is.
//
// Weights [columns, depth] are cut into panels of 64 columns, panels into blocks, blocks into four strips of 16
// columns. A strip has 16 words of each of its columns. A word holds values that follow each other in depth, two of
// bf16 or four of int8, so that a block is 32 or 64 steps deep:
//
//     [panel][block][strip 4][word 16][column 16]        a strip is 1 KiB, a block 4 KiB
//
// Both sizes are rounded up and filled with zeros, so kernels meet whole blocks only. A strip is a tile of AMX as well
// as a run of vectors. A panel of int8 ends with its columns' scales (fp32 [64]) and sums of values (int32 [64]).
//
// A block of int4 holds what becomes one of int8 in half as many words: the lower four bits of each byte of word w are
// the code of a byte of word w there plus 8, the higher four that of word w + 8. A byte for each column follows: the
// multiplier, less 1, of its first 32 values in the lower bits, that of the others in the higher ones. The tail is that
// of int8.
//
//     [panel][block]{[strip 4][word 8][column 16], multipliers [column 64]}        a block is 2 KiB and 64 bytes
//
// Blocks of grids hold codes without sign, those of 8 bits where int8 has its values, those of 4 bits where int4 has its
// codes. The steps of each of the two groups of 32 follow, in fp16, and with 4 bits then their offsets. With 8 bits the
// code 128 stands for 0.
//
//     [panel][block]{codes, steps [group 2][column 64], offsets [group 2][column 64]}
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.hpp"

namespace panel {

constexpr int COLUMNS = 64;
constexpr int STRIP = 16;  // columns
constexpr int WORDS = 16;  // of a column in a block
constexpr int STRIP_WORDS = STRIP * WORDS;
constexpr int BLOCK_WORDS = COLUMNS * WORDS;
constexpr int STRIPS = COLUMNS / STRIP;
constexpr int LINE = 64 / sizeof(uint32_t);  // words of a line of the cache

// Formats of weights, and in which one rows are multiplied.
struct Bf16 {
  using Rows = Bf16;
  static constexpr int WORD_VALUES = 2;
  static constexpr int BLOCK_WORDS = panel::BLOCK_WORDS;
  static constexpr int TAIL_WORDS = 0;  // of a panel, after its blocks
};
struct Int8 {
  using Rows = Int8;
  static constexpr int WORD_VALUES = 4;
  static constexpr int BLOCK_WORDS = panel::BLOCK_WORDS;
  static constexpr int TAIL_WORDS = 2 * COLUMNS;
};
struct Int4 {
  using Rows = Int8;
  static constexpr int WORD_VALUES = 4;  // of a word of int8
  static constexpr int CODE_WORDS = panel::BLOCK_WORDS / 2;
  static constexpr int BLOCK_WORDS = CODE_WORDS + COLUMNS / 4;
  static constexpr int TAIL_WORDS = 2 * COLUMNS;
};

constexpr int GRID_GROUPS = 2;  // of a block
struct Grid4 {
  using Rows = Grid4;
  static constexpr int WORD_VALUES = 4;  // of codes in bytes
  static constexpr int CODE_WORDS = panel::BLOCK_WORDS / 2;
  static constexpr int BLOCK_WORDS = CODE_WORDS + 2 * GRID_GROUPS * COLUMNS / 2;
  static constexpr int TAIL_WORDS = 0;
};
struct Grid8 {
  using Rows = Grid8;
  static constexpr int WORD_VALUES = 4;
  static constexpr int CODE_WORDS = panel::BLOCK_WORDS;
  static constexpr int BLOCK_WORDS = CODE_WORDS + GRID_GROUPS * COLUMNS / 2;
  static constexpr int TAIL_WORDS = 0;
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
  return blocks * Format::BLOCK_WORDS + Format::TAIL_WORDS;
}

// What is fetched from memory with every word of some blocks: so many lines from an address on.
struct Ahead {
  const uint32_t* at;
  int64_t lines;
};

// Spreads what is fetched over the passes in which some blocks are multiplied: evenly, and in the order of memory,
// which processors read twice as fast as strips side by side.
template <class Format>
class Fetching {
 public:
  Fetching(int64_t blocks, int64_t passes)
      : distance_(std::max<int64_t>(blocks, LEAST_DISTANCE)), lines_((LINES + passes - 1) / passes) {}

  // What one pass over `count` blocks fetches.
  Ahead part(const uint32_t* blocks, int64_t count, int64_t pass) const {
    const int64_t before = pass * lines_;
    if (before >= LINES) return {nullptr, 0};
    return {blocks + distance_ * Format::BLOCK_WORDS + before * count * WORDS * LINE, lines_};
  }

 private:
  static constexpr int64_t LINES = Format::BLOCK_WORDS / LINE / WORDS;  // of a block, for each word of a strip
  static constexpr int64_t LEAST_DISTANCE = 4;                          // blocks
  int64_t distance_, lines_;                                            // lines with each word of a pass
};

// One row after another of a few rows' sums over one panel, before scales, bias and rounding; of int8 they are int32.
struct Sums {
  static constexpr int ROWS = 48;
  alignas(64) float at[ROWS][COLUMNS];
};

}  // namespace panel
