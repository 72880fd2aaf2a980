// Rows times a panel in vector registers. An output is one lane of one register, which takes the depth from first to
// last whatever the number of rows or strips beside it.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "int4.hpp"
#include "panel.hpp"

namespace dots {

using panel::Bf16;
using panel::Int4;
using panel::Int8;
using panel::Sums;
using simd::Bits;
using simd::LANES;
using simd::Vec;

constexpr int MOST_ROWS = 6;        // that registers can hold
constexpr int64_t MOST_BLOCKS = 8;  // multiplied at once
constexpr int STRIP_VECS = panel::STRIP / LANES;

// How a format is multiplied at this level: `Staged` values for each word of a row, and the sums' vectors.
template <class Format>
struct Arithmetic;

INLINE const uint32_t* strip_part(const uint32_t* weights, int vec) {
  return weights + vec / STRIP_VECS * panel::STRIP_WORDS + vec % STRIP_VECS * LANES;
}

// Words of a row are multiplied as they are.
struct Words {
  using Staged = uint32_t;
  static constexpr int STAGED = 1;  // for each word

  template <int ROWS, int VECS, class Sum>
  INLINE void add(Sum (&acc)[ROWS][VECS], const Staged* const (&rows)[ROWS], int64_t at, const uint32_t* weights) {
    Bits b[VECS];
    UNROLL for (int n = 0; n < VECS; n++) b[n] = simd::load_bits(strip_part(weights, n));
    UNROLL for (int r = 0; r < ROWS; r++) {
      const Bits a = simd::broadcast_bits(rows[r][at]);
      UNROLL for (int n = 0; n < VECS; n++) acc[r][n] = simd::dot(acc[r][n], a, b[n]);
    }
  }
};

// Where the bytes of rows have no sign in `simd::dot`, 128 is added to them, and what that adds to a sum is subtracted
// at its start.
template <>
struct Arithmetic<Int8> : Words {
  using Sum = Bits;

  static Sum start(const uint32_t* column_sums) {
    if constexpr (!simd::UNSIGNED_DOTS) return simd::zero_bits();
    return simd::minus(simd::zero_bits(), simd::shift_left(simd::load_bits(column_sums), 7));
  }
  static Sum sum(const float* at) { return simd::load_bits(at); }
  static float stage(const uint16_t* input, int64_t depth, float* scratch, Staged* out) {
    q4h::widen(input, depth, scratch);
    const float scale = int8::quantise(scratch, depth, (int8_t*)out, int8::BLOCK);
    const int64_t words = panel::blocks_of<Int8>(depth) * panel::WORDS;
    for (int64_t i = 0; simd::UNSIGNED_DOTS && i < words; i++) out[i] ^= 0x80808080u;
    return scale;
  }
};

#if defined(__AVX512BF16__)

constexpr int strips_at_once(int) { return panel::STRIPS; }

template <>
struct Arithmetic<Bf16> : Words {
  using Sum = Vec;

  static Sum start(const uint32_t*) { return simd::zero(); }
  static Sum sum(const float* at) { return simd::load(at); }
  static float stage(const uint16_t* input, int64_t depth, float*, Staged* out) {
    uint16_t* values = (uint16_t*)out;
    memcpy(values, input, depth * sizeof *values);
    memset(values + depth, 0, (panel::blocks_of<Bf16>(depth) * panel::DEPTH<Bf16> - depth) * sizeof *values);
    return 1.f;
  }
};

#else

constexpr int strips_at_once(int rows) { return rows <= 2 ? 2 : 1; }

// Rows are widened once: in the loop it would cost as much as the products.
template <>
struct Arithmetic<Bf16> {
  using Staged = float;
  using Sum = Vec;
  static constexpr int STAGED = 2;

  static Sum start(const uint32_t*) { return simd::zero(); }
  static Sum sum(const float* at) { return simd::load(at); }
  static float stage(const uint16_t* input, int64_t depth, float*, Staged* out) {
    q4h::widen(input, depth, out);
    const int64_t padded = panel::blocks_of<Bf16>(depth) * panel::DEPTH<Bf16>;
    for (int64_t k = depth; k < padded; k++) out[k] = 0.f;
    return 1.f;
  }
  template <int ROWS, int VECS>
  INLINE void add(Sum (&acc)[ROWS][VECS], const Staged* const (&rows)[ROWS], int64_t at, const uint32_t* b) {
    UNROLL for (int half = 0; half < 2; half++) {
      Vec w[VECS];
      UNROLL for (int n = 0; n < VECS; n++) {
        const Bits pairs = simd::load_bits(strip_part(b, n));
        w[n] = half ? simd::seconds(pairs) : simd::firsts(pairs);
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        const Vec a = simd::broadcast(rows[r][at + half]);
        UNROLL for (int n = 0; n < VECS; n++) acc[r][n] = simd::fmadd(a, w[n], acc[r][n]);
      }
    }
  }
};

#endif

template <class Format>
using Staged = typename Arithmetic<typename Format::Rows>::Staged;
template <class Format>
constexpr int STAGED_BLOCK = panel::WORDS * Arithmetic<typename Format::Rows>::STAGED;  // values of a row in a block

// Stages one row; `scratch` has room for its whole blocks. Returns its scale.
template <class Format>
INLINE float stage_row(const uint16_t* input, int64_t row, int64_t depth, float* scratch, Staged<Format>* out) {
  const int64_t values = panel::blocks_of<Format>(depth) * STAGED_BLOCK<Format>;
  return Arithmetic<typename Format::Rows>::stage(input, depth, scratch, out + row * values);
}

// Weights for some blocks of depth as they are multiplied, those in 4 bits as int8.
struct Blocks {
  const uint32_t* weights;
  int64_t count;
  const uint32_t* column_sums;  // null where sums of earlier blocks are added to
};

// Adds the products of ROWS rows, which are `stride` values apart, to their sums over the strips from `strip` on. With
// every word, LINES lines from `ahead` on are fetched.
template <class Rows, int LINES, int ROWS>
static void add_rows(const Staged<Rows>* first, int64_t stride, const Blocks& blocks, int strip, const uint32_t* ahead,
                     float (*sums)[panel::COLUMNS]) {
  using Level = Arithmetic<Rows>;
  constexpr int VECS = strips_at_once(ROWS) * STRIP_VECS;
  const int column = strip * panel::STRIP;
  const Staged<Rows>* rows[ROWS];
  typename Level::Sum acc[ROWS][VECS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    rows[r] = first + r * stride;
    UNROLL for (int n = 0; n < VECS; n++) {
      const int at = column + n * LANES;
      acc[r][n] = blocks.column_sums != nullptr ? Level::start(blocks.column_sums + at) : Level::sum(sums[r] + at);
    }
  }
  const uint32_t* b = blocks.weights + strip * panel::STRIP_WORDS;
  for (int64_t block = 0; block < blocks.count; block++, b += panel::BLOCK_WORDS) {
    for (int word = 0; word < panel::WORDS; word++) {
      UNROLL for (int n = 0; n < LINES; n++, ahead += panel::LINE) _mm_prefetch((const char*)ahead, _MM_HINT_T0);
      Level::add(acc, rows, (block * panel::WORDS + word) * Level::STAGED, b + word * panel::STRIP);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int n = 0; n < VECS; n++) simd::store(sums[r] + column + n * LANES, acc[r][n]);
  }
}

template <class Rows>
using AddRows = void (*)(const Staged<Rows>*, int64_t, const Blocks&, int, const uint32_t*, float (*)[panel::COLUMNS]);

template <class Rows, int LINES, int... N>
constexpr std::array<AddRows<Rows>, sizeof...(N)> for_each_count(std::integer_sequence<int, N...>) {
  return {add_rows<Rows, LINES, N + 1>...};
}

// By the lines that are fetched with each word, and the number of rows.
template <class Rows>
AddRows<Rows> adding(int64_t lines, int64_t rows) {
  static constexpr auto COUNTS = std::make_integer_sequence<int, MOST_ROWS>();
  static constexpr auto NONE = for_each_count<Rows, 0>(COUNTS), ONE = for_each_count<Rows, 1>(COUNTS);
  static constexpr auto TWO = for_each_count<Rows, 2>(COUNTS), FOUR = for_each_count<Rows, 4>(COUNTS);
  return (lines == 0 ? NONE : lines == 1 ? ONE : lines == 2 ? TWO : FOUR)[rows - 1];
}

// How many of `rows` rows to multiply in one call: as even as the memory for their sums allows.
INLINE int64_t rows_at_once(int64_t rows) {
  const int64_t calls = (rows + Sums::ROWS - 1) / Sums::ROWS;
  return (rows + calls - 1) / calls;
}

constexpr int64_t TOGETHER = 1;  // staged rows that are one piece of memory

// Copies a staged row to the place of another one.
template <class Format>
INLINE void copy_row(Staged<Format>* staged, int64_t from, int64_t to, int64_t blocks) {
  const int64_t values = blocks * STAGED_BLOCK<Format>;
  memcpy(staged + to * values, staged + from * values, values * sizeof *staged);
}

struct Registers {};  // of one thread; nothing to prepare

// How many blocks to multiply at once: they stay in the L1 cache for a few groups of rows. For more groups, longer
// pieces of rows count for more. Those of int4 are unpacked, which takes the least time where they are used at once.
template <class Format>
INLINE int64_t blocks_at_once(int64_t groups) {
  return groups > 2 ? MOST_BLOCKS : std::is_same_v<Format, Int4> && groups == 1 ? 1 : MOST_BLOCKS / 2;
}

// Rows are multiplied in groups that registers can hold, some blocks of depth at a time. While these stay near for all
// groups, and for all passes over their strips, the next ones come from memory. Weights that a call before has left
// near are multiplied over the whole depth instead, if they need no unpacking.
template <class Format>
INLINE void multiply(Registers&, const Staged<Format>* first, int64_t rows, int64_t blocks, const uint32_t* weights,
                     bool near, Sums& sums) {
  const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS, most = (rows + groups - 1) / groups;
  const bool at_once = near && !std::is_same_v<Format, Int4>;
  const int64_t stride = blocks * STAGED_BLOCK<Format>, step = at_once ? blocks : blocks_at_once<Format>(groups);
  const panel::Fetching<Format> fetching(step, groups * panel::STRIPS / strips_at_once((int)most));
  const uint32_t* column_sums = weights + blocks * Format::BLOCK_WORDS + panel::COLUMNS;
  alignas(64) uint32_t unpacked[std::is_same_v<Format, Int4> ? MOST_BLOCKS * panel::BLOCK_WORDS : 1];
  for (int64_t block = 0; block < blocks; block += step, weights += step * Format::BLOCK_WORDS) {
    const int64_t count = std::min(step, blocks - block);
    if constexpr (std::is_same_v<Format, Int4>) int4::unpack_blocks(weights, count, unpacked);
    const Blocks some{std::is_same_v<Format, Int4> ? unpacked : weights, count, block == 0 ? column_sums : nullptr};
    int64_t pass = 0;
    for (int64_t row = 0; row < rows; row += most) {
      const Staged<Format>* from = first + row * stride + block * STAGED_BLOCK<Format>;
      const int number = (int)std::min(most, rows - row);
      for (int strip = 0; strip < panel::STRIPS; strip += strips_at_once(number), pass++) {
        const panel::Ahead ahead = near ? panel::Ahead{nullptr, 0} : fetching.part(weights, count, pass);
        adding<typename Format::Rows>(ahead.lines, number)(from, stride, some, strip, ahead.at, sums.at + row);
      }
    }
  }
}

}  // namespace dots
