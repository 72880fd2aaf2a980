// A decoder layer in one call: rk_decoder_layer.
//
// Norms, rotation of positions, gating and residuals are computed row by row between the products; a row's bits depend
// on that row alone, as those of the products do.
#include <algorithm>
#include <cstdlib>

#include "rekindle.h"
#include "simd.hpp"

namespace {

using simd::LANES;
using simd::Vec;

constexpr int64_t SERIAL_VALUES = 1 << 14;  // below, a second thread costs more than it saves

// The work memory of a call, in bf16: what is in use at the same time lies side by side.
struct Memory {
  uint16_t *normed, *q, *k, *v, *attended, *gate, *up;
  uint16_t* all;

  Memory(const rk_decoder& d, int64_t rows) {
    const int64_t sizes[] = {d.q.depth, d.q.columns, d.k.columns, d.v.columns, d.o.depth, d.gate.columns, d.up.columns};
    uint16_t** parts[] = {&normed, &q, &k, &v, &attended, &gate, &up};
    int64_t total = 0;
    for (int64_t size : sizes) total += rows * size;
    all = (uint16_t*)aligned_alloc(64, (total * sizeof *all + 63) / 64 * 64);
    if (all == nullptr) abort();
    uint16_t* next = all;
    for (int i = 0; i < 7; i++) *parts[i] = next, next += rows * sizes[i];
  }
  Memory(const Memory&) = delete;
  ~Memory() { free(all); }
};

struct Job {
  const rk_decoder& decoder;
  const rk_decoder_call& call;
  int64_t rows, size, head_size;
  int32_t threads;

  // Does what is to be done for each row, on so many values of it.
  template <class Work>
  void for_each_row(int64_t values, Work work) const {
#pragma omp parallel for num_threads(rows * values < SERIAL_VALUES ? 1 : threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) work(row);
  }
};

// RMSNorm (Zhang and Sennrich 2019), rounded before the weights are applied, as transformers does.
void normalise(const uint16_t* x, int64_t size, const rk_norm& norm, uint16_t* out) {
  Vec squares = simd::zero();
  for (int64_t i = 0; i < size; i += LANES) {
    const Vec v = simd::load_bf16(x + i);
    squares = simd::fmadd(v, v, squares);
  }
  const Vec factor = simd::broadcast(1.f / __builtin_sqrtf(simd::sum(squares) / (float)size + norm.epsilon));
  for (int64_t i = 0; i < size; i += LANES) {
    const Vec v = simd::round_bf16(simd::mul(simd::load_bf16(x + i), factor));
    simd::store_bf16(out + i, simd::mul(simd::load_bf16(norm.weight + i), v));
  }
}

// x cos + (-second half, first half) sin, each product rounded (Su et al. 2021, RoFormer, §3.4.2).
void rotate(uint16_t* x, int64_t size, const uint16_t* cos, const uint16_t* sin) {
  const int64_t half = size / 2;
  const auto product = [](Vec value, const uint16_t* factor) {
    return simd::round_bf16(simd::mul(value, simd::load_bf16(factor)));
  };
  for (int64_t i = 0; i < half; i += LANES) {
    const Vec first = simd::load_bf16(x + i), second = simd::load_bf16(x + half + i);
    simd::store_bf16(x + i, simd::sub(product(first, cos + i), product(second, sin + i)));
    simd::store_bf16(x + half + i, simd::add(product(second, cos + half + i), product(first, sin + half + i)));
  }
}

// Norms and positions of every head of one row of q or k.
void place_heads(const Job& job, int64_t row, uint16_t* x, int64_t columns, const rk_norm& norm) {
  for (uint16_t* head = x + row * columns; head < x + (row + 1) * columns; head += job.head_size) {
    if (norm.weight != nullptr) normalise(head, job.head_size, norm, head);
    rotate(head, job.head_size, job.call.cos + row * job.head_size, job.call.sin + row * job.head_size);
  }
}

// gate = silu(gate) * up
void apply_gate(uint16_t* gate, const uint16_t* up, int64_t columns) {
  for (int64_t i = 0; i < columns; i += LANES) {
    const Vec opened = simd::round_bf16(simd::silu(simd::load_bf16(gate + i)));
    simd::store_bf16(gate + i, simd::mul(opened, simd::load_bf16(up + i)));
  }
}

void add(const uint16_t* x, const uint16_t* added, int64_t size, uint16_t* out) {
  for (int64_t i = 0; i < size; i += LANES) {
    simd::store_bf16(out + i, simd::add(simd::load_bf16(x + i), simd::load_bf16(added + i)));
  }
}

rk_linear_call linear(const Job& job, const rk_weights& w, const uint16_t* input, uint16_t* output) {
  return {w.format, RK_BF16, w.packed, w.bias, input, output, job.rows, w.columns, w.depth, w.depth, w.columns};
}

// Products of the same rows: at once where their weights have one format.
void multiply(const Job& job, const rk_linear_call* calls, int32_t count) {
  for (int32_t first = 0, end; first < count; first = end) {
    for (end = first + 1; end < count && calls[end].format == calls[first].format; end++) {
    }
    rk_linears(calls + first, end - first, job.threads);
  }
}

void attend(const Job& job, const rk_layer& layer, const Memory& m) {
  const rk_decoder& d = job.decoder;
  rk_write_call write = job.call.write;
  write.k = {m.k, d.k.columns, layer.k_dim}, write.v = {m.v, d.v.columns, layer.v_dim};
  rk_write(&layer, &write, job.threads);
  rk_attend_call attend = job.call.attend;
  attend.q = {m.q, d.q.columns, layer.k_dim}, attend.output = m.attended;
  int64_t used = 0;
  for (int64_t s = 0; s < attend.num_spans; s++) used = std::max(used, attend.spans[s].row + attend.spans[s].rows);
  memset(m.attended + used * d.o.depth, 0, (job.rows - used) * d.o.depth * sizeof *m.attended);
  rk_attend(&layer, &attend, job.threads);
}

}  // namespace

extern "C" void rk_decoder_layer(const rk_decoder* decoder, const rk_layer* layer, const rk_decoder_call* call,
                                 int32_t threads) {
  const rk_decoder& d = *decoder;
  const Job job{d, *call, call->write.rows, d.q.depth, layer->k_dim, threads};
  const Memory m(d, job.rows);
  job.for_each_row(job.size, [&](int64_t row) {
    normalise(call->input + row * job.size, job.size, d.input_norm, m.normed + row * job.size);
  });
  const rk_linear_call projections[] = {linear(job, d.q, m.normed, m.q), linear(job, d.k, m.normed, m.k),
                                        linear(job, d.v, m.normed, m.v)};
  multiply(job, projections, 3);
  job.for_each_row(d.q.columns + d.k.columns, [&](int64_t row) {
    place_heads(job, row, m.q, d.q.columns, d.q_norm);
    place_heads(job, row, m.k, d.k.columns, d.k_norm);
  });
  attend(job, *layer, m);
  const rk_linear_call out = linear(job, d.o, m.attended, m.normed);
  multiply(job, &out, 1);
  job.for_each_row(job.size, [&](int64_t row) {
    const int64_t at = row * job.size;
    add(call->input + at, m.normed + at, job.size, call->output + at);
    normalise(call->output + at, job.size, d.post_attention_norm, m.normed + at);
  });
  const rk_linear_call gated[] = {linear(job, d.gate, m.normed, m.gate), linear(job, d.up, m.normed, m.up)};
  multiply(job, gated, 2);
  job.for_each_row(d.gate.columns, [&](int64_t row) {
    apply_gate(m.gate + row * d.gate.columns, m.up + row * d.gate.columns, d.gate.columns);
  });
  const rk_linear_call down = linear(job, d.down, m.gate, m.normed);
  multiply(job, &down, 1);
  job.for_each_row(job.size, [&](int64_t row) {
    const int64_t at = row * job.size;
    add(call->output + at, m.normed + at, job.size, call->output + at);
  });
}
