// Mixtures of experts: rk_mix.
//
// Every chosen expert of a token is a slot. Slots are sorted by expert, so the rows of one lie side by side in work
// memory, and threads share the panels of all chosen experts: with one token those of a few experts, with many the rows
// as well. A slot is computed as if it were alone, and a token's slots are summed in its own order, so its bits depend
// neither on other tokens nor on threads.
#include <omp.h>

#include <algorithm>

#include "elementwise.hpp"
#include "memory.hpp"
#include "products.hpp"
#include "rekindle.h"

namespace {

using panel::Bf16;
using panel::Int4;
using panel::Int8;
using panel::Sums;
using simd::Bits;
using simd::LANES;
using simd::Vec;

constexpr int64_t BLOCK_BYTES = 1 << 19;      // of staged rows that meet a panel one after the other
constexpr int64_t PART_ROWS = 48;             // whole groups, tiles
constexpr int64_t SERIAL_PRODUCTS = 1 << 16;  // below, a second thread costs more than it saves
constexpr int64_t UNITS_EACH = 16;            // pieces of work for a thread, so that none waits long for another

// Rows of one expert in the work memory.
struct Part {
  int64_t expert, first, rows;
};

// Where each slot is, and what is multiplied together.
class Plan {
 public:
  int64_t num_slots, num_parts = 0, room = 0;  // room: rows of work memory

  Plan(const rk_experts& experts, const rk_experts_call& call, int64_t most_rows)
      : num_slots(call.tokens * call.chosen), rows_(num_slots), parts_(num_slots), next_(experts.experts) {
    int64_t* next = next_.memory;
    memset(next, 0, experts.experts * sizeof *next);
    for (int64_t slot = 0; slot < num_slots; slot++) next[call.indices[slot]]++;
    for (int64_t expert = 0; expert < experts.experts; expert++) {
      const int64_t rows = next[expert];
      next[expert] = room;
      for (int64_t done = 0; done < rows; done += most_rows) {
        parts_.memory[num_parts++] = {expert, room + done, std::min(most_rows, rows - done)};
      }
      room += (rows + products::TOGETHER - 1) / products::TOGETHER * products::TOGETHER;
    }
    for (int64_t slot = 0; slot < num_slots; slot++) rows_.memory[slot] = next[call.indices[slot]]++;
  }

  int64_t row(int64_t slot) const { return rows_.memory[slot]; }
  const Part& part(int64_t index) const { return parts_.memory[index]; }

 private:
  Taken<int64_t> rows_;
  Taken<Part> parts_;
  Taken<int64_t> next_;
};

// One projection of all experts, and its staged rows.
template <class Format>
class Projection {
 public:
  Projection(const rk_weights* weights, int64_t room, int64_t threads)
      : weights_(weights),
        blocks_(panel::blocks_of<Format>(weights->depth)),
        staged_(room * blocks_ * products::STAGED_BLOCK<Format>),
        scales_(room),
        scratch_(threads * blocks_ * panel::DEPTH<Format>) {}

  static int64_t row_bytes(const rk_weights& weights) {
    const int64_t values = panel::blocks_of<Format>(weights.depth) * products::STAGED_BLOCK<Format>;
    return values * (int64_t)sizeof(products::Staged<Format>);
  }
  int64_t columns() const { return weights_->columns; }
  void stage(const uint16_t* input, int64_t row) const {
    float* scratch = scratch_.memory + omp_get_thread_num() * blocks_ * panel::DEPTH<Format>;
    scales_.memory[row] = products::stage_row<Format>(input, row, weights_->depth, scratch, staged_.memory);
  }
  void stage_again(int64_t from, int64_t row) const {
    products::copy_row<Format>(staged_.memory, from, row, blocks_);
    scales_.memory[row] = scales_.memory[from];
  }

  // Writes the products of all parts to output [room][columns]; all threads of a team call it.
  void multiply(const Plan& plan, uint16_t* output) const {
    const int64_t panels = panel::panels_of(columns()), units = plan.num_parts * panels;
    const int64_t chunk = std::max<int64_t>(1, units / (UNITS_EACH * omp_get_num_threads()));
    products::Registers registers;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t unit = 0; unit < units; unit++) {
      multiply_panel(registers, plan.part(unit / panels), unit % panels, output);
    }
  }

 private:
  void multiply_panel(products::Registers& registers, const Part& part, int64_t number, uint16_t* output) const {
    const rk_weights& weights = weights_[part.expert];
    const uint32_t* packed = (const uint32_t*)weights.packed + number * panel::panel_words<Format>(blocks_);
    const float* scales = (const float*)(packed + blocks_ * Format::BLOCK_WORDS);
    const int64_t column = number * panel::COLUMNS, width = std::min<int64_t>(panel::COLUMNS, columns() - column);
    const int64_t row_values = blocks_ * products::STAGED_BLOCK<Format>, step = products::rows_at_once(part.rows);
    alignas(64) uint16_t bias[panel::COLUMNS] = {};
    if (weights.bias != nullptr) memcpy(bias, weights.bias + column, width * sizeof *bias);
    Sums sums;
    for (int64_t done = 0; done < part.rows; done += step) {
      const int64_t count = std::min(step, part.rows - done), row = part.first + done;
      products::multiply<Format>(registers, staged_.memory + row * row_values, count, blocks_, packed, done > 0, sums);
      for (int64_t r = 0; r < count; r++) {
        alignas(64) uint16_t line[panel::COLUMNS];
        for (int n = 0; n < panel::COLUMNS; n += LANES) {
          Vec sum = products::value_of<Format>(sums.at[r] + n, scales_.memory[row + r], scales + n);
          // The product is rounded before the bias is added, as modules add it by an operation of its own.
          if (weights.bias != nullptr) sum = simd::add(simd::round_bf16(sum), simd::load_bf16(bias + n));
          simd::store_bf16(line + n, sum);
        }
        memcpy(output + (row + r) * columns() + column, line, width * sizeof *line);
      }
    }
  }

  const rk_weights* weights_;
  int64_t blocks_;
  Taken<products::Staged<Format>> staged_;
  Taken<float> scales_, scratch_;
};

INLINE Vec within(float limit, Vec x) { return simd::larger(simd::broadcast(-limit), simd::smaller(simd::broadcast(limit), x)); }

INLINE Vec gated(const rk_experts& experts, Vec gate, Vec up) {
  gate = simd::smaller(simd::broadcast(experts.limit), gate), up = within(experts.limit, up);
  if (experts.activation == RK_SWISH) {
    const Vec slope = simd::round_bf16(simd::mul(gate, simd::broadcast(experts.alpha)));
    const Vec open = simd::round_bf16(simd::mul(gate, simd::round_bf16(simd::sigmoid(slope))));
    return simd::mul(simd::round_bf16(simd::add(up, simd::broadcast(1.f))), open);
  }
  const Vec active = experts.activation == RK_SILU ? elementwise::silu(gate) : elementwise::gelu_tanh(gate);
  return simd::mul(simd::round_bf16(active), up);
}

// Gates of a row [2 * inner] become its first `inner` values: no value is written before it was read.
void apply_gate(const rk_experts& experts, uint16_t* row) {
  const int64_t inner = experts.inner;
  for (int64_t at = 0; at < inner; at += LANES) {
    const int64_t count = std::min<int64_t>(LANES, inner - at);
    Vec gate, up;
    if (experts.interleaved) {
      alignas(64) uint32_t pairs[LANES] = {};
      memcpy(pairs, row + 2 * at, count * sizeof *pairs);
      const Bits both = simd::load_bits(pairs);
      gate = simd::as_floats(simd::shift_left(both, 16));
      up = simd::as_floats(simd::both(both, simd::broadcast_bits(0xffff0000u)));
    } else {
      gate = elementwise::load(row + at, count), up = elementwise::load(row + inner + at, count);
    }
    elementwise::store(row + at, gated(experts, gate, up), count);
  }
}

Vec share_of(const rk_experts_call& call, int64_t slot) {
  if (call.share_format == RK_FP32) return simd::broadcast(((const float*)call.shares)[slot]);
  const uint32_t bits = (uint32_t)((const uint16_t*)call.shares)[slot] << 16;
  return simd::as_floats(simd::broadcast_bits(bits));
}

// Sums the slots of a token, each times its share; with shares in bf16 the products are rounded.
void combine(const rk_experts_call& call, const Plan& plan, int64_t token, const uint16_t* slots, int64_t size) {
  uint16_t* out = call.output + token * size;
  for (int64_t at = 0; at < size; at += LANES) {
    Vec sum = simd::zero();
    for (int64_t slot = token * call.chosen; slot < (token + 1) * call.chosen; slot++) {
      const Vec value = elementwise::load(slots + plan.row(slot) * size + at, size - at);
      const Vec part = simd::mul(value, share_of(call, slot));
      sum = simd::add(sum, call.share_format == RK_FP32 ? part : simd::round_bf16(part));
    }
    elementwise::store(out + at, sum, size - at);
  }
}

template <class Up, class Down>
void run(const rk_experts& experts, const rk_experts_call& call, int32_t threads) {
  const int64_t size = experts.down->columns, inner = experts.inner;
  const int64_t row_bytes = std::max(Projection<Up>::row_bytes(*experts.up), Projection<Down>::row_bytes(*experts.down));
  const Plan plan(experts, call, std::max(PART_ROWS, BLOCK_BYTES / row_bytes / PART_ROWS * PART_ROWS));
  if (plan.num_slots * inner * size < SERIAL_PRODUCTS) threads = 1;
  const Projection<Up> up(experts.up, plan.room, threads);
  const Projection<Down> down(experts.down, plan.room, threads);
  const Taken<uint16_t> gates(plan.room * 2 * inner), slots(plan.room * size);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < call.tokens; token++) {
      const int64_t first = plan.row(token * call.chosen);
      up.stage(call.input + token * experts.up->depth, first);
      for (int64_t n = 1; n < call.chosen; n++) up.stage_again(first, plan.row(token * call.chosen + n));
    }
    up.multiply(plan, gates.memory);
#pragma omp for schedule(static)
    for (int64_t slot = 0; slot < plan.num_slots; slot++) {
      uint16_t* row = gates.memory + plan.row(slot) * 2 * inner;
      apply_gate(experts, row);
      down.stage(row, plan.row(slot));
    }
    down.multiply(plan, slots.memory);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < call.tokens; token++) combine(call, plan, token, slots.memory, size);
  }
}

template <class Up>
void run_from(const rk_experts& experts, const rk_experts_call& call, int32_t threads) {
  if (experts.down->format == RK_INT4) return run<Up, Int4>(experts, call, threads);
  if (experts.down->format == RK_INT8) return run<Up, Int8>(experts, call, threads);
  run<Up, Bf16>(experts, call, threads);
}

}  // namespace

extern "C" void rk_mix(const rk_experts* experts, const rk_experts_call* call, int32_t threads) {
  if (experts->up->format == RK_INT4) return run_from<Int4>(*experts, *call, threads);
  if (experts->up->format == RK_INT8) return run_from<Int8>(*experts, *call, threads);
  run_from<Bf16>(*experts, *call, threads);
}
