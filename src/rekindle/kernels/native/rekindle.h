/* The kernels' C interface: plain pointers and numbers, no torch, no Python.
 *
 * A function returns nothing unless it says so, allocates only work memory of its own, and uses at most `threads`
 * threads. Callers guarantee shapes; nothing is checked here.
 */
#ifndef REKINDLE_H
#define REKINDLE_H

#include <stdint.h>

/* Everything else in a library is hidden: it is compiled with -fvisibility=hidden. */
#pragma GCC visibility push(default)

#ifdef __cplusplus
extern "C" {
#endif

/* The number of this interface; a library with another one is not used. `INTERFACE` in library.py is the same. */
#define RK_INTERFACE 1
int32_t rk_interface(void);

/* Asks the system for what this library's instructions need; 1 if they may be used. Call it before anything else. */
int32_t rk_start(void);

/* Formats of numbers. */
enum { RK_BF16 = 0, RK_FP32 = 1 };

/* Packed weights of a linear layer, out = in * weights^T: how many bytes (RK_BF16 only, for now), and the packing.
 *
 * weights: bf16, that of output column c and depth k at weights[c * column_stride + k * depth_stride].
 * packed: rk_packed_bytes bytes, aligned to 64.
 */
int64_t rk_packed_bytes(int32_t format, int64_t columns, int64_t depth);
void rk_pack(int32_t format, const uint16_t* weights, int64_t column_stride, int64_t depth_stride, int64_t columns,
             int64_t depth, void* packed, int32_t threads);

/* output[rows, columns] = input[rows, depth] * weights^T + bias. Strides are numbers of values from row to row. */
typedef struct {
  int32_t format;        /* of the packed weights */
  int32_t output_format; /* RK_BF16: rounded once, bias included; or RK_FP32 */
  const void* packed;
  const uint16_t* bias; /* bf16 [columns], or NULL */
  const uint16_t* input; /* bf16 */
  void* output;
  int64_t rows, columns, depth;
  int64_t input_stride, output_stride;
} rk_linear_call;

void rk_linear(const rk_linear_call* call, int32_t threads);

#ifdef __cplusplus
}
#endif

#pragma GCC visibility pop

#endif
