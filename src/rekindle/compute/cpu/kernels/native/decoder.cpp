// Decoder layers and their parts: rk_normalise, rk_gated_mlp, rk_decoder_layer.
//
// What lies between the products is computed row by row, each row by one thread, so a row's bits depend on that row
// alone, as those of the products do.
#include <algorithm>

#include "elementwise.hpp"
#include "memory.hpp"
#include "rekindle.h"

namespace {

constexpr int64_t SERIAL_VALUES = 1 << 14;  // below, a second thread costs more than it saves

// Rows of bf16 values.
struct Rows {
  uint16_t* values;
  int64_t stride;

  uint16_t* operator[](int64_t row) const { return values + row * stride; }
};

// Work memory for rows of several matrices, one matrix after the other.
class Matrices {
 public:
  Matrices(int64_t rows, int64_t columns) : rows_(rows), taken_(rows * columns), next_(taken_.memory) {}

  Rows take(int64_t columns) {
    const Rows rows{next_, columns};
    next_ += rows_ * columns;
    return rows;
  }

 private:
  int64_t rows_;
  Taken<uint16_t> taken_;
  uint16_t* next_;
};

// The rows of a call and its threads.
struct Job {
  int64_t rows;
  int32_t threads;

  // Does what is to be done for each row, on so many values of it.
  template <class Work>
  void for_each_row(int64_t values, Work work) const {
#pragma omp parallel for num_threads(rows * values < SERIAL_VALUES ? 1 : threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) work(row);
  }

  rk_linear_call product(const rk_weights& w, Rows input, Rows output) const {
    return {w.format, RK_BF16, w.packed, w.bias, input.values, output.values, rows, w.columns, w.depth, input.stride,
            output.stride};
  }

  // Products of the same rows: at once where their weights have one format.
  void multiply(const rk_linear_call* calls, int32_t count) const {
    for (int32_t first = 0, end; first < count; first = end) {
      for (end = first + 1; end < count && calls[end].format == calls[first].format; end++) {
      }
      rk_linears(calls + first, end - first, threads);
    }
  }
};

void normalise(const rk_norm& norm, const uint16_t* x, uint16_t* out) {
  elementwise::normalise(x, norm.weight, norm.epsilon, norm.rounds_first != 0, norm.columns, out);
}

// `gates` are rows of twice the inner size.
void apply_mlp(const Job& job, const rk_mlp& mlp, Rows input, Rows gates, Rows output) {
  const rk_linear_call products[] = {job.product(mlp.gate, input, gates),
                                     job.product(mlp.up, input, {gates.values + mlp.inner, gates.stride})};
  job.multiply(products, mlp.up.packed == nullptr ? 1 : 2);
  job.for_each_row(mlp.inner, [&](int64_t row) {
    if (mlp.activation == RK_SILU) {
      elementwise::gate<elementwise::silu>(gates[row], gates[row] + mlp.inner, mlp.inner);
    } else {
      elementwise::gate<elementwise::gelu_tanh>(gates[row], gates[row] + mlp.inner, mlp.inner);
    }
  });
  const rk_linear_call down = job.product(mlp.down, gates, output);
  job.multiply(&down, 1);
}

// A token's experts by its logits, and their sum.
void apply_mixture(const Job& job, const rk_mixture& mixture, Rows input, Rows output) {
  const rk_router& router = mixture.router;
  const int64_t slots = job.rows * router.chosen;
  const Taken<uint16_t> logits(job.rows * router.weights.columns);
  const Taken<int64_t> indices(slots);
  const Taken<float> shares(slots);  // room for either format
  const rk_linear_call product = job.product(router.weights, input, {logits.memory, router.weights.columns});
  job.multiply(&product, 1);
  rk_choose(&router, logits.memory, job.rows, indices.memory, shares.memory, job.threads);
  const rk_experts_call call{job.rows, router.chosen, input.values, indices.memory, shares.memory, router.share_format,
                             output.values};
  rk_mix(&mixture.experts, &call, job.threads);
}

// Norms and positions of every head in a row of q or k.
void place_heads(const rk_norm& norm, const rk_decoder_call& call, int64_t row, Rows x, int64_t size) {
  for (uint16_t* head = x[row]; head < x[row + 1]; head += size) {
    if (norm.weight != nullptr) normalise(norm, head, head);
    elementwise::rotate(head, size, call.cos + row * size, call.sin + row * size);
  }
}

// Stores K and V, and attends; rows of no span attend to nothing.
void attend(const Job& job, const rk_layer& layer, const rk_decoder_call& call, const Rows (&qkv)[3], Rows output) {
  rk_write_call write = call.write;
  write.k = {qkv[1].values, qkv[1].stride, layer.k_dim}, write.v = {qkv[2].values, qkv[2].stride, layer.v_dim};
  rk_write(&layer, &write, job.threads);
  rk_attend_call attend = call.attend;
  attend.q = {qkv[0].values, qkv[0].stride, layer.k_dim}, attend.output = output.values;
  int64_t used = 0;
  for (int64_t s = 0; s < attend.num_spans; s++) used = std::max(used, attend.spans[s].row + attend.spans[s].rows);
  memset(output[used], 0, (job.rows - used) * output.stride * sizeof(uint16_t));
  rk_attend(&layer, &attend, job.threads);
}

}  // namespace

extern "C" void rk_normalise(const rk_norm* norm, const uint16_t* input, int64_t input_stride, uint16_t* output,
                             int64_t rows, int32_t threads) {
  Job{rows, threads}.for_each_row(norm->columns, [&](int64_t row) {
    normalise(*norm, input + row * input_stride, output + row * norm->columns);
  });
}

extern "C" void rk_gated_mlp(const rk_mlp* mlp, const uint16_t* input, uint16_t* output, int64_t rows,
                             int32_t threads) {
  Matrices memory(rows, 2 * mlp->inner);
  const Rows source{(uint16_t*)input, mlp->gate.depth}, target{output, mlp->down.columns};
  apply_mlp({rows, threads}, *mlp, source, memory.take(2 * mlp->inner), target);
}

extern "C" void rk_decoder_layer(const rk_decoder* decoder, const rk_layer* layer, const rk_decoder_call* call,
                                 int32_t threads) {
  const rk_decoder& d = *decoder;
  const Job job{call->write.rows, threads};
  const int64_t size = d.q.depth;
  const bool half = d.mixture == nullptr && d.mlp.down.packed == nullptr;
  Matrices memory(job.rows, 2 * size + d.q.columns + d.k.columns + d.v.columns + d.o.depth + 2 * d.mlp.inner);
  const Rows x{(uint16_t*)call->input, size}, out{call->output, size}, normed = memory.take(size);
  const Rows qkv[3] = {memory.take(d.q.columns), memory.take(d.k.columns), memory.take(d.v.columns)};
  const Rows attended = memory.take(d.o.depth);
  job.for_each_row(size, [&](int64_t row) { normalise(d.input_norm, x[row], normed[row]); });
  const rk_linear_call projections[] = {job.product(d.q, normed, qkv[0]), job.product(d.k, normed, qkv[1]),
                                        job.product(d.v, normed, qkv[2])};
  job.multiply(projections, 3);
  job.for_each_row(d.q.columns + d.k.columns, [&](int64_t row) {
    place_heads(d.q_norm, *call, row, qkv[0], layer->k_dim);
    place_heads(d.k_norm, *call, row, qkv[1], layer->k_dim);
  });
  attend(job, *layer, *call, qkv, attended);
  const rk_linear_call o = job.product(d.o, attended, normed);
  job.multiply(&o, 1);
  job.for_each_row(size, [&](int64_t row) {
    if (d.attention_output_norm.weight != nullptr) normalise(d.attention_output_norm, normed[row], normed[row]);
    elementwise::add(x[row], normed[row], size, out[row]);
    normalise(d.mlp_norm, out[row], normed[row]);
  });
  if (half) return;
  const Rows added = memory.take(size);
  if (d.mixture != nullptr) {
    apply_mixture(job, *d.mixture, normed, added);
  } else {
    apply_mlp(job, d.mlp, normed, memory.take(2 * d.mlp.inner), added);
  }
  job.for_each_row(size, [&](int64_t row) {
    if (d.mlp_output_norm.weight != nullptr) normalise(d.mlp_output_norm, added[row], added[row]);
    elementwise::add(out[row], added[row], size, out[row]);
  });
}
