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
using panel::Grid4;
using panel::Grid8;
using panel::Int4;
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
  float* scales;       // of the staged rows
  float* scratch;      // [thread][whole blocks of depth]
  uint32_t* unpacked;  // [thread][panel of int8], for weights in 4 bits

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
    scales = (const float*)(weights + job.blocks * Format::BLOCK_WORDS);
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

// Rows first <= row < end, the staged ones from `staged` on, times one panel, whose weights are given as `Form`; whether
// they are near, in a cache.
template <class Form, class Format>
void multiply_panel(const Job<Format>& job, products::Registers& registers, const Panel<Format>& panel,
                    const uint32_t* weights, bool near, int64_t staged, int64_t first, int64_t end) {
  Sums sums;
  const int64_t step = products::rows_at_once(end - first);
  for (int64_t row = first; row < end; row += step) {
    const int64_t count = std::min(step, end - row), index = row - staged;
    products::multiply<Form>(registers, job.staged + index * job.row_values(), count, job.blocks, weights, near,
                             sums);
    finish(panel, row, count, job.scales + index, sums);
    near = true;
  }
}

// The same with the weights as they are packed, or, where they would be unpacked several times, as those of int8.
template <class Format>
void multiply_packed(const Job<Format>& job, products::Registers& registers, const Panel<Format>& panel,
                     int64_t staged, int64_t first, int64_t end) {
  if constexpr (std::is_same_v<Format, Int4>) {
    if (products::rows_at_once(end - first) < end - first) {
      uint32_t* unpacked = job.unpacked + omp_get_thread_num() * panel::panel_words<Int8>(job.blocks);
      int4::unpack_panel(panel.weights, job.blocks, unpacked);
      return multiply_panel<Int8>(job, registers, panel, unpacked, true, staged, first, end);
    }
  }
  multiply_panel<Format>(job, registers, panel, panel.weights, false, staged, first, end);
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
      multiply_packed(job, registers, Panel<Format>(job, unit / parts), first, first + start, end);
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
  const Taken<float> scales(staged_rows);
  const Taken<float> scratch(std::is_same_v<Format, Bf16> ? 0 : threads * blocks * panel::DEPTH<Int8>);
  const Taken<uint32_t> unpacked(std::is_same_v<Format, Int4> ? threads * panel::panel_words<Int8>(blocks) : 0);
  const Job<Format> job{calls, panels, blocks, staged.memory, scales.memory, scratch.memory, unpacked.memory};
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

// Work memory for one column, whole blocks of it: its values, numbers, and multipliers of those in 4 bits.
struct Column {
  Taken<float> x;
  Taken<int8_t> numbers;
  Taken<uint8_t> multipliers;

  explicit Column(int64_t values) : x(values), numbers(values), multipliers(values / int4::GROUP) {}
};

// Where column n of a panel has its words: so many of each block, in strips one after the other.
template <class Format>
uint32_t* word_of(uint32_t* panel, int n, int64_t word, int block_words) {
  uint32_t* block = panel + word / block_words * Format::BLOCK_WORDS;
  return block + n / panel::STRIP * panel::STRIP * block_words + word % block_words * panel::STRIP + n % panel::STRIP;
}

// Rounds and packs column n of a panel; returns its scale and adds up its values.
float pack_column(const Column& column, int64_t depth, int64_t blocks, uint32_t* panel, int n, int32_t& sum, Int8) {
  const float scale = int8::quantise(column.x.memory, depth, column.numbers.memory, int8::BLOCK);
  for (int64_t k = 0; k < blocks * panel::DEPTH<Int8>; k++) sum += column.numbers.memory[k];
  for (int64_t word = 0; word < blocks * panel::WORDS; word++) {
    memcpy(word_of<Int8>(panel, n, word, panel::WORDS), column.numbers.memory + 4 * word, 4);
  }
  return scale;
}

float pack_column(const Column& column, int64_t depth, int64_t blocks, uint32_t* panel, int n, int32_t& sum, Int4) {
  const int8_t* codes = column.numbers.memory;
  const uint8_t* multipliers = column.multipliers.memory;
  const float scale = int4::quantise(column.x.memory, depth, column.numbers.memory, column.multipliers.memory);
  for (int64_t k = 0; k < blocks * panel::DEPTH<Int4>; k++) sum += codes[k] * multipliers[k / int4::GROUP];
  for (int64_t block = 0; block < blocks; block++, multipliers += 2, codes += panel::DEPTH<Int4>) {
    for (int word = 0; word < int4::HALF_WORDS; word++) {
      uint8_t* to = (uint8_t*)word_of<Int4>(panel, n, block * int4::HALF_WORDS + word, int4::HALF_WORDS);
      for (int i = 0; i < 4; i++) {
        to[i] = (uint8_t)(codes[4 * word + i] + 8 + (codes[int4::GROUP + 4 * word + i] + 8) * 16);
      }
    }
    uint8_t* of_columns = (uint8_t*)(panel + block * Int4::BLOCK_WORDS + Int4::CODE_WORDS);
    of_columns[n] = (uint8_t)(multipliers[0] - 1 + (multipliers[1] - 1) * 16);
  }
  return scale;
}

// Packs in int8 or int4.
template <class Format>
void pack_rounded(const Weights& w, uint32_t* packed, int32_t threads) {
  const int64_t blocks = panel::blocks_of<Format>(w.depth), words = panel::panel_words<Format>(blocks);
#pragma omp parallel num_threads(threads)
  {
    const Column work(blocks * panel::DEPTH<Format>);
#pragma omp for schedule(static)
    for (int64_t number = 0; number < panel::panels_of(w.columns); number++) {
      uint32_t* panel = packed + number * words;
      const int64_t column = number * panel::COLUMNS, end = std::min(w.columns, column + panel::COLUMNS);
      if (end < column + panel::COLUMNS) memset(panel, 0, words * sizeof *panel);
      for (int64_t c = column; c < end; c++) {
        for (int64_t k = 0; k < w.depth; k++) {
          q4h::widen(w.from + c * w.column_stride + k * w.depth_stride, 1, work.x.memory + k);
        }
        int32_t sum = 0;
        const float scale = pack_column(work, w.depth, blocks, panel, (int)(c - column), sum, Format());
        uint32_t* tail = panel + blocks * Format::BLOCK_WORDS;
        memcpy(tail + c - column, &scale, sizeof scale);
        memcpy(tail + panel::COLUMNS + c - column, &sum, sizeof sum);
      }
    }
  }
}

template <class Format>
int64_t packed_words(int64_t columns, int64_t depth) {
  return panel::panels_of(columns) * panel::panel_words<Format>(panel::blocks_of<Format>(depth));
}

}  // namespace

extern "C" int64_t rk_packed_bytes(int32_t format, int64_t columns, int64_t depth) {
  const int64_t words = format == RK_INT4    ? packed_words<Int4>(columns, depth)
                        : format == RK_INT8  ? packed_words<Int8>(columns, depth)
                        : format == RK_GRID4 ? packed_words<Grid4>(columns, depth)
                        : format == RK_GRID8 ? packed_words<Grid8>(columns, depth)
                                             : packed_words<Bf16>(columns, depth);
  return words * (int64_t)sizeof(uint32_t);
}

extern "C" void rk_pack(int32_t format, const uint16_t* weights, int64_t column_stride, int64_t depth_stride,
                        int64_t columns, int64_t depth, void* packed, int32_t threads) {
  const Weights from{weights, column_stride, depth_stride, columns, depth};
  uint32_t* to = (uint32_t*)packed;
  if (format == RK_INT4) return pack_rounded<Int4>(from, to, threads);
  if (format == RK_INT8) return pack_rounded<Int8>(from, to, threads);
  pack_bf16(from, to, threads);
}

extern "C" void rk_linears(const rk_linear_call* calls, int32_t count, int32_t threads) {
  if (calls->format == RK_INT4) return multiply<Int4>(calls, count, threads);
  if (calls->format == RK_INT8) return multiply<Int8>(calls, count, threads);
  if (calls->format == RK_GRID4) return multiply<Grid4>(calls, count, threads);
  if (calls->format == RK_GRID8) return multiply<Grid8>(calls, count, threads);
  multiply<Bf16>(calls, count, threads);
}

extern "C" void rk_linear(const rk_linear_call* call, int32_t threads) { rk_linears(call, 1, threads); }
