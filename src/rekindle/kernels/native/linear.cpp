// Linear layers over packed weights: rk_pack and rk_linear.
//
// Rows are staged in the form that this level multiplies, in blocks that stay in the L2 cache. Threads share the panels
// of 64 columns evenly, and where there are few of them, the rows of a block as well. An output is summed by one thread
// over the whole depth in one order, so its bits depend on its row and its column of weights alone.
#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "memory.hpp"
#include "panel.hpp"
#include "products.hpp"
#include "rekindle.h"

namespace {

using panel::Bf16;
using panel::Int8;
using panel::Sums;

constexpr int64_t BLOCK_BYTES = 1 << 20;      // of staged rows
constexpr int64_t PART_ROWS = 48;             // the fewest that a thread takes of a block's rows: whole groups, tiles
constexpr int64_t SERIAL_PRODUCTS = 1 << 16;  // below, a second thread costs more than it saves

// Layers that have the same input.
template <class Format>
struct Job {
  const rk_linear_call* calls;
  int64_t panels, blocks;  // panels of all of them
  products::Staged<Format>* staged;
  float* scales;   // of the staged rows
  float* scratch;  // [thread][whole blocks of depth]

  int64_t padded() const { return blocks * panel::DEPTH<Format>; }
  int64_t row_values() const { return blocks * products::STAGED_BLOCK<Format>; }
};

// One panel of one of the layers.
template <class Format>
struct Panel {
  const rk_linear_call* call;
  int64_t number;
  const uint32_t* weights;
  const float* scales;

  Panel(const Job<Format>& job, int64_t index) : call(job.calls), number(index) {
    for (; number >= panel::panels_of(call->columns); call++) number -= panel::panels_of(call->columns);
    weights = (const uint32_t*)call->packed + number * panel::panel_words<Format>(job.blocks);
    scales = (const float*)(weights + job.blocks * panel::BLOCK_WORDS);
  }
};

// Applies scales, adds the bias to `count` rows of sums, rounds once, and writes the columns that exist. `row_scales` are
// those of the rows.
template <class Format>
void finish(const Panel<Format>& panel, int64_t row, int64_t count, const float* row_scales, const Sums& sums) {
  const rk_linear_call& call = *panel.call;
  const int64_t column = panel.number * panel::COLUMNS;
  const int64_t width = std::min<int64_t>(panel::COLUMNS, call.columns - column);
  const int64_t size = call.output_format == RK_FP32 ? sizeof(float) : sizeof(uint16_t);
  alignas(64) uint16_t bias[panel::COLUMNS] = {};
  alignas(64) float line[panel::COLUMNS];
  if (call.bias != nullptr) memcpy(bias, call.bias + column, width * sizeof(uint16_t));
  for (int64_t r = 0; r < count; r++) {
    uint8_t* to = (uint8_t*)call.output + ((row + r) * call.output_stride + column) * size;
    void* out = width == panel::COLUMNS ? (void*)to : (void*)line;
    for (int n = 0; n < panel::COLUMNS; n += simd::LANES) {
      simd::Vec sum = products::value_of<Format>(sums.at[r] + n, row_scales[r], panel.scales + n);
      if (call.bias != nullptr) sum = simd::add(sum, simd::load_bf16(bias + n));
      if (call.output_format == RK_FP32) {
        simd::store((float*)out + n, sum);
      } else {
        simd::store_bf16((uint16_t*)out + n, sum);
      }
    }
    if (out == line) memcpy(to, line, width * size);
  }
}

// Rows first <= row < end, the staged ones from `staged` on, times one panel.
template <class Format>
void multiply_panel(const Job<Format>& job, products::Registers& registers, const Panel<Format>& panel, int64_t staged,
                    int64_t first, int64_t end) {
  Sums sums;
  const int64_t step = products::rows_at_once(end - first);
  for (int64_t row = first; row < end; row += step) {
    const int64_t count = std::min(step, end - row), index = row - staged;
    products::multiply<Format>(registers, job.staged + index * job.row_values(), count, job.blocks, panel.weights,
                               sums);
    finish(panel, row, count, job.scales + index, sums);
  }
}

// One thread's share of a block of rows; all threads of a team call it.
template <class Format>
void multiply_block(const Job<Format>& job, int64_t first, int64_t rows) {
  const rk_linear_call& call = *job.calls;
  float* scratch = job.scratch + omp_get_thread_num() * job.padded();
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    const uint16_t* input = call.input + (first + r) * call.input_stride;
    job.scales[r] = products::stage_row<Format>(input, r, call.depth, scratch, job.staged);
  }
  const int64_t wanted = (4 * omp_get_num_threads() + job.panels - 1) / job.panels;
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, rows / PART_ROWS));
  const int64_t part = (rows + parts * PART_ROWS - 1) / (parts * PART_ROWS) * PART_ROWS;
  products::Registers registers;
#pragma omp for schedule(static)
  for (int64_t unit = 0; unit < job.panels * parts; unit++) {
    const int64_t start = unit % parts * part;
    if (start < rows) {
      const int64_t end = first + std::min(rows, start + part);
      multiply_panel(job, registers, Panel<Format>(job, unit / parts), first, first + start, end);
    }
  }
}

template <class Format>
void multiply(const rk_linear_call* calls, int32_t count, int32_t threads) {
  const rk_linear_call& call = *calls;
  int64_t panels = 0;
  for (int32_t i = 0; i < count; i++) panels += panel::panels_of(calls[i].columns);
  const int64_t blocks = panel::blocks_of<Format>(call.depth), row_values = blocks * products::STAGED_BLOCK<Format>;
  const int64_t row_bytes = row_values * (int64_t)sizeof(products::Staged<Format>);
  const int64_t most = std::max<int64_t>(2 * PART_ROWS, BLOCK_BYTES / row_bytes / PART_ROWS * PART_ROWS);
  const int64_t rows = std::min(call.rows, most);
  const int64_t staged_rows = (rows + Sums::ROWS - 1) / Sums::ROWS * Sums::ROWS;
  if (call.rows * panels * panel::COLUMNS * call.depth < SERIAL_PRODUCTS) threads = 1;
  const Taken<products::Staged<Format>> staged(staged_rows * row_values);
  const Taken<float> scales(staged_rows), scratch(std::is_same_v<Format, Int8> ? threads * blocks * panel::DEPTH<Int8> : 0);
  const Job<Format> job{calls, panels, blocks, staged.memory, scales.memory, scratch.memory};
#pragma omp parallel num_threads(threads)
  for (int64_t first = 0; first < call.rows; first += rows) {
    multiply_block(job, first, std::min(rows, call.rows - first));
  }
}

// Weights to be packed: that of column c and depth k at from[c * column_stride + k * depth_stride].
struct Weights {
  const uint16_t* from;
  int64_t column_stride, depth_stride, columns, depth;
};

void pack_block(const Weights& w, int64_t column, int64_t first, uint32_t* block) {
  const int64_t width = std::min<int64_t>(panel::COLUMNS, w.columns - column);
  const int64_t steps = std::min<int64_t>(panel::DEPTH<Bf16>, w.depth - first);
  memset(block, 0, panel::BLOCK_WORDS * sizeof *block);
  for (int64_t n = 0; n < width; n++) {
    uint16_t* to = (uint16_t*)(block + n / panel::STRIP * panel::STRIP_WORDS + n % panel::STRIP);
    for (int64_t k = 0; k < steps; k++) {
      to[k / 2 * 2 * panel::STRIP + k % 2] = w.from[(column + n) * w.column_stride + (first + k) * w.depth_stride];
    }
  }
}

// 64 columns whose 32 values each lie side by side: words are transposed in registers.
void pack_whole_block(const uint16_t* from, int64_t column_stride, uint32_t* block) {
  const int64_t stride = column_stride * (int64_t)sizeof(uint16_t);
  for (int n = 0; n < panel::COLUMNS; n += simd::LANES) {
    uint32_t* to = block + n / panel::STRIP * panel::STRIP_WORDS + n % panel::STRIP;
    for (int word = 0; word < panel::WORDS; word += 8) {
      simd::Bits words[8];
      simd::load_transposed((const uint8_t*)(from + n * column_stride + 2 * word), stride, words);
      UNROLL for (int i = 0; i < 8; i++) simd::store_bits(to + (word + i) * panel::STRIP, words[i]);
    }
  }
}

void pack_bf16(const Weights& w, uint32_t* packed, int32_t threads) {
  const int64_t blocks = panel::blocks_of<Bf16>(w.depth), count = panel::panels_of(w.columns) * blocks;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) {
    uint32_t* block = packed + i * panel::BLOCK_WORDS;
    const int64_t column = i / blocks * panel::COLUMNS, first = i % blocks * panel::DEPTH<Bf16>;
    const bool whole = column + panel::COLUMNS <= w.columns && first + panel::DEPTH<Bf16> <= w.depth;
    if (whole && w.depth_stride == 1) {
      pack_whole_block(w.from + column * w.column_stride + first, w.column_stride, block);
    } else {
      pack_block(w, column, first, block);
    }
  }
}

// One column of a panel of int8: its words, its scale, the sum of its values.
void pack_column(const Weights& w, int64_t column, int64_t blocks, uint32_t* panel, float* x, int8_t* line) {
  for (int64_t k = 0; k < w.depth; k++) {
    q4h::widen(w.from + column * w.column_stride + k * w.depth_stride, 1, x + k);
  }
  const int n = (int)(column % panel::COLUMNS);
  const float scale = int8::quantise(x, w.depth, line, int8::BLOCK);
  int32_t sum = 0;
  for (int64_t k = 0; k < blocks * panel::DEPTH<Int8>; k++) sum += line[k];
  uint32_t* to = panel + n / panel::STRIP * panel::STRIP_WORDS + n % panel::STRIP;
  for (int64_t word = 0; word < blocks * panel::WORDS; word++) {
    const int64_t at = word / panel::WORDS * panel::BLOCK_WORDS + word % panel::WORDS * panel::STRIP;
    memcpy(to + at, line + word * sizeof *to, sizeof *to);
  }
  uint32_t* tail = panel + blocks * panel::BLOCK_WORDS;
  memcpy(tail + n, &scale, sizeof scale);
  memcpy(tail + panel::COLUMNS + n, &sum, sizeof sum);
}

void pack_int8(const Weights& w, uint32_t* packed, int32_t threads) {
  const int64_t blocks = panel::blocks_of<Int8>(w.depth), words = panel::panel_words<Int8>(blocks);
#pragma omp parallel num_threads(threads)
  {
    const Taken<float> x(blocks * panel::DEPTH<Int8>);
    const Taken<int8_t> line(blocks * panel::DEPTH<Int8>);
#pragma omp for schedule(static)
    for (int64_t number = 0; number < panel::panels_of(w.columns); number++) {
      uint32_t* panel = packed + number * words;
      const int64_t column = number * panel::COLUMNS, end = std::min(w.columns, column + panel::COLUMNS);
      if (end < column + panel::COLUMNS) memset(panel, 0, words * sizeof *panel);
      for (int64_t c = column; c < end; c++) pack_column(w, c, blocks, panel, x.memory, line.memory);
    }
  }
}

}  // namespace

extern "C" int64_t rk_packed_bytes(int32_t format, int64_t columns, int64_t depth) {
  const int64_t words = format == RK_INT8 ? panel::panel_words<Int8>(panel::blocks_of<Int8>(depth))
                                          : panel::panel_words<Bf16>(panel::blocks_of<Bf16>(depth));
  return panel::panels_of(columns) * words * (int64_t)sizeof(uint32_t);
}

extern "C" void rk_pack(int32_t format, const uint16_t* weights, int64_t column_stride, int64_t depth_stride,
                        int64_t columns, int64_t depth, void* packed, int32_t threads) {
  const Weights from{weights, column_stride, depth_stride, columns, depth};
  format == RK_INT8 ? pack_int8(from, (uint32_t*)packed, threads) : pack_bf16(from, (uint32_t*)packed, threads);
}

extern "C" void rk_linears(const rk_linear_call* calls, int32_t count, int32_t threads) {
  calls->format == RK_INT8 ? multiply<Int8>(calls, count, threads) : multiply<Bf16>(calls, count, threads);
}

extern "C" void rk_linear(const rk_linear_call* call, int32_t threads) { rk_linears(call, 1, threads); }
