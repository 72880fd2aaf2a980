/* The kernels' C interface: plain pointers and numbers, no torch, no Python.
 *
 * A function returns nothing unless it says so, allocates only work memory of its own, and uses at most `threads`
 * threads. Callers guarantee shapes; nothing is checked here. Without memory for that the process ends (abort).
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
#define RK_INTERFACE 8
int32_t rk_interface(void);

/* Asks the system for what this library's instructions need; 1 if they may be used. Call it before anything else. */
int32_t rk_start(void);

/* Formats of numbers; RK_Q4H and RK_Q8H are those of K and V in 4 and 8 bits, RK_INT8 that of weights and rows in 8,
 * RK_INT4 that of weights in 4, RK_GRID4 and RK_GRID8 those of weights that come in codes of 4 and 8 bits. */
enum {
    RK_BF16 = 0, RK_FP32 = 1, RK_Q4H = 2, RK_INT8 = 3, RK_INT4 = 4, RK_Q8H = 5, RK_GRID4 = 6, RK_GRID8 = 7
};

/* Packed weights of a linear layer, out = in * weights^T: how many bytes, and the packing, as RK_BF16, RK_INT8, RK_INT4.
 *
 * RK_INT8: a column of weights, and every row it is multiplied by, is rounded to int8 with a scale of its own after a
 * rotation. The depth is at most 2^16. All levels give the same bits.
 *
 * RK_INT4: the same, but every 32 weights are such numbers as 4 bits times a multiplier of their own can be.
 *
 * RK_GRID4, RK_GRID8: every 32 weights are codes times a step in fp16; with 4 bits an offset in fp16 is added, with 8 bits
 * 128 is taken from the code. Callers pack them, as native/panel.hpp lays them out. Every 32 values of a row are rounded
 * to 16 bits with a scale of their own. The depth is at most 2^16, and all levels give the same bits.
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
  const uint16_t* bias;  /* bf16 [columns], or NULL */
  const uint16_t* input; /* bf16 */
  void* output;
  int64_t rows, columns, depth;
  int64_t input_stride, output_stride;
} rk_linear_call;

void rk_linear(const rk_linear_call* call, int32_t threads);

/* Several layers of one input: format, input, rows, depth and input_stride of all calls are the same. */
void rk_linears(const rk_linear_call* calls, int32_t count, int32_t threads);

/* Where a layer keeps K and V: block b at blocks + b * block_bytes, its sections at these offsets.
 *
 * K and V have a format each, RK_Q4H, RK_Q8H or RK_BF16 (without scales). Shapes are those of rekindle.spec. Dimensions
 * are at most 512; RK_Q4H and RK_Q8H: multiples of 16 (at most 256 for those of V in RK_Q4H that are no multiples of 32);
 * RK_BF16: even.
 *
 * latent: 1 where K is a latent and V a rotary key in RK_BF16, of a multiple of 16 dimensions up to 128, as eight words
 * are read at once: queries have the dimensions of both, scores are of both, and what is summed is K.
 */
typedef struct {
  uint8_t* blocks;
  const float* signs; /* [512], of the rotation */
  int64_t block_bytes, block_tokens, kv_heads;
  int64_t k, k_scales, k_dim;
  int64_t v, v_scales, v_dim;
  int32_t k_format, v_format;
  int32_t latent;
} rk_layer;

/* Rows of bf16 values for every head; strides are numbers of values from row to row and from head to head. */
typedef struct {
  const uint16_t* values;
  int64_t row_stride, head_stride;
} rk_rows;

/* Stores K and V of `rows` rows: row r at token offsets[r] of block blocks[r], or nowhere where that is negative.
 *
 * worst: fp32 [rows], raised to the largest magnitude in the row, rotated but in RK_BF16, infinity or NaN if there is one.
 * Values that are not finite are stored as some that are.
 */
typedef struct {
  int64_t rows;
  const int32_t* blocks;
  const int32_t* offsets;
  rk_rows k, v;
  float* worst;
} rk_write_call;

void rk_write(const rk_layer* layer, const rk_write_call* call, int32_t threads);

/* Rows start .. start + rows of a sequence, which are the call's rows from `row` on; blocks[i] holds its tokens from
 * i * block_tokens on, up to the last row's at least. ends: the position after the last token that each row sees, never
 * less than that of the row before, or NULL: each sees up to itself. */
typedef struct {
  const int32_t* blocks;
  int64_t start, rows, row;
  const int64_t* ends;
} rk_span;

/* Attention of every span to what is stored of its sequence, up to the row itself or where `ends` says.
 *
 * output: bf16 [rows][heads][v_dim], of a latent layer [k_dim]. window: how many tokens a row sees, itself included,
 * or 0 for all. softcap: 0 for none. sinks: fp32 [heads], or NULL.
 */
typedef struct {
  const rk_span* spans;
  int64_t num_spans, heads, window;
  rk_rows q;
  uint16_t* output;
  const float* sinks;
  float scaling, softcap;
} rk_attend_call;

void rk_attend(const rk_layer* layer, const rk_attend_call* call, int32_t threads);

/* RMSNorm: x / sqrt(mean of x^2 + epsilon) * weight.
 *
 * weight: fp32, readable up to a multiple of 16. rounds_first: whether the quotient is rounded to bf16 before it is
 * multiplied, as in Llama, or only the product, as in Gemma.
 */
typedef struct {
  const float* weight; /* [columns] */
  int64_t columns;
  float epsilon;
  int32_t rounds_first;
} rk_norm;

/* output[rows, columns] of input[rows, columns], bf16; they may be the same. */
void rk_normalise(const rk_norm* norm, const uint16_t* input, int64_t input_stride, uint16_t* output, int64_t rows,
                  int32_t threads);

/* A linear layer: packed weights and its bias, bf16 [columns] or NULL. */
typedef struct {
  const void* packed;
  const uint16_t* bias;
  int64_t columns, depth;
  int32_t format;
} rk_weights;

enum { RK_SILU = 0, RK_GELU_TANH = 1 };

/* down(activation(gate(x)) * up(x)) with `inner` gates. up: packed is NULL where its columns follow those of `gate`. */
typedef struct {
  rk_weights gate, up, down;
  int64_t inner;
  int32_t activation;
} rk_mlp;

/* output[rows, columns of down] of input[rows, depth of gate], bf16, without gaps between rows. */
void rk_gated_mlp(const rk_mlp* mlp, const uint16_t* input, uint16_t* output, int64_t rows, int32_t threads);

/* Gates of experts: RK_SILU and RK_GELU_TANH as above; RK_SWISH is gate * sigmoid(alpha * gate) * (up + 1). */
enum { RK_SWISH = 2 };

/* Experts of one layer: down(gate(up(x))). `up` gives 2 * inner values, all gates before all others, or in turns where
 * `interleaved` is 1. Gates are at most `limit`, the others between -limit and limit; it is infinity where there is none.
 * A bias is added to the product as it was rounded.
 *
 * up, down: [experts], all of the same sizes and format; the two may have different ones.
 */
typedef struct {
  const rk_weights *up, *down;
  int64_t experts, inner;
  int32_t activation, interleaved;
  float limit, alpha;
} rk_experts;

/* output[tokens, size] = the sum of every token's chosen experts, each times its share. input, output: bf16 without
 * gaps, not the same memory. indices: [tokens][chosen], of experts. shares: [tokens][chosen]; with RK_BF16 each product
 * is rounded before they are summed, with RK_FP32 only the sum.
 */
typedef struct {
  int64_t tokens, chosen;
  const uint16_t* input;
  const int64_t* indices;
  const void* shares;
  int32_t share_format;
  uint16_t* output;
} rk_experts_call;

void rk_mix(const rk_experts* experts, const rk_experts_call* call, int32_t threads);

/* Which experts a token takes: those with the largest logits, the first of equal ones, largest first, and their shares:
 * the softmax over all logits, or with `chosen_only` over those of the chosen ones.
 *
 * weights: those of the logits, one for each expert; `chosen` is at most their number. share_format: RK_BF16 or RK_FP32.
 */
typedef struct {
  rk_weights weights;
  int64_t chosen;
  int32_t chosen_only, share_format;
} rk_router;

/* indices: [rows][chosen]; shares: [rows][chosen] in the router's format. logits: bf16 [rows][experts]. */
void rk_choose(const rk_router* router, const uint16_t* logits, int64_t rows, int64_t* indices, void* shares,
               int32_t threads);

/* A router and the experts among which it chooses. */
typedef struct {
  rk_router router;
  rk_experts experts;
} rk_mixture;

/* A decoder layer of Llama's form: x + o(attention(q, k, v of norm(x))), and of that y + mlp(norm(y)); or of Gemma's,
 * which has norms of what is added, too. q_norm and k_norm are those of each head. Every layer has `input_norm` and
 * `mlp_norm`; where it has no other, the weight is NULL. Everything is rounded to bf16 where transformers does it. The
 * size of heads is a multiple of 32.
 *
 * mixture: takes the place of `mlp`, or NULL. Where that is NULL and `mlp` is all zeros, the output is y.
 */
typedef struct {
  rk_norm input_norm, mlp_norm, q_norm, k_norm, attention_output_norm, mlp_output_norm;
  rk_weights q, k, v, o;
  rk_mlp mlp;
  const rk_mixture* mixture;
} rk_decoder;

/* input, output: bf16 [rows][size], the latter may be the former. cos, sin: bf16 [rows][k_dim], of each row's position.
 * k, v of `write` and q, output of `attend` are set by the call. Rows that are in no span attend to nothing.
 */
typedef struct {
  const uint16_t* input;
  uint16_t* output;
  const uint16_t *cos, *sin;
  rk_write_call write;
  rk_attend_call attend;
} rk_decoder_call;

void rk_decoder_layer(const rk_decoder* decoder, const rk_layer* layer, const rk_decoder_call* call, int32_t threads);

/* A record in an open file from `offset` on: a header, which must be `header`, a payload and its padding, whose CRC-32 (as
 * zlib has it) must be `crc`. The payload goes to `payload`, whatever it is; another header leaves that as it was.
 */
typedef struct {
  const uint8_t* header;
  uint8_t* payload;
  int64_t offset, header_bytes, payload_bytes, padding_bytes;
  int32_t file; /* its descriptor */
  uint32_t crc;
} rk_record;

/* Reads records in order; returns how many are as they must be, up to the first that is not, or cannot be read. */
int64_t rk_read_records(const rk_record* records, int64_t count);

#ifdef __cplusplus
}
#endif

#pragma GCC visibility pop

#endif
