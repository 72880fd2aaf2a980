// Scores of one row over one segment become weights.
#pragma once

#include <cfloat>
#include <cmath>

#include "simd.hpp"

namespace softmax {

using simd::Bits;
using simd::LANES;
using simd::Vec;

constexpr int TOKENS = 512;  // of a segment
constexpr int STEP = 32;     // tokens that attention takes at once
// Distance of rows of scores, and of weights with one entry, in words: no multiple of 1 KiB, or all rows would share a
// few sets of the L1 cache.
constexpr int64_t SCORE_ROW = TOKENS + LANES;
INLINE int64_t weight_row(int entries) { return (int64_t)TOKENS / 2 * entries + LANES; }
constexpr float LOG2_E = 1.44269504f;

// What a row has of a segment: its largest score, in units of log 2, and the sum of its weights.
struct Mass {
  float largest, sum;
};

// The tokens of a segment that a row sees: first <= t < end.
struct Seen {
  int first, end;
  bool any() const { return end > 0 && first < end; }
  bool all(int from, int to) const { return first <= from && to <= end; }
};

// The largest of a row's scores, or the lowest float where all are -inf: what is subtracted of them, so that their
// weights are 0 instead of NaN. A row that has no weight in any segment becomes NaN at its end, as it does in torch.
INLINE float largest_of(Vec most) {
  const float largest = simd::largest(most);
  return largest < -FLT_MAX ? -FLT_MAX : largest;
}

// Rows over one segment: their work memory, and what comes out of it.
struct Rows {
  const uint16_t* const* q;  // bf16 queries
  const Seen* seen;
  int count, tokens;  // no row sees tokens from `tokens` on, a multiple of STEP
  float cap;
  float* scores;      // [row][SCORE_ROW]
  uint32_t* weights;  // [row][weight_row]
  float* sums;        // weights . V of each row
  Mass* mass;         // of the rows that see anything
};

// How weights are stored: each token pair has `entries` words of two bf16, a power of two. Entry e is the weights times
// steps[e][token] for e < scales, zero beyond; without scales there is one entry, the weights.
struct Entries {
  int count, scales;
  const float* steps;
};

// Words of COUNT arrays in turn, a0 b0 c0 ... a1 b1 c1 ...; COUNT is a power of two.
template <int COUNT>
INLINE void interleave(const Bits* from, int stride, Bits* to) {
  if constexpr (COUNT == 1) {
    to[0] = from[0];
  } else {
    Bits even[COUNT / 2], odd[COUNT / 2];
    interleave<COUNT / 2>(from, 2 * stride, even);
    interleave<COUNT / 2>(from + stride, 2 * stride, odd);
    UNROLL for (int i = 0; i < COUNT / 2; i++) simd::zip(even[i], odd[i], to[2 * i], to[2 * i + 1]);
  }
}

// Weights of 2 * LANES tokens, each times the scales of V, as bf16 pairs [pair][entry].
template <int ENTRIES>
INLINE void store_weights(Vec low, Vec high, const float* steps, int scales, uint32_t* to) {
  Bits by_entry[ENTRIES], in_order[ENTRIES];
  UNROLL for (int e = 0; e < ENTRIES; e++) {
    if (scales == 0) {
      by_entry[e] = simd::narrow(low, high);
    } else if (e < scales) {
      const float* step = steps + e * TOKENS;
      by_entry[e] = simd::narrow(simd::mul(low, simd::load(step)), simd::mul(high, simd::load(step + LANES)));
    } else {
      by_entry[e] = simd::zero_bits();
    }
  }
  interleave<ENTRIES>(by_entry, 1, in_order);
  UNROLL for (int e = 0; e < ENTRIES; e++) simd::store_bits(to + e * LANES, in_order[e]);
}

// Caps and masks the scores of STEP tokens from `t` on, and takes the largest into `most`. Tokens that the row does not
// see score -inf. `cap`: 0, or the softcap in units of log 2.
INLINE void settle(float* scores, int t, Seen seen, float cap, Vec& most) {
  UNROLL for (int n = 0; n < STEP; n += LANES) {
    Vec x = simd::load(scores + t + n);
    if (cap != 0.f) x = simd::mul(simd::tanh(x), simd::broadcast(cap));
    if (!seen.all(t, t + STEP)) x = simd::within(seen.first - t - n, seen.end - t - n, x, simd::broadcast(-INFINITY));
    if (cap != 0.f || !seen.all(t, t + STEP)) simd::store(scores + t + n, x);
    most = simd::larger(most, x);
  }
}

// Weights of 2 * LANES tokens from `t` on, of scores that are at most `largest`; their sums are added to `sum`.
template <int ENTRIES>
INLINE void weigh_step(const float* scores, int t, Vec largest, const Entries& entries, uint32_t* weights, Vec& sum) {
  const Vec low = simd::near_exp2(simd::sub(simd::load(scores + t), largest));
  const Vec high = simd::near_exp2(simd::sub(simd::load(scores + t + LANES), largest));
  sum = simd::add(simd::add(sum, low), high);
  store_weights<ENTRIES>(low, high, entries.steps + t, entries.scales, weights + (int64_t)t / 2 * ENTRIES);
}

// Weights of one row over `tokens` tokens of a segment, from its scores, which are overwritten.
template <int ENTRIES>
static Mass weigh(float* scores, Seen seen, int tokens, float cap, const Entries& entries, uint32_t* weights) {
  Vec most = simd::broadcast(-INFINITY), sum = simd::zero();
  for (int t = 0; t < tokens; t += STEP) settle(scores, t, seen, cap, most);
  const float largest = largest_of(most);
  for (int t = 0; t < tokens; t += 2 * LANES) {
    weigh_step<ENTRIES>(scores, t, simd::broadcast(largest), entries, weights, sum);
  }
  return {largest, simd::sum(sum)};
}

inline Mass weigh(float* scores, Seen seen, int tokens, float cap, const Entries& entries, uint32_t* weights) {
  switch (entries.count) {
    case 1:
      return weigh<1>(scores, seen, tokens, cap, entries, weights);
    case 2:
      return weigh<2>(scores, seen, tokens, cap, entries, weights);
    case 4:
      return weigh<4>(scores, seen, tokens, cap, entries, weights);
    case 8:
      return weigh<8>(scores, seen, tokens, cap, entries, weights);
    default:
      return weigh<16>(scores, seen, tokens, cap, entries, weights);
  }
}

}  // namespace softmax
