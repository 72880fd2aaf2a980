// Rows times a panel in vector registers. An output is one lane of one register, which takes the depth from first to
// last whatever the number of rows or strips beside it.
#pragma once

#include <array>
#include <utility>

#include "panel.hpp"

namespace dots {

using panel::Sums;
using simd::Bits;
using simd::LANES;
using simd::Vec;

constexpr int MOST_ROWS = 6;
constexpr int STRIP_VECS = panel::STRIP / LANES;

#if defined(__AVX512BF16__)

using Staged = uint16_t;        // a pair of an input row is multiplied as one word
constexpr int MOST_ALONE = 12;  // rows of a call that are not cut into groups: its weights are read from memory once
constexpr int strips_at_once(int rows) { return rows <= MOST_ROWS ? 4 : 2; }

INLINE void stage_row(const uint16_t* input, int64_t row, int64_t depth, Staged* out) {
  const int64_t padded = panel::blocks_of(depth) * panel::DEPTH;
  out += row * padded;
  memcpy(out, input, depth * sizeof(uint16_t));
  memset(out + depth, 0, (padded - depth) * sizeof(uint16_t));
}

// acc += one pair of each row times `weights`, the same pair of STRIPS strips.
template <int ROWS, int STRIPS>
INLINE void add_pair(Vec (&acc)[ROWS][STRIPS], const Staged* const (&rows)[ROWS], int64_t at, const uint16_t* weights) {
  Bits b[STRIPS];
  UNROLL for (int n = 0; n < STRIPS; n++) b[n] = simd::load_bits(weights + n * panel::STRIP_VALUES);
  UNROLL for (int r = 0; r < ROWS; r++) {
    uint32_t pair;
    memcpy(&pair, rows[r] + at, sizeof pair);
    const Bits a = simd::broadcast_bits(pair);
    UNROLL for (int n = 0; n < STRIPS; n++) acc[r][n] = simd::dot(acc[r][n], a, b[n]);
  }
}

#else

using Staged = float;  // input rows are widened once: in the loop it would cost as much as the products
constexpr int MOST_ALONE = MOST_ROWS;
constexpr int strips_at_once(int rows) { return rows <= 2 ? 2 : 1; }

INLINE void stage_row(const uint16_t* input, int64_t row, int64_t depth, Staged* out) {
  const int64_t padded = panel::blocks_of(depth) * panel::DEPTH;
  out += row * padded;
  int64_t k = 0;
  for (; k + LANES <= depth; k += LANES) simd::store(out + k, simd::load_bf16(input + k));
  for (; k < padded; k++) {
    const uint32_t bits = k < depth ? (uint32_t)input[k] << 16 : 0;
    memcpy(out + k, &bits, sizeof bits);
  }
}

template <int ROWS, int VECS>
INLINE void add_pair(Vec (&acc)[ROWS][VECS], const Staged* const (&rows)[ROWS], int64_t at, const uint16_t* weights) {
  UNROLL for (int half = 0; half < 2; half++) {
    Vec b[VECS];
    UNROLL for (int n = 0; n < VECS; n++) {
      const Bits pairs = simd::load_bits(weights + n / 2 * panel::STRIP_VALUES + n % 2 * 2 * LANES);
      b[n] = half ? simd::seconds(pairs) : simd::firsts(pairs);
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      const Vec a = simd::broadcast(rows[r][at + half]);
      UNROLL for (int n = 0; n < VECS; n++) acc[r][n] = simd::fmadd(a, b[n], acc[r][n]);
    }
  }
}

#endif

// Sums of ROWS rows over the strips from `strip` on of one panel.
template <int ROWS, int STRIPS>
static void multiply_strips(const Staged* first, int64_t blocks, const uint16_t* weights, int strip, Sums& sums) {
  constexpr int VECS = STRIPS * STRIP_VECS;
  constexpr int AHEAD = 2 * panel::BLOCK_VALUES;
  const Staged* rows[ROWS];
  Vec acc[ROWS][VECS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    rows[r] = first + r * blocks * panel::DEPTH;
    UNROLL for (int n = 0; n < VECS; n++) acc[r][n] = simd::zero();
  }
  const uint16_t* b = weights + strip * panel::STRIP_VALUES;
  for (int64_t block = 0; block < blocks; block++, b += panel::BLOCK_VALUES) {
    for (int pair = 0; pair < panel::DEPTH / 2; pair++) {
      const uint16_t* at = b + pair * 2 * panel::STRIP;
      UNROLL for (int n = 0; n < STRIPS; n++) {
        _mm_prefetch((const char*)(at + n * panel::STRIP_VALUES + AHEAD), _MM_HINT_T0);
      }
      add_pair<ROWS, VECS>(acc, rows, block * panel::DEPTH + 2 * pair, at);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int n = 0; n < VECS; n++) simd::store(sums.at[r] + strip * panel::STRIP + n * LANES, acc[r][n]);
  }
}

template <int ROWS>
static void multiply_rows(const Staged* first, int64_t blocks, const uint16_t* weights, Sums& sums) {
  constexpr int STRIPS = strips_at_once(ROWS);
  for (int strip = 0; strip < panel::COLUMNS / panel::STRIP; strip += STRIPS) {
    multiply_strips<ROWS, STRIPS>(first, blocks, weights, strip, sums);
  }
}

// How many of `rows` rows to multiply at once: as even as six registers of rows allow.
INLINE int64_t rows_at_once(int64_t rows) {
  if (rows <= MOST_ALONE) return rows;
  const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
  return (rows + groups - 1) / groups;
}

using Product = void (*)(const Staged*, int64_t, const uint16_t*, Sums&);

template <int... N>
constexpr std::array<Product, sizeof...(N)> for_each_count(std::integer_sequence<int, N...>) {
  return {multiply_rows<N + 1>...};
}

struct Registers {};  // of one thread; nothing to prepare

INLINE void multiply(Registers&, const Staged* first, int64_t rows, int64_t blocks, const uint16_t* weights,
                     Sums& sums) {
  static constexpr auto BY_ROWS = for_each_count(std::make_integer_sequence<int, MOST_ALONE>());
  BY_ROWS[rows - 1](first, blocks, weights, sums);
}

}  // namespace dots
