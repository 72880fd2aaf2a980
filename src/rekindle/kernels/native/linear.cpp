// Linear layers over packed weights: rk_pack and rk_linear.
//
// Rows are staged in the form that this level multiplies, in blocks that stay in the L2 cache. Threads share the panels
// of 64 columns evenly, and where there are few of them, the rows of a block as well. An output is summed by one thread
// over the whole depth in one order, so its bits depend on its row and its column of weights alone.
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "panel.hpp"
#include "rekindle.h"

#if defined(__AMX_BF16__)
#include "tiles.hpp"
namespace products = tiles;
#else
#include "dots.hpp"
namespace products = dots;
#endif

namespace {

using panel::Sums;
using products::Staged;

constexpr int64_t BLOCK_BYTES = 1 << 20;      // of staged rows
constexpr int64_t PART_ROWS = 48;             // the fewest that a thread takes of a block's rows: whole groups, tiles
constexpr int64_t SERIAL_PRODUCTS = 1 << 16;  // below, a second thread costs more than it saves

struct Released {
  void operator()(void* memory) const { free(memory); }
};

struct Job {
  const rk_linear_call& call;
  int64_t panels, blocks;
  Staged* staged;

  const uint16_t* weights(int64_t panel) const {
    return (const uint16_t*)call.packed + panel * blocks * panel::BLOCK_VALUES;
  }
};

// Adds the bias to `count` rows of sums, rounds once, and writes the columns that exist.
void finish(const Job& job, int64_t panel, int64_t row, int64_t count, const Sums& sums) {
  const rk_linear_call& call = job.call;
  const int64_t column = panel * panel::COLUMNS;
  const int64_t width = std::min<int64_t>(panel::COLUMNS, call.columns - column);
  const int64_t size = call.output_format == RK_FP32 ? sizeof(float) : sizeof(uint16_t);
  alignas(64) uint16_t bias[panel::COLUMNS] = {};
  alignas(64) float line[panel::COLUMNS];
  if (call.bias != nullptr) memcpy(bias, call.bias + column, width * sizeof(uint16_t));
  for (int64_t r = 0; r < count; r++) {
    uint8_t* to = (uint8_t*)call.output + ((row + r) * call.output_stride + column) * size;
    void* out = width == panel::COLUMNS ? (void*)to : (void*)line;
    for (int n = 0; n < panel::COLUMNS; n += simd::LANES) {
      simd::Vec sum = simd::load(sums.at[r] + n);
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
void multiply_panel(const Job& job, products::Registers& registers, int64_t panel, int64_t staged, int64_t first,
                    int64_t end) {
  Sums sums;
  const int64_t depth = job.blocks * panel::DEPTH;
  const int64_t step = products::rows_at_once(end - first);
  for (int64_t row = first; row < end; row += step) {
    const int64_t count = std::min(step, end - row);
    const Staged* from = job.staged + (row - staged) * depth;
    products::multiply(registers, from, count, job.blocks, job.weights(panel), sums);
    finish(job, panel, row, count, sums);
  }
}

// One thread's share of a block of rows; all threads of a team call it.
void multiply_block(const Job& job, int64_t first, int64_t rows) {
  const rk_linear_call& call = job.call;
#pragma omp for schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    products::stage_row(call.input + (first + r) * call.input_stride, r, call.depth, job.staged);
  }
  const int64_t wanted = (4 * omp_get_num_threads() + job.panels - 1) / job.panels;
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, rows / PART_ROWS));
  const int64_t part = (rows + parts * PART_ROWS - 1) / (parts * PART_ROWS) * PART_ROWS;
  products::Registers registers;
#pragma omp for schedule(static)
  for (int64_t unit = 0; unit < job.panels * parts; unit++) {
    const int64_t start = unit % parts * part;
    if (start < rows) {
      multiply_panel(job, registers, unit / parts, first, first + start, first + std::min(rows, start + part));
    }
  }
}

void pack_block(const uint16_t* from, int64_t column_stride, int64_t depth_stride, int64_t width, int64_t steps,
                uint16_t* block) {
  memset(block, 0, panel::BLOCK_VALUES * sizeof(uint16_t));
  for (int64_t n = 0; n < width; n++) {
    uint16_t* to = block + n / panel::STRIP * panel::STRIP_VALUES + n % panel::STRIP * 2;
    for (int64_t k = 0; k < steps; k++) {
      to[k / 2 * 2 * panel::STRIP + k % 2] = from[n * column_stride + k * depth_stride];
    }
  }
}

// 64 columns whose 32 values each lie side by side: words are transposed in registers.
void pack_whole_block(const uint16_t* from, int64_t column_stride, uint16_t* block) {
  const int64_t stride = column_stride * (int64_t)sizeof(uint16_t);
  for (int n = 0; n < panel::COLUMNS; n += simd::LANES) {
    uint16_t* to = block + n / panel::STRIP * panel::STRIP_VALUES + n % panel::STRIP * 2;
    for (int pair = 0; pair < panel::DEPTH / 2; pair += 8) {
      simd::Bits words[8];
      simd::load_transposed((const uint8_t*)(from + n * column_stride + 2 * pair), stride, words);
      UNROLL for (int i = 0; i < 8; i++) simd::store_bits(to + (pair + i) * 2 * panel::STRIP, words[i]);
    }
  }
}

}  // namespace

extern "C" int64_t rk_packed_bytes(int32_t, int64_t columns, int64_t depth) {
  return panel::panels_of(columns) * panel::blocks_of(depth) * panel::BLOCK_VALUES * (int64_t)sizeof(uint16_t);
}

extern "C" void rk_pack(int32_t, const uint16_t* weights, int64_t column_stride, int64_t depth_stride, int64_t columns,
                        int64_t depth, void* packed, int32_t threads) {
  const int64_t blocks = panel::blocks_of(depth), count = panel::panels_of(columns) * blocks;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) {
    uint16_t* block = (uint16_t*)packed + i * panel::BLOCK_VALUES;
    const int64_t column = i / blocks * panel::COLUMNS, first = i % blocks * panel::DEPTH;
    const int64_t width = std::min<int64_t>(panel::COLUMNS, columns - column);
    const int64_t steps = std::min<int64_t>(panel::DEPTH, depth - first);
    const uint16_t* from = weights + column * column_stride + first * depth_stride;
    if (width == panel::COLUMNS && steps == panel::DEPTH && depth_stride == 1) {
      pack_whole_block(from, column_stride, block);
    } else {
      pack_block(from, column_stride, depth_stride, width, steps, block);
    }
  }
}

extern "C" void rk_linear(const rk_linear_call* call, int32_t threads) {
  const int64_t panels = panel::panels_of(call->columns), blocks = panel::blocks_of(call->depth);
  const int64_t row_bytes = blocks * panel::DEPTH * (int64_t)sizeof(Staged);
  const int64_t most = std::max<int64_t>(2 * PART_ROWS, BLOCK_BYTES / row_bytes / PART_ROWS * PART_ROWS);
  const int64_t rows = std::min(call->rows, most);
  const int64_t staged_rows = (rows + Sums::ROWS - 1) / Sums::ROWS * Sums::ROWS;
  const std::unique_ptr<void, Released> memory(aligned_alloc(64, staged_rows * row_bytes));
  if (memory == nullptr) abort();
  const Job job{*call, panels, blocks, (Staged*)memory.get()};
  if (call->rows * call->columns * call->depth < SERIAL_PRODUCTS) threads = 1;
#pragma omp parallel num_threads(threads)
  for (int64_t first = 0; first < call->rows; first += rows) {
    multiply_block(job, first, std::min(rows, call->rows - first));
  }
}
