// Asks for a head's part of a block before it is read: blocks lie anywhere, so no processor foresees the next one.
#pragma once

#include "q8h.hpp"
#include "rekindle.h"

namespace fetching {

INLINE void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch((const char*)(from + at), _MM_HINT_T0);
}

// K or V, whose scales are for `group` values each in Q4H.
INLINE void fetch_section(const uint8_t* values, const uint8_t* scales, int32_t format, int64_t dim, int64_t group,
                          int64_t tokens, int64_t head) {
  if (format == RK_BF16) return fetch(values + head * tokens * dim * 2, tokens * dim * 2);
  const int64_t bytes = format == RK_Q8H ? tokens * dim : tokens * dim / 2;
  if (format == RK_Q8H) group = q8h::group_of((int)dim);
  fetch(values + head * bytes, bytes);
  fetch(scales + head * tokens * dim / group, tokens * dim / group);
}

INLINE void fetch_head(const rk_layer& layer, int64_t number, int64_t head) {
  const uint8_t* block = layer.blocks + number * layer.block_bytes;
  const int64_t tokens = layer.block_tokens;
  fetch_section(block + layer.k, block + layer.k_scales, layer.k_format, layer.k_dim, q4h::K_GROUP, tokens, head);
  fetch_section(block + layer.v, block + layer.v_scales, layer.v_format, layer.v_dim, q4h::v_group((int)layer.v_dim),
                tokens, head);
}

}  // namespace fetching
