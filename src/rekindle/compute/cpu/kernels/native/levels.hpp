// A segment for products in vectors: K and V of one head as levels, unpacked from the blocks into work memory that
// stays in the L2 cache.
//
// Levels are bf16 numbers: the odd numbers -15 to 15 of Q4H, whose scales are applied to scores and weights, or the
// values of Q8H and of the native format. Tokens that nobody has hold finite numbers and have weight zero. Of a latent layer they
// are numbers, levels times their scales, which are exact in bf16: many rows share each segment.
//
//     K   [pair of dimensions][token]               words of two levels; a scale for each 16 dimensions and token
//     V   [group of token pairs][vector][lane]      words of the levels of two tokens; see `Shape`
#pragma once

#include <array>
#include <utility>

#include "fetching.hpp"
#include "q8h.hpp"
#include "rekindle.h"
#include "scales.hpp"

namespace levels {

using scales::power_of_two;
using simd::Bits;
using simd::LANES;
using simd::Vec;
using softmax::TOKENS;

constexpr int WORDS = 8;         // that `load_transposed` reads of a token
constexpr int PART = LANES / 4;  // vectors of V that are summed at once
constexpr int MOST_ROWS = simd::REGISTERS == 32 ? 6 : 4;
constexpr int TOKEN_VECS = simd::REGISTERS == 32 ? 2 : 1;  // of tokens, at once

struct Registers {};  // of one thread; nothing to prepare

// How K and V of a layer lie in the segment, and what weights V takes.
//
// A lane of V holds a dimension of a token pair. In Q4H a word of a token has eight dimensions, so eight vectors (a
// chunk) have those of LANES words; where a token has fewer words, LANES / `lanes` pairs share a vector. Lanes of one
// pair and one scale take the same weight: an entry, of which each token pair has `entries`.
struct Shape {
  int k_pairs;  // of dimensions
  bool k_scaled;
  bool v_coded;      // in the order in which words unpack
  int pairs;         // of tokens in a vector of V
  int lanes;         // of each pair
  int vectors;       // of a group of pairs, a multiple of PART
  int entries;       // of a token pair, a power of two: its scales, and zeros
  int v_scales;      // of a token; 0: no scales
  int lanes_of_one;  // that take the same entry

  explicit Shape(const rk_layer& layer) {
    k_pairs = (int)q4h::query_dim(layer) / 2, k_scaled = layer.k_format == RK_Q4H && !layer.latent;
    v_coded = q4h::output_format(layer) == RK_Q4H;
    const int dim = (int)q4h::output_dim(layer), words = dim / q4h::WORD_CODES;
    if (layer.latent || !v_coded) {
      pairs = 1, lanes = LANES, entries = 1, v_scales = 0, lanes_of_one = LANES;
      const int chunks = (words + LANES - 1) / LANES;
      vectors = v_coded ? chunks * WORDS : (dim + PART * LANES - 1) / (PART * LANES) * PART;
      return;
    }
    lanes = power_of_two(words < LANES ? words : LANES);
    pairs = LANES / lanes;
    const int chunks = power_of_two((words + LANES - 1) / LANES);
    vectors = chunks * WORDS;
    v_scales = dim / q4h::v_group(dim);
    lanes_of_one = q4h::v_group(dim) / q4h::WORD_CODES;
    entries = chunks * lanes / lanes_of_one;
  }

  int64_t sum_floats() const { return (int64_t)vectors * LANES; }  // of one row's sums of V
  int64_t k_words() const { return (int64_t)k_pairs * TOKENS; }
  int64_t v_words() const { return (int64_t)TOKENS / 2 / pairs * sum_floats(); }
  int64_t k_steps() const { return (int64_t)(2 * k_pairs + q4h::K_GROUP - 1) / q4h::K_GROUP * TOKENS; }
  int64_t v_steps() const { return (int64_t)v_scales * TOKENS; }
  int64_t query_words() const { return 0; }
};

// Work memory of one thread for one layer.
struct Segment {
  uint32_t* k;     // [query_dim / 2][TOKENS]
  float* k_steps;  // [k_dim / 16][TOKENS]
  uint32_t* v;     // [TOKENS / 2 / pairs][vectors][LANES]
  float* v_steps;  // [v_scales][TOKENS]
  uint32_t* queries;
};

// Bf16 values of one block's head as rows of `m.k` from `pair` on, `count` tokens from token `first` of the segment on.
inline void copy_k(const uint8_t* from, int dim, int pair, int first, int count, Segment& m) {
  const int row = dim / 2;  // words
  for (int t = 0; t < count; t += LANES) {
    for (int word = 0; word < row; word += WORDS) {
      Bits words[WORDS];
      simd::load_transposed(from + ((int64_t)t * row + word) * 4, row * 4, words);
      const int end = row - word < WORDS ? row - word : WORDS;
      for (int w = 0; w < end; w++) simd::store_bits(m.k + (int64_t)(pair + word + w) * TOKENS + first + t, words[w]);
    }
  }
}

// Values in Q8H of LANES tokens of one head, from row `row` of a section on, as bf16.
struct Decoded {
  alignas(64) uint16_t values[LANES * q4h::MOST_DIMS];

  Decoded(const uint8_t* codes, const uint8_t* scales, int dim, int64_t row) {
    const int groups = dim / q8h::group_of(dim);
    for (int t = 0; t < LANES; t++, row++) q8h::decode(codes + row * dim, scales + row * groups, dim, values + t * dim);
  }
};

// K of one block's head in Q8H, as `copy_k`.
inline void decode_k(const rk_layer& layer, const uint8_t* block, int64_t head, int first, int count, Segment& m) {
  const int dim = (int)layer.k_dim;
  for (int t = 0; t < count; t += LANES) {
    const Decoded decoded(block + layer.k, block + layer.k_scales, dim, head * layer.block_tokens + t);
    copy_k((const uint8_t*)decoded.values, dim, 0, first + t, LANES, m);
  }
}

// K of one block's head, `count` tokens, into column `first` of the segment.
inline void unpack_k(const rk_layer& layer, const uint8_t* block, int64_t head, int first, int count, Segment& m) {
  const int dim = (int)layer.k_dim, row = dim / q4h::WORD_CODES;  // words
  if (layer.k_format == RK_BF16) {
    copy_k(block + layer.k + head * layer.block_tokens * dim * 2, dim, 0, first, count, m);
    return;
  }
  if (layer.k_format == RK_Q8H) return decode_k(layer, block, head, first, count, m);
  const uint8_t* from = block + layer.k + head * layer.block_tokens * row * 4;
  for (int t = 0; t < count; t += LANES) {
    for (int word = 0; word < row; word += WORDS) {
      Bits words[WORDS];
      simd::load_transposed(from + ((int64_t)t * row + word) * 4, row * 4, words);
      const int end = row - word < WORDS ? row - word : WORDS;
      uint32_t* to = m.k + first + t;
      for (int w = 0; w < end; w++) {
        UNROLL for (int j = 0; j < 4; j++) {
          const Bits pair = simd::levels(simd::shift_right(words[w], 4 * j));
          simd::store_bits(to + ((int64_t)(word + w) * 4 + j) * TOKENS, pair);
        }
      }
    }
  }
  const int groups = dim / q4h::K_GROUP;
  scales::unpack(block + layer.k_scales + head * layer.block_tokens * groups, groups, count, m.k_steps + first);
}

// `count` words of every other token, those of PAIRS tokens side by side.
template <int PAIRS>
INLINE Bits load_every_other(const uint8_t* from, int row, int count) {
  constexpr int LANES_OF_PAIR = LANES / PAIRS, BYTES = LANES_OF_PAIR * 4;
  alignas(64) uint32_t words[LANES] = {};
  for (int p = 0; p < PAIRS; p++, from += 8 * row) {
    if (count == LANES_OF_PAIR) {
      memcpy(words + p * LANES_OF_PAIR, from, BYTES);
    } else {
      memcpy(words + p * LANES_OF_PAIR, from, count * 4);
    }
  }
  return simd::load_bits(words);
}

INLINE Bits load_every_other(const uint8_t* from, int row, int count, int pairs) {
  if (pairs == 1) return count == LANES ? simd::load_bits(from) : load_every_other<1>(from, row, count);
  if (pairs == 2) return load_every_other<2>(from, row, count);
  return pairs == 4 ? load_every_other<4>(from, row, count) : load_every_other<LANES / 2>(from, row, count);
}

// Words of both tokens of LANES / lanes pairs: the dimensions in their low halves, and those in the high ones.
INLINE void load_pairs(const uint8_t* from, int row, int word, const Shape& shape, Bits& low, Bits& high) {
  const int count = row - word < shape.lanes ? row - word : shape.lanes;
  const Bits a = load_every_other(from + 4 * word, row, count, shape.pairs);
  const Bits b = load_every_other(from + 4 * (word + row), row, count, shape.pairs);
  const Bits lows = simd::broadcast_bits(0xffff);
  low = simd::either(simd::both(a, lows), simd::shift_left(b, 16));
  high = simd::either(simd::shift_right(a, 16), simd::both(b, simd::broadcast_bits(0xffff0000u)));
}

inline void unpack_v_codes(const uint8_t* from, int dim, int count, const Shape& shape, uint32_t* to) {
  const int row = dim / q4h::WORD_CODES;
  for (int t = 0; t < count; t += 2 * shape.pairs, to += (int64_t)shape.vectors * LANES) {
    for (int chunk = 0; chunk * WORDS < shape.vectors; chunk++) {
      uint32_t* out = to + (int64_t)chunk * WORDS * LANES;
      if (chunk * LANES >= row) {
        memset(out, 0, WORDS * LANES * sizeof *out);
        continue;
      }
      Bits low, high;
      load_pairs(from + (int64_t)t * row * 4, row, chunk * LANES, shape, low, high);
      UNROLL for (int j = 0; j < 4; j++) {
        simd::store_bits(out + 2 * j * LANES, simd::levels(simd::shift_right(low, 4 * j)));
        simd::store_bits(out + (2 * j + 1) * LANES, simd::levels(simd::shift_right(high, 4 * j)));
      }
    }
  }
}

inline void copy_v(const uint16_t* from, int dim, int count, const Shape& shape, uint32_t* to) {
  for (int t = 0; t < count; t += 2, from += 2 * dim) {
    for (int vector = 0; vector < shape.vectors; vector++, to += LANES) {
      alignas(64) uint16_t one[LANES] = {}, other[LANES] = {};
      const int first = vector * LANES, left = dim - first < LANES ? dim - first : LANES;
      if (left > 0) {
        memcpy(one, from + first, left * sizeof *one);
        memcpy(other, from + dim + first, left * sizeof *other);
      }
      const Bits low = simd::shift_right(simd::as_bits(simd::load_bf16(one)), 16);
      simd::store_bits(to, simd::either(low, simd::as_bits(simd::load_bf16(other))));
    }
  }
}

// Vectors in Q8H of one head, from row `row` of a section on, as `copy_v`.
inline void decode_v(const uint8_t* codes, const uint8_t* scales, int dim, int64_t row, int count, const Shape& shape,
                     uint32_t* to) {
  for (int t = 0; t < count; t += LANES, to += LANES / 2 * shape.sum_floats()) {
    const Decoded decoded(codes, scales, dim, row + t);
    copy_v(decoded.values, dim, LANES, shape, to);
  }
}

// V of one block's head, `count` tokens, from token `first` of the segment on.
inline void unpack_v(const rk_layer& layer, const uint8_t* block, int64_t head, int first, int count,
                     const Shape& shape, Segment& m) {
  const int dim = (int)layer.v_dim;
  uint32_t* to = m.v + (int64_t)first / 2 / shape.pairs * shape.vectors * LANES;
  const int64_t row = head * layer.block_tokens;
  if (layer.v_format == RK_BF16) {
    copy_v((const uint16_t*)(block + layer.v) + row * dim, dim, count, shape, to);
    return;
  }
  if (layer.v_format == RK_Q8H) return decode_v(block + layer.v, block + layer.v_scales, dim, row, count, shape, to);
  unpack_v_codes(block + layer.v + row * (dim / 2), dim, count, shape, to);
  scales::unpack(block + layer.v_scales + row * shape.v_scales, shape.v_scales, count, m.v_steps + first);
}

// Replaces the levels of a segment's K by numbers.
inline void scale_k(int dim, int first, int count, Segment& m) {
  for (int pair = 0; pair < dim / 2; pair++) {
    uint32_t* words = m.k + (int64_t)pair * TOKENS + first;
    const float* steps = m.k_steps + (int64_t)pair / (q4h::K_GROUP / 2) * TOKENS + first;
    for (int t = 0; t < count; t += LANES) {
      const Vec step = simd::load(steps + t);
      simd::store_bits(words + t, scales::numbers(simd::load_bits(words + t), step, step));
    }
  }
}

// The steps of LANES words of a token, `count` of which there are, from the bytes of its scales.
INLINE Vec steps_of_words(const uint8_t* bytes, int word, int count) {
  alignas(64) uint32_t of_words[LANES] = {};
  for (int i = 0; i < LANES && i < count; i++) of_words[i] = bytes[(word + i) * q4h::WORD_CODES / q4h::K_GROUP];
  return q4h::steps_of(simd::load_bits(of_words));
}

// Latents of one block as numbers of V: words of two tokens, in the order in which codes unpack.
inline void unpack_latents(const uint8_t* codes, const uint8_t* bytes, int dim, int count, const Shape& shape,
                           uint32_t* to) {
  const int row = dim / q4h::WORD_CODES, groups = dim / q4h::K_GROUP;
  for (int t = 0; t < count; t += 2) {
    for (int word = 0; word < row; word += LANES, to += WORDS * LANES) {
      Bits low, high;
      load_pairs(codes + (int64_t)t * row * 4, row, word, shape, low, high);
      const Vec step = steps_of_words(bytes + t * groups, word, row - word);
      const Vec next = steps_of_words(bytes + (t + 1) * groups, word, row - word);
      UNROLL for (int j = 0; j < 4; j++) {
        const Bits even = simd::levels(simd::shift_right(low, 4 * j)), odd = simd::levels(simd::shift_right(high, 4 * j));
        simd::store_bits(to + 2 * j * LANES, scales::numbers(even, step, next));
        simd::store_bits(to + (2 * j + 1) * LANES, scales::numbers(odd, step, next));
      }
    }
  }
}

// A latent layer's block, `count` tokens, from token `first` of the segment on.
inline void unpack_latent(const rk_layer& layer, const uint8_t* block, int64_t head, int first, int count,
                          const Shape& shape, Segment& m) {
  const int dim = (int)layer.k_dim, groups = dim / q4h::K_GROUP;
  const int64_t row = head * layer.block_tokens;
  uint32_t* v = m.v + (int64_t)first / 2 * shape.vectors * LANES;
  if (layer.k_format == RK_Q4H) {
    const uint8_t* bytes = block + layer.k_scales + row * groups;
    unpack_k(layer, block, head, first, count, m);
    scale_k(dim, first, count, m);
    unpack_latents(block + layer.k + row * (dim / 2), bytes, dim, count, shape, v);
  } else if (layer.k_format == RK_Q8H) {
    decode_k(layer, block, head, first, count, m);
    decode_v(block + layer.k, block + layer.k_scales, dim, row, count, shape, v);
  } else {
    copy_k(block + layer.k + row * dim * 2, dim, 0, first, count, m);
    copy_v((const uint16_t*)(block + layer.k) + row * dim, dim, count, shape, v);
  }
  copy_k(block + layer.v + row * layer.v_dim * 2, (int)layer.v_dim, dim / 2, first, count, m);
}

// Tokens first .. first + count of a sequence; `first` is a multiple of TOKENS.
inline void unpack(const rk_layer& layer, const int32_t* blocks, int64_t first, int count, int64_t head,
                   const Shape& shape, Segment& m) {
  const int size = (int)layer.block_tokens;
  for (int t = 0; t < count; t += size) {
    const int32_t* number = blocks + (first + t) / size;
    const uint8_t* block = layer.blocks + *number * layer.block_bytes;
    if (t + size < count) fetching::fetch_head(layer, number[1], head);
    if (layer.latent) {
      unpack_latent(layer, block, head, t, size, shape, m);
      continue;
    }
    unpack_k(layer, block, head, t, size, m);
    unpack_v(layer, block, head, t, size, shape, m);
  }
}

// out[r][t] = q[r] . k[t], in words of two dimensions; SCALED: with a scale for each 16 dimensions and token.
template <int ROWS, bool SCALED>
static void score_rows(const uint32_t* const* q, const Segment& m, int pairs, int tokens, float* out) {
  constexpr int GROUP = q4h::K_GROUP / 2;
  const int group = SCALED ? GROUP : pairs;
  for (int t = 0; t < tokens; t += TOKEN_VECS * LANES) {
    Vec total[ROWS][TOKEN_VECS];
    UNROLL for (int r = 0; r < ROWS; r++) { UNROLL for (int n = 0; n < TOKEN_VECS; n++) total[r][n] = simd::zero(); }
    for (int first = 0; first < pairs; first += group) {
      Vec dot[ROWS][TOKEN_VECS];
      UNROLL for (int r = 0; r < ROWS; r++) { UNROLL for (int n = 0; n < TOKEN_VECS; n++) dot[r][n] = simd::zero(); }
      for (int p = first; p < first + group; p++) {
        Bits k[TOKEN_VECS];
        UNROLL for (int n = 0; n < TOKEN_VECS; n++) k[n] = simd::load_bits(m.k + (int64_t)p * TOKENS + t + n * LANES);
        UNROLL for (int r = 0; r < ROWS; r++) {
          const Bits x = simd::broadcast_bits(q[r][p]);
          UNROLL for (int n = 0; n < TOKEN_VECS; n++) dot[r][n] = simd::dot(dot[r][n], x, k[n]);
        }
      }
      UNROLL for (int n = 0; n < TOKEN_VECS; n++) {
        const float* steps = m.k_steps + (int64_t)first / GROUP * TOKENS + t + n * LANES;
        const Vec step = SCALED ? simd::load(steps) : simd::broadcast(1.f);
        UNROLL for (int r = 0; r < ROWS; r++) total[r][n] = simd::fmadd(dot[r][n], step, total[r][n]);
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      UNROLL for (int n = 0; n < TOKEN_VECS; n++)
          simd::store(out + r * softmax::SCORE_ROW + t + n * LANES, total[r][n]);
    }
  }
}

// out[r] = weights[r] . v: PART vectors from `vector` on. `strides` is the distance of rows of weights, in words.
template <int ROWS>
static void add_part(const uint32_t* weights, int64_t stride, const Segment& m, const Shape& shape, int tokens,
                     int vector, float* out) {
  const int per_group = shape.pairs * shape.entries, entry = vector / WORDS * (LANES / shape.lanes_of_one);
  alignas(64) int32_t lanes[LANES];
  for (int i = 0; i < LANES; i++) lanes[i] = i / shape.lanes_of_one;
  const Bits index = simd::load_bits(lanes);
  Vec acc[ROWS][PART];
  UNROLL for (int r = 0; r < ROWS; r++) { UNROLL for (int n = 0; n < PART; n++) acc[r][n] = simd::zero(); }
  const uint32_t* v = m.v + vector * LANES;
  const uint32_t* w = weights + (shape.v_scales == 0 ? 0 : entry);
  for (int group = 0; group < tokens / 2 / shape.pairs; group++, v += shape.vectors * LANES, w += per_group) {
    Bits level[PART];
    UNROLL for (int n = 0; n < PART; n++) level[n] = simd::load_bits(v + n * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const Bits x = simd::pick(index, simd::load_bits(w + r * stride));
      UNROLL for (int n = 0; n < PART; n++) acc[r][n] = simd::dot(acc[r][n], level[n], x);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int n = 0; n < PART; n++)
        simd::store(out + ((int64_t)r * shape.vectors + vector + n) * LANES, acc[r][n]);
  }
}

using Score = void (*)(const uint32_t* const*, const Segment&, int, int, float*);
using AddPart = void (*)(const uint32_t*, int64_t, const Segment&, const Shape&, int, int, float*);

template <bool SCALED, int... N>
constexpr std::array<Score, sizeof...(N)> scores_of(std::integer_sequence<int, N...>) {
  return {score_rows<N + 1, SCALED>...};
}

template <int... N>
constexpr std::array<AddPart, sizeof...(N)> parts_of(std::integer_sequence<int, N...>) {
  return {add_part<N + 1>...};
}

// Scores of all rows.
inline void score(const Segment& m, const Shape& shape, const softmax::Rows& rows) {
  static constexpr auto COUNTS = std::make_integer_sequence<int, MOST_ROWS>();
  static constexpr auto SCALED = scores_of<true>(COUNTS), PLAIN = scores_of<false>(COUNTS);
  const Score product = (shape.k_scaled ? SCALED : PLAIN)[rows.count - 1];
  product((const uint32_t* const*)rows.q, m, shape.k_pairs, rows.tokens, rows.scores);
}

// Sums of all rows from their weights.
inline void add_values(const Segment& m, const Shape& shape, const softmax::Rows& rows) {
  static constexpr auto PARTS = parts_of(std::make_integer_sequence<int, MOST_ROWS>());
  const int64_t stride = softmax::weight_row(shape.entries);
  for (int vector = 0; vector < shape.vectors; vector += PART) {
    PARTS[rows.count - 1](rows.weights, stride, m, shape, rows.tokens, vector, rows.sums);
  }
}

// Attends with a few rows to an unpacked segment.
inline void attend(const Segment& m, const Shape& shape, const softmax::Rows& rows) {
  const softmax::Entries entries = {shape.entries, shape.v_scales, m.v_steps};
  score(m, shape, rows);
  for (int r = 0; r < rows.count; r++) {
    float* scores = rows.scores + r * softmax::SCORE_ROW;
    uint32_t* weights = rows.weights + r * softmax::weight_row(entries.count);
    if (rows.seen[r].any()) {
      rows.mass[r] = softmax::weigh(scores, rows.seen[r], rows.tokens, rows.cap, entries, weights);
    } else {
      memset(weights, 0, rows.tokens / 2 * entries.count * sizeof *weights);
    }
  }
  add_values(m, shape, rows);
}

// A row's sums in the order of dimensions, times a factor.
inline void gather(const rk_layer& layer, const Shape& shape, const float* sums, float factor, float* out) {
  const int dim = (int)q4h::output_dim(layer);
  if (!shape.v_coded) {
    for (int d = 0; d < dim; d++) out[d] = sums[d] * factor;
    return;
  }
  for (int d = 0; d < dim; d++) {
    const int word = d / q4h::WORD_CODES;
    const float* vector = sums + (word / LANES * WORDS + d % q4h::WORD_CODES) * LANES;
    float sum = 0.f;
    for (int pair = 0; pair < shape.pairs; pair++) sum += vector[pair * shape.lanes + word % LANES];
    out[d] = sum * factor;
  }
}

}  // namespace levels
