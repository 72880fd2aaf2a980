// Which experts a token takes: rk_choose. A row is one thread's, so it does not depend on the others.
#include <omp.h>

#include "elementwise.hpp"
#include "memory.hpp"
#include "rekindle.h"

namespace {

using simd::LANES;
using simd::Vec;

constexpr int64_t SERIAL_LOGITS = 1 << 12;  // below, a second thread costs more than it saves

int64_t whole_vectors(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// The largest of the values that are not taken, the first of equal ones; some that is not taken if none is a number.
int64_t largest(const float* values, const float* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; i++) {
    if (taken[i] == 0.f && (best < 0 || values[i] > values[best])) best = i;
  }
  return best;
}

// e^(value - most) for all values, and their sum.
float exponentials(float* values, int64_t count, float most) {
  float total = 0.f;
  for (int64_t at = 0; at < count; at += LANES) {
    const Vec below = simd::sub(simd::load(values + at), simd::broadcast(most));
    simd::store(values + at, simd::exp2(simd::mul(below, simd::broadcast(1.442695041f))));
    for (int64_t i = at; i < count && i < at + LANES; i++) total += values[i];
  }
  return total;
}

// `values` and `taken` have room for whole vectors.
void choose(const rk_router& router, const uint16_t* logits, float* values, float* taken, int64_t* indices,
            uint8_t* shares) {
  const int64_t count = router.weights.columns;
  for (int64_t at = 0; at < count; at += LANES) simd::store(values + at, elementwise::load(logits + at, count - at));
  memset(taken, 0, count * sizeof *taken);
  for (int64_t n = 0; n < router.chosen; n++) {
    indices[n] = largest(values, taken, count);
    taken[indices[n]] = 1.f;
  }
  float total = exponentials(values, count, values[indices[0]]);
  if (router.chosen_only) {
    total = 0.f;
    for (int64_t n = 0; n < router.chosen; n++) total += values[indices[n]];
  }
  for (int64_t n = 0; n < router.chosen; n++) {
    const float share = values[indices[n]] / total;
    alignas(64) uint16_t rounded[LANES];
    simd::store_bf16(rounded, simd::broadcast(share));
    if (router.share_format == RK_FP32) {
      memcpy(shares + n * sizeof share, &share, sizeof share);
    } else {
      memcpy(shares + n * sizeof *rounded, rounded, sizeof *rounded);
    }
  }
}

}  // namespace

extern "C" void rk_choose(const rk_router* router, const uint16_t* logits, int64_t rows, int64_t* indices, void* shares,
                          int32_t threads) {
  const int64_t count = router->weights.columns, room = whole_vectors(count);
  const int64_t share_bytes = router->share_format == RK_FP32 ? sizeof(float) : sizeof(uint16_t);
  if (rows * count < SERIAL_LOGITS) threads = 1;
  const Taken<float> memory(2 * room * threads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    float* values = memory.memory + 2 * room * omp_get_thread_num();
    choose(*router, logits + row * count, values, values + room, indices + row * router->chosen,
           (uint8_t*)shares + row * router->chosen * share_bytes);
  }
}
