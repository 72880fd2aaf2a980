// K and V of a step into the blocks: rk_write. A row's bytes depend on that row alone.
#include <cstring>

#include "q4h.hpp"
#include "q8h.hpp"
#include "rekindle.h"

namespace {

const q4h::InverseScales INVERSE;
constexpr int64_t SERIAL_VALUES = 1 << 14;  // below, a second thread costs more than it saves

INLINE float worse(float a, float b) { return a > b || a != a ? a : b; }

INLINE int scale_byte(float largest) {
  const int half = _cvtss_sh(largest, _MM_FROUND_TO_NEAREST_INT) & 0x7fff;
  return std::clamp((half + 127) >> 7, q4h::SMALLEST_BYTE, q4h::LARGEST_BYTE);
}

// Codes of one group, whose values are rotated.
INLINE void encode_group(const float* x, int count, float inverse, uint8_t* codes) {
  for (int i = 0; i < count; i++) {
    const float level = __builtin_floorf(x[i] * inverse) + 8.f;
    const float low = level > 0.f ? level : 0.f;
    codes[i] = (uint8_t)(int)(low < 15.f ? low : 15.f);
  }
}

// Eight codes to a word, in the order 0 2 4 6 1 3 5 7 from the lowest nibble.
INLINE uint32_t word_of(const uint8_t* c) {
  const uint32_t even = c[0] | c[2] << 4 | c[4] << 8 | c[6] << 12, odd = c[1] | c[3] << 4 | c[5] << 8 | c[7] << 12;
  return even | odd << 16;
}

// Encodes one rotated vector of a head; `codes` is NULL where it is not to be stored. Returns the largest magnitude.
float encode_8(const float* x, int dim, int group, uint8_t* codes, uint8_t* scales) {
  float worst = 0.f;
  for (int g = 0; g < dim / group; g++) {
    const float largest = q4h::worst_of(x + g * group, group);
    worst = worse(largest, worst);
    if (codes == nullptr) continue;
    scales[g] = q8h::scale_byte(largest);
    q8h::encode_group(x + g * group, group, scales[g], (int8_t*)codes + g * group);
  }
  return worst;
}

// The same in 4 bits.
float encode_4(const float* x, int dim, int group, uint8_t* codes, uint8_t* scales) {
  float worst = 0.f;
  uint8_t unpacked[q4h::MOST_DIMS];
  for (int g = 0; g < dim / group; g++) {
    const float largest = q4h::worst_of(x + g * group, group);
    worst = worse(largest, worst);
    if (codes == nullptr) continue;
    const int byte = scale_byte(largest);
    encode_group(x + g * group, group, INVERSE.of[byte], unpacked + g * group);
    scales[g] = largest == 0.f ? 0 : (uint8_t)byte;
  }
  if (codes == nullptr) return worst;
  for (int w = 0; w < dim / q4h::WORD_CODES; w++) {
    const uint32_t word = word_of(unpacked + w * q4h::WORD_CODES);
    memcpy(codes + w * sizeof word, &word, sizeof word);
  }
  return worst;
}

// Copies one vector of a head; `to` is NULL where it is not to be stored.
float copy_finite(const float* x, const uint16_t* from, int dim, uint16_t* to) {
  if (to != nullptr) {
    for (int i = 0; i < dim; i++) to[i] = (from[i] & 0x7f80) == 0x7f80 ? 0 : from[i];
  }
  return q4h::worst_of(x, dim);
}

struct Section {
  rk_rows rows;
  int64_t offset, scales, dim;
  int32_t format;
  int group;
};

// One head of one row.
float write_vector(const rk_layer& layer, const Section& s, int64_t row, int64_t head, int32_t block, int32_t token) {
  alignas(64) float x[q4h::MOST_DIMS];
  const uint16_t* from = s.rows.values + row * s.rows.row_stride + head * s.rows.head_stride;
  q4h::widen(from, s.dim, x);
  const bool stored = block >= 0;
  uint8_t* base = stored ? layer.blocks + block * layer.block_bytes : nullptr;
  const int64_t at = head * layer.block_tokens + token;
  if (s.format == RK_BF16) {
    return copy_finite(x, from, (int)s.dim, stored ? (uint16_t*)(base + s.offset) + at * s.dim : nullptr);
  }
  const int64_t bytes = s.format == RK_Q8H ? s.dim : s.dim / 2;
  uint8_t* codes = stored ? base + s.offset + at * bytes : nullptr;
  uint8_t* scales = stored ? base + s.scales + at * (s.dim / s.group) : nullptr;
  q4h::rotate(x, (int)s.dim, layer.signs);
  return (s.format == RK_Q8H ? encode_8 : encode_4)(x, (int)s.dim, s.group, codes, scales);
}

}  // namespace

extern "C" void rk_write(const rk_layer* layer, const rk_write_call* call, int32_t threads) {
  const int k_group = layer->k_format == RK_Q8H ? q8h::group_of((int)layer->k_dim) : q4h::K_GROUP;
  const Section sections[2] = {
      {call->k, layer->k, layer->k_scales, layer->k_dim, layer->k_format, k_group},
      {call->v, layer->v, layer->v_scales, layer->v_dim, layer->v_format, q4h::v_group((int)layer->v_dim)},
  };
  if (call->rows * layer->kv_heads * (layer->k_dim + layer->v_dim) < SERIAL_VALUES) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < call->rows; row++) {
    float worst = call->worst[row];
    for (const Section& section : sections) {
      for (int64_t head = 0; head < layer->kv_heads; head++) {
        worst = worse(write_vector(*layer, section, row, head, call->blocks[row], call->offsets[row]), worst);
      }
    }
    call->worst[row] = worst;
  }
}
