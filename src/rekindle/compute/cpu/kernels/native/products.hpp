// How this level multiplies staged rows by a panel, under one name: in tiles or in vectors. Few rows of grids are always
// multiplied in vectors.
#pragma once

#include <type_traits>

#include "grid.hpp"
#if defined(__AMX_BF16__)
#include "grid_tiles.hpp"
namespace level = tiles;
#else
#include "dots.hpp"
namespace level = dots;
#endif

namespace products {

using level::copy_row;
using level::Registers;
using level::rows_at_once;
using level::TOGETHER;
using panel::Sums;

template <class Format>
constexpr bool IS_GRID = std::is_same_v<Format, panel::Grid4> || std::is_same_v<Format, panel::Grid8>;

// Staged values of a row: their type, and how many a block has.
template <class Format, bool = IS_GRID<Format>>
struct Rows {
  using Staged = level::Staged<Format>;
  static constexpr int BLOCK = level::STAGED_BLOCK<Format>;
};
template <class Format>
struct Rows<Format, true> {
  using Staged = uint32_t;
  static constexpr int BLOCK = grid::STAGED_BLOCK;
};
template <class Format>
using Staged = typename Rows<Format>::Staged;
template <class Format>
constexpr int STAGED_BLOCK = Rows<Format>::BLOCK;

// Stages one row; `scratch` has room for its whole blocks. Returns its scale.
template <class Format>
INLINE float stage_row(const uint16_t* input, int64_t row, int64_t depth, float* scratch, Staged<Format>* out) {
  if constexpr (IS_GRID<Format>) {
    grid::stage_row(input, depth, scratch, out + row * panel::blocks_of<Format>(depth) * grid::STAGED_BLOCK);
    return 1.f;
  } else {
    return level::stage_row<Format>(input, row, depth, scratch, out);
  }
}

// Sums of `rows` staged rows times a panel, whose weights are near, in a cache, or not.
template <class Format>
INLINE void multiply(Registers& registers, const Staged<Format>* first, int64_t rows, int64_t blocks,
                     const uint32_t* weights, bool near, Sums& sums) {
  if constexpr (IS_GRID<Format>) {
#if defined(__AMX_BF16__)
    if (rows >= grid_tiles::LEAST_ROWS) {
      return grid_tiles::multiply<Format>(registers, first, rows, blocks, weights, near, sums);
    }
#endif
    grid::multiply<Format>(first, rows, blocks, weights, near, sums);
  } else {
    level::multiply<Format>(registers, first, rows, blocks, weights, near, sums);
  }
}

// The value of LANES sums: those of int8 and int4 are whole numbers, times the scales of row and columns.
template <class Format>
INLINE simd::Vec value_of(const float* sums, float row_scale, const float* column_scales) {
  if constexpr (std::is_same_v<Format, panel::Bf16> || IS_GRID<Format>) return simd::load(sums);
  const simd::Vec sum = simd::mul(simd::to_floats(simd::load_bits(sums)), simd::broadcast(row_scale));
  return simd::mul(sum, simd::load(column_scales));
}

}  // namespace products
