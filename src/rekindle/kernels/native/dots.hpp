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

constexpr int MOST_ROWS = 6;
constexpr int STRIP_VECS = panel::STRIP / LANES;

// How a format is multiplied at this level: `Staged` values for each word of a row, and the sums' vectors.
template <class Format>
struct Arithmetic;

#if defined(__AVX512BF16__)

constexpr int MOST_ALONE = 12;  // rows of a call that are not cut into groups: its weights are read from memory once
constexpr int strips_at_once(int rows) { return rows <= MOST_ROWS ? 4 : 2; }

// Words of a row are multiplied as they are.
struct Words {
  using Staged = uint32_t;
  static constexpr int STAGED = 1;  // for each word

  template <int ROWS, int VECS, class Sum>
  INLINE void add(Sum (&acc)[ROWS][VECS], const Staged* const (&rows)[ROWS], int64_t at, const uint32_t* weights) {
    Bits b[VECS];
    UNROLL for (int n = 0; n < VECS; n++) b[n] = simd::load_bits(weights + n * panel::STRIP_WORDS);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const Bits a = simd::broadcast_bits(rows[r][at]);
      UNROLL for (int n = 0; n < VECS; n++) acc[r][n] = simd::dot(acc[r][n], a, b[n]);
    }
  }
};

template <>
struct Arithmetic<Bf16> : Words {
  using Sum = Vec;

  static Sum start(const uint32_t*) { return simd::zero(); }
  static float stage(const uint16_t* input, int64_t depth, float*, Staged* out) {
    uint16_t* values = (uint16_t*)out;
    memcpy(values, input, depth * sizeof *values);
    memset(values + depth, 0, (panel::blocks_of<Bf16>(depth) * panel::DEPTH<Bf16> - depth) * sizeof *values);
    return 1.f;
  }
};

// One side of a product of bytes has no sign here: 128 is added to the rows, and what that adds to a sum is subtracted
// at its start.
template <>
struct Arithmetic<Int8> : Words {
  using Sum = Bits;

  static Sum start(const uint32_t* column_sums) {
    return simd::minus(simd::zero_bits(), simd::shift_left(simd::load_bits(column_sums), 7));
  }
  static float stage(const uint16_t* input, int64_t depth, float* scratch, Staged* out) {
    q4h::widen(input, depth, scratch);
    const float scale = int8::quantise(scratch, depth, (int8_t*)out, int8::BLOCK);
    const int64_t words = panel::blocks_of<Int8>(depth) * panel::WORDS;
    for (int64_t i = 0; i < words; i++) out[i] ^= 0x80808080u;
    return scale;
  }
};

#else

constexpr int MOST_ALONE = MOST_ROWS;
constexpr int strips_at_once(int rows) { return rows <= 2 ? 2 : 1; }

INLINE const uint32_t* strip_part(const uint32_t* weights, int vec) {
  return weights + vec / STRIP_VECS * panel::STRIP_WORDS + vec % STRIP_VECS * LANES;
}

// Rows are widened once: in the loop it would cost as much as the products.
template <>
struct Arithmetic<Bf16> {
  using Staged = float;
  using Sum = Vec;
  static constexpr int STAGED = 2;

  static Sum start(const uint32_t*) { return simd::zero(); }
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

template <>
struct Arithmetic<Int8> {
  using Staged = uint32_t;
  using Sum = Bits;
  static constexpr int STAGED = 1;

  static Sum start(const uint32_t*) { return simd::zero_bits(); }
  static float stage(const uint16_t* input, int64_t depth, float* scratch, Staged* out) {
    q4h::widen(input, depth, scratch);
    return int8::quantise(scratch, depth, (int8_t*)out, int8::BLOCK);
  }
  template <int ROWS, int VECS>
  INLINE void add(Sum (&acc)[ROWS][VECS], const Staged* const (&rows)[ROWS], int64_t at, const uint32_t* b) {
    Bits w[VECS];
    UNROLL for (int n = 0; n < VECS; n++) w[n] = simd::load_bits(strip_part(b, n));
    UNROLL for (int r = 0; r < ROWS; r++) {
      const Bits a = simd::broadcast_bits(rows[r][at]);
      UNROLL for (int n = 0; n < VECS; n++) acc[r][n] = simd::dot(acc[r][n], a, w[n]);
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

// The strips of a block as they are multiplied: where they lie, or unpacked.
template <class Format, int STRIPS>
struct Strips {
  static const uint32_t* of(const uint32_t* block, int strip) { return block + strip * panel::STRIP_WORDS; }
  static void fetch(const uint32_t* words) {
    UNROLL for (int n = 0; n < STRIPS; n++) {
      _mm_prefetch((const char*)(words + n * panel::STRIP_WORDS + panel::AHEAD * Format::BLOCK_WORDS), _MM_HINT_T0);
    }
  }
};

template <int STRIPS>
struct Strips<Int4, STRIPS> : int4::Unpacked<STRIPS> {
  static void fetch(const uint32_t*) {}
};

// Sums of ROWS rows over the strips from `strip` on of one panel.
template <class Format, int ROWS, int STRIPS>
static void multiply_strips(const Staged<Format>* first, int64_t blocks, const uint32_t* weights, int strip,
                            Sums& sums) {
  using Level = Arithmetic<typename Format::Rows>;
  constexpr int VECS = STRIPS * STRIP_VECS;
  const uint32_t* column_sums = weights + blocks * Format::BLOCK_WORDS + panel::COLUMNS + strip * panel::STRIP;
  const Staged<Format>* rows[ROWS];
  typename Level::Sum acc[ROWS][VECS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    rows[r] = first + r * blocks * STAGED_BLOCK<Format>;
    UNROLL for (int n = 0; n < VECS; n++) acc[r][n] = Level::start(column_sums + n * LANES);
  }
  Strips<Format, STRIPS> strips;
  for (int64_t block = 0; block < blocks; block++, weights += Format::BLOCK_WORDS) {
    const uint32_t* b = strips.of(weights, strip);
    for (int word = 0; word < panel::WORDS; word++, b += panel::STRIP) {
      strips.fetch(b);
      Level::add(acc, rows, (block * panel::WORDS + word) * Level::STAGED, b);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int n = 0; n < VECS; n++) simd::store(sums.at[r] + strip * panel::STRIP + n * LANES, acc[r][n]);
  }
}

template <class Format, int ROWS>
static void multiply_rows(const Staged<Format>* first, int64_t blocks, const uint32_t* weights, Sums& sums) {
  constexpr int STRIPS = strips_at_once(ROWS);
  for (int strip = 0; strip < panel::COLUMNS / panel::STRIP; strip += STRIPS) {
    multiply_strips<Format, ROWS, STRIPS>(first, blocks, weights, strip, sums);
  }
}

// How many of `rows` rows to multiply at once: as even as six registers of rows allow.
INLINE int64_t rows_at_once(int64_t rows) {
  if (rows <= MOST_ALONE) return rows;
  const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
  return (rows + groups - 1) / groups;
}

constexpr int64_t TOGETHER = 1;  // staged rows that are one piece of memory

// Copies a staged row to the place of another one.
template <class Format>
INLINE void copy_row(Staged<Format>* staged, int64_t from, int64_t to, int64_t blocks) {
  const int64_t values = blocks * STAGED_BLOCK<Format>;
  memcpy(staged + to * values, staged + from * values, values * sizeof *staged);
}

template <class Format>
using Product = void (*)(const Staged<Format>*, int64_t, const uint32_t*, Sums&);

template <class Format, int... N>
constexpr std::array<Product<Format>, sizeof...(N)> for_each_count(std::integer_sequence<int, N...>) {
  return {multiply_rows<Format, N + 1>...};
}

struct Registers {};  // of one thread; nothing to prepare

template <class Format>
INLINE void multiply(Registers&, const Staged<Format>* first, int64_t rows, int64_t blocks, const uint32_t* weights,
                     Sums& sums) {
  static constexpr auto BY_ROWS = for_each_count<Format>(std::make_integer_sequence<int, MOST_ALONE>());
  BY_ROWS[rows - 1](first, blocks, weights, sums);
}

}  // namespace dots
