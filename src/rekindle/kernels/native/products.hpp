// How this level multiplies staged rows by a panel: in tiles or in vectors, under one name.
#pragma once

#include <type_traits>

#if defined(__AMX_BF16__)
#include "tiles.hpp"
namespace products {
using namespace tiles;
}
#else
#include "dots.hpp"
namespace products {
using namespace dots;
}
#endif

namespace products {

// The value of LANES sums: those of int8 and int4 are whole numbers, times the scales of row and columns.
template <class Format>
INLINE simd::Vec value_of(const float* sums, float row_scale, const float* column_scales) {
  if constexpr (std::is_same_v<Format, panel::Bf16>) return simd::load(sums);
  const simd::Vec sum = simd::mul(simd::to_floats(simd::load_bits(sums)), simd::broadcast(row_scale));
  return simd::mul(sum, simd::load(column_scales));
}

}  // namespace products
