// A segment for products in the tiles of AMX: K and V of one head as numbers, unpacked from the blocks into work memory
// that stays in the L2 cache.
//
// A number of Q4H, level times scale, has at most eight significant bits, so it is exact in bf16, and scores and sums
// need no scales. Rows and columns that nobody has hold finite numbers, and nothing reads their products.
//
//     K   [16 tokens][pair of dimensions][token]      words of two dimensions: 16 pairs are a tile
//     V   [16 token pairs][tile][pair][dimension]     words of two tokens
#pragma once

#include "fetching.hpp"
#include "rekindle.h"
#include "scales.hpp"

namespace tiled {

using scales::numbers;
using simd::Bits;
using simd::Vec;
using softmax::TOKENS;

constexpr int SIDE = 16;  // rows and columns of a tile, and its pairs
constexpr int TILE_WORDS = SIDE * SIDE;
constexpr int MOST_ROWS = 2 * SIDE;
constexpr int COLUMNS = 4;  // tiles beside each other that are multiplied at once
constexpr int WORDS = 8;    // that are read of a token at once
constexpr int ROW_BYTES = SIDE * 4;

// How K and V of a layer lie in the segment.
struct Shape {
  int k_dim, k_tiles;  // the depth of scores
  int v_tiles;         // dimensions, a multiple of COLUMNS
  bool v_coded;
  int entries = 1;  // of weights for each token pair

  explicit Shape(const rk_layer& layer) {
    const int words = (int)layer.v_dim / q4h::WORD_CODES;
    k_dim = (int)layer.k_dim, k_tiles = (k_dim + 2 * SIDE - 1) / (2 * SIDE);
    v_coded = layer.v_format == RK_Q4H;
    const int chunks =
        v_coded ? (words + WORDS - 1) / WORDS : ((int)layer.v_dim + COLUMNS * SIDE - 1) / (COLUMNS * SIDE);
    v_tiles = chunks * COLUMNS;
  }

  int64_t sum_floats() const { return (int64_t)v_tiles * SIDE; }
  int64_t k_words() const { return (int64_t)TOKENS / SIDE * k_tiles * TILE_WORDS; }
  int64_t v_words() const { return (int64_t)TOKENS / (2 * SIDE) * v_tiles * TILE_WORDS; }
  int64_t k_steps() const { return (int64_t)(k_dim + q4h::K_GROUP - 1) / q4h::K_GROUP * TOKENS; }
  int64_t v_steps() const { return 0; }
  int64_t query_words() const { return (int64_t)MOST_ROWS * k_tiles * SIDE; }
};

// Work memory of one thread for one layer.
struct Segment {
  uint32_t* k;
  float* k_steps;  // [k_dim / 16][TOKENS]
  uint32_t* v;
  float* v_steps;
  uint32_t* queries;  // [MOST_ROWS][k_tiles][SIDE]
};

// The tile registers of one thread: all of them whole.
class Registers {
 public:
  Registers() {
    struct {
      uint8_t palette, start, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } config = {1, 0, {}, {}, {}};
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = ROW_BYTES, config.rows[tile] = SIDE;
    simd::load_tile_config(&config);
  }
  Registers(const Registers&) = delete;
  ~Registers() { _tile_release(); }
};

// K of one block's head, `count` tokens, from token `first` of the segment on.
inline void unpack_k(const rk_layer& layer, const uint8_t* block, int64_t head, int first, int count,
                     const Shape& shape, Segment& m) {
  const bool coded = layer.k_format == RK_Q4H;
  const int row = coded ? shape.k_dim / q4h::WORD_CODES : shape.k_dim / 2;  // words
  if (coded) {
    const int groups = shape.k_dim / q4h::K_GROUP;
    const uint8_t* bytes = block + layer.k_scales + head * layer.block_tokens * groups;
    scales::unpack(bytes, groups, count, m.k_steps + first);
  }
  const uint8_t* from = block + layer.k + head * layer.block_tokens * row * 4;
  for (int t = 0; t < count; t += SIDE) {
    uint32_t* to = m.k + (int64_t)(first + t) / SIDE * shape.k_tiles * TILE_WORDS;
    for (int word = 0; word < row; word += WORDS) {
      Bits words[WORDS];
      simd::load_transposed(from + ((int64_t)t * row + word) * 4, row * 4, words);
      const int end = row - word < WORDS ? row - word : WORDS;
      for (int w = 0; w < end; w++) {
        const int at = word + w;
        if (!coded) {
          simd::store_bits(to + at * SIDE, words[w]);
          continue;
        }
        const Vec step = simd::load(m.k_steps + at * q4h::WORD_CODES / q4h::K_GROUP * TOKENS + first + t);
        UNROLL for (int j = 0; j < 4; j++) {
          const Bits pairs = simd::levels(simd::shift_right(words[w], 4 * j));
          simd::store_bits(to + (at * 4 + j) * SIDE, numbers(pairs, step, step));
        }
      }
    }
  }
}

// Up to eight words of two tokens: lanes 0 to 7 are the low halves of each word, 8 to 15 the high ones.
INLINE Bits load_pair(const uint8_t* one, const uint8_t* other) {
  const __m256i a = _mm256_loadu_si256((const __m256i*)one), b = _mm256_loadu_si256((const __m256i*)other);
  const __m256i low = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
  const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// The steps of those lanes, from the bytes of the scales that eight words have.
INLINE Vec load_steps(const uint8_t* bytes, int count, Bits shifts) {
  uint32_t word = 0;
  memcpy(&word, bytes, count);
  return q4h::steps_of(simd::both(_mm512_srlv_epi32(simd::broadcast_bits(word), shifts), simd::broadcast_bits(255)));
}

// V of one block's head, `count` tokens, from token `first` of the segment on.
inline void unpack_v(const rk_layer& layer, const uint8_t* block, int64_t head, int first, int count,
                     const Shape& shape, Segment& m) {
  const int dim = (int)layer.v_dim, row = dim / q4h::WORD_CODES;
  const int words_of_scale = q4h::v_group(dim) / q4h::WORD_CODES, groups = row / words_of_scale;
  const uint8_t* codes = block + layer.v + head * layer.block_tokens * row * 4;
  const uint8_t* bytes = block + layer.v_scales + head * layer.block_tokens * groups;
  alignas(64) uint32_t counts[SIDE];
  for (int lane = 0; lane < SIDE; lane++) counts[lane] = lane % WORDS / words_of_scale * 8;
  const Bits shifts = simd::load_bits(counts);
  for (int t = 0; t < count; t += 2) {
    const int pair = (first + t) / 2;
    uint32_t* to = m.v + (int64_t)pair / SIDE * shape.v_tiles * TILE_WORDS + pair % SIDE * SIDE;
    for (int word = 0; word < row; word += WORDS) {
      const uint8_t* one = codes + ((int64_t)t * row + word) * 4;
      const Bits words = load_pair(one, one + row * 4);
      const int group = word / words_of_scale, left = groups - group, most = WORDS / words_of_scale;
      const uint8_t* scale = bytes + t * groups + group;
      const Vec step = load_steps(scale, left < most ? left : most, shifts);
      const Vec next = load_steps(scale + groups, left < most ? left : most, shifts);
      UNROLL for (int j = 0; j < 4; j++) {
        const Bits pairs = simd::levels(simd::shift_right(words, 4 * j));
        simd::store_bits(to + (int64_t)(word / WORDS * 4 + j) * TILE_WORDS, numbers(pairs, step, next));
      }
    }
  }
}

inline void copy_v(const rk_layer& layer, const uint8_t* block, int64_t head, int first, int count, const Shape& shape,
                   Segment& m) {
  const int dim = (int)layer.v_dim;
  const uint16_t* from = (const uint16_t*)(block + layer.v) + head * layer.block_tokens * dim;
  for (int t = 0; t < count; t += 2, from += 2 * dim) {
    const int pair = (first + t) / 2;
    uint32_t* to = m.v + (int64_t)pair / SIDE * shape.v_tiles * TILE_WORDS + pair % SIDE * SIDE;
    for (int d = 0; d < dim; d++)
      to[(int64_t)d / SIDE * TILE_WORDS + d % SIDE] = from[d] | (uint32_t)from[dim + d] << 16;
  }
}

// Tokens first .. first + count of a sequence; `first` is a multiple of TOKENS.
inline void unpack(const rk_layer& layer, const int32_t* blocks, int64_t first, int count, int64_t head,
                   const Shape& shape, Segment& m) {
  const int size = (int)layer.block_tokens;
  for (int t = 0; t < count; t += size) {
    const int32_t* number = blocks + (first + t) / size;
    const uint8_t* block = layer.blocks + *number * layer.block_bytes;
    if (t + size < count) fetching::fetch_head(layer, number[1], head);
    unpack_k(layer, block, head, t, size, shape, m);
    (shape.v_coded ? unpack_v : copy_v)(layer, block, head, t, size, shape, m);
  }
}

// Operands of a product: 32 values of depth a step. Distances are in words.
struct Product {
  const uint32_t* rows;  // [row][step][SIDE]
  int64_t row;
  const uint32_t* tiles;  // of column c and step s at c * column + s * step
  int64_t column, step;
  int steps;
  float* out;
  int64_t out_row;
};

// 16 rows times COUNT columns of tiles, 2 or 4; `before` is called before each step.
template <int COUNT, typename Before>
INLINE void multiply_one(const Product& p, int column, Before before) {
  const uint32_t* b = p.tiles + column * p.column;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (COUNT == 4) _tile_zero(2);
  if constexpr (COUNT == 4) _tile_zero(3);
  for (int step = 0; step < p.steps; step++, b += p.step) {
    before(step);
    simd::fence();
    _tile_loadd(4, p.rows + step * SIDE, p.row * 4);
    _tile_loadd(6, b, ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + p.column, ROW_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (COUNT == 4) {
      _tile_loadd(6, b + 2 * p.column, ROW_BYTES);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, b + 3 * p.column, ROW_BYTES);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  float* out = p.out + column * SIDE;
  _tile_stored(0, out, p.out_row * 4);
  _tile_stored(1, out + SIDE, p.out_row * 4);
  if constexpr (COUNT == 4) _tile_stored(2, out + 2 * SIDE, p.out_row * 4);
  if constexpr (COUNT == 4) _tile_stored(3, out + 3 * SIDE, p.out_row * 4);
  simd::fence();
}

template <int COUNT>
INLINE void multiply_one(const Product& p, int column) {
  multiply_one<COUNT>(p, column, [](int) {});
}

// 32 rows times two columns of tiles.
INLINE void multiply_two(const Product& p, int column) {
  const uint32_t* b = p.tiles + column * p.column;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  simd::fence();
  for (int step = 0; step < p.steps; step++, b += p.step) {
    _tile_loadd(6, b, ROW_BYTES);
    _tile_loadd(4, p.rows + step * SIDE, p.row * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + p.column, ROW_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, p.rows + SIDE * p.row + step * SIDE, p.row * 4);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  float* out = p.out + column * SIDE;
  _tile_stored(0, out, p.out_row * 4);
  _tile_stored(1, out + SIDE, p.out_row * 4);
  _tile_stored(2, out + SIDE * p.out_row, p.out_row * 4);
  _tile_stored(3, out + SIDE * p.out_row + SIDE, p.out_row * 4);
  simd::fence();
}

// Caps and masks the scores of `columns` columns of tiles, while they are in the L1 cache.
INLINE void settle(const softmax::Rows& rows, int column, int columns, Vec* most) {
  for (int r = 0; r < rows.count; r++) {
    float* scores = rows.scores + r * softmax::SCORE_ROW;
    for (int t = column * SIDE; t < (column + columns) * SIDE; t += softmax::STEP) {
      softmax::settle(scores, t, rows.seen[r], rows.cap, most[r]);
    }
  }
}

// Scores of all rows, and the largest of each in the lanes of `most`.
inline void score(const Segment& m, const Shape& shape, const softmax::Rows& rows, Vec* most) {
  const int64_t row = (int64_t)shape.k_tiles * SIDE;
  for (int r = 0; r < rows.count; r++) {
    memcpy(m.queries + r * row, rows.q[r], shape.k_dim * sizeof(uint16_t));
    most[r] = simd::broadcast(-INFINITY);
  }
  const Product product = {m.queries,  row,           m.k,         shape.k_tiles * (int64_t)TILE_WORDS,
                           TILE_WORDS, shape.k_tiles, rows.scores, softmax::SCORE_ROW};
  const int columns = rows.tokens / SIDE;  // even
  int column = 0;
  if (rows.count > SIDE) {
    for (; column < columns; column += 2) {
      multiply_two(product, column);
      settle(rows, column, 2, most);
    }
    return;
  }
  for (; column + COLUMNS <= columns; column += COLUMNS) {
    multiply_one<COLUMNS>(product, column);
    settle(rows, column, COLUMNS, most);
  }
  if (column == columns) return;
  multiply_one<2>(product, column);
  settle(rows, column, 2, most);
}

// Sums of rows first .. first + 16. Each step's weights are computed right before its products, which take their time
// in another unit of the processor.
inline void add_values(const Segment& m, const Shape& shape, const softmax::Rows& rows, int first, const Vec* most) {
  const int64_t row = softmax::weight_row(1);
  uint32_t* weights = rows.weights + first * row;
  const int count = rows.count - first < SIDE ? rows.count - first : SIDE;
  alignas(64) Vec largest[SIDE], sum[SIDE];
  for (int r = 0; r < count; r++) {
    rows.mass[first + r].largest = softmax::largest_of(most[first + r]);
    largest[r] = simd::broadcast(rows.mass[first + r].largest), sum[r] = simd::zero();
    if (!rows.seen[first + r].any()) memset(weights + r * row, 0, rows.tokens / 2 * sizeof *weights);
  }
  const Product product = {weights,
                           row,
                           m.v,
                           TILE_WORDS,
                           shape.v_tiles * (int64_t)TILE_WORDS,
                           rows.tokens / (2 * SIDE),
                           rows.sums + first * shape.sum_floats(),
                           shape.sum_floats()};
  const auto weigh = [&](int step) {
    if (step == product.steps) return;
    for (int r = 0; r < count; r++) {
      if (!rows.seen[first + r].any()) continue;
      const float* scores = rows.scores + (first + r) * softmax::SCORE_ROW;
      softmax::weigh_step<1>(scores, step * 2 * SIDE, largest[r], {1, 0, nullptr}, weights + r * row, sum[r]);
    }
  };
  weigh(0);
  multiply_one<COLUMNS>(product, 0, [&](int step) { weigh(step + 1); });
  for (int column = COLUMNS; column < shape.v_tiles; column += COLUMNS) multiply_one<COLUMNS>(product, column);
  for (int r = 0; r < count; r++) rows.mass[first + r].sum = simd::sum(sum[r]);
}

// Attends with a few rows to an unpacked segment.
inline void attend(const Segment& m, const Shape& shape, const softmax::Rows& rows) {
  alignas(64) Vec most[MOST_ROWS];
  score(m, shape, rows, most);
  for (int first = 0; first < rows.count; first += SIDE) add_values(m, shape, rows, first, most);
}

// A row's sums in the order of dimensions, times a factor.
inline void gather(const rk_layer& layer, const Shape& shape, const float* sums, float factor, float* out) {
  for (int d = 0; d < layer.v_dim; d++) {
    const int word = d / q4h::WORD_CODES, code = d % q4h::WORD_CODES;
    const int at = (word / WORDS * 4 + code / 2) * SIDE + code % 2 * WORDS + word % WORDS;
    out[d] = sums[shape.v_coded ? at : d] * factor;
  }
}

}  // namespace tiled
