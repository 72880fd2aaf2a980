// Scores of one row over one segment become weights.
#pragma once

#include <cmath>

#include "simd.hpp"

namespace softmax {

using simd::Bits;
using simd::LANES;
using simd::Vec;

constexpr int TOKENS = 512;  // of a segment
constexpr int STEP = 32;     // tokens that attention takes at once
constexpr float LOG2_E = 1.44269504f;

// What a row has of a segment: its largest score, in units of log 2, and the sum of its weights.
struct Mass {
  float largest, sum;
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

// Weights of one row, which sees tokens first <= t < end, from its scores, which are overwritten. Tokens that it does
// not see have weight zero. `cap`: 0, or the softcap in units of log 2.
template <int ENTRIES>
static Mass weigh(float* scores, int first, int end, int tokens, float cap, const Entries& entries, uint32_t* weights) {
  if (cap != 0.f) {
    for (int t = 0; t < tokens; t += LANES) {
      simd::store(scores + t, simd::mul(simd::tanh(simd::load(scores + t)), simd::broadcast(cap)));
    }
  }
  for (int t = 0; t < first; t++) scores[t] = -INFINITY;
  for (int t = end; t < tokens; t++) scores[t] = -INFINITY;
  Vec most = simd::broadcast(-INFINITY), sum = simd::zero();
  for (int t = 0; t < tokens; t += LANES) most = simd::larger(most, simd::load(scores + t));
  const float largest = simd::largest(most);
  const Vec offset = simd::broadcast(largest);
  for (int t = 0; t < tokens; t += 2 * LANES) {
    const Vec low = simd::exp2(simd::sub(simd::load(scores + t), offset));
    const Vec high = simd::exp2(simd::sub(simd::load(scores + t + LANES), offset));
    sum = simd::add(simd::add(sum, low), high);
    store_weights<ENTRIES>(low, high, entries.steps + t, entries.scales, weights + (int64_t)t / 2 * ENTRIES);
  }
  return {largest, simd::sum(sum)};
}

inline Mass weigh(float* scores, int first, int end, int tokens, float cap, const Entries& entries, uint32_t* weights) {
  switch (entries.count) {
    case 1:
      return weigh<1>(scores, first, end, tokens, cap, entries, weights);
    case 2:
      return weigh<2>(scores, first, end, tokens, cap, entries, weights);
    case 4:
      return weigh<4>(scores, first, end, tokens, cap, entries, weights);
    case 8:
      return weigh<8>(scores, first, end, tokens, cap, entries, weights);
    default:
      return weigh<16>(scores, first, end, tokens, cap, entries, weights);
  }
}

}  // namespace softmax
