// Attention over blocks: the body of rk_attend, for one kind of products.
//
// Included by attend.cpp in a namespace for each kind, in which `products` names it. A piece of work is up to 64 rows of
// a span with query heads of one K/V head. Its context is taken in segments of 512 tokens from position 0 on, each
// unpacked once for all its rows, and the segments' results are merged in order. Where there are fewer pieces than
// threads could share, the segments of a piece are computed by several threads and merged afterwards, in the same order:
// the same bits.
//
// Of a latent layer, queries are of the latent and the rotary key, and sums are of latents.

using products::Segment;
using products::Shape;
using simd::LANES;
using softmax::Mass;
using softmax::Seen;
using softmax::TOKENS;

constexpr int64_t PIECE_ROWS = 64;
constexpr int64_t PIECE_QUERIES = 512;      // rows times heads: what a segment is unpacked for, at most
constexpr int64_t SERIAL_SCORES = 1 << 12;  // below, a second thread costs more than it saves
constexpr int64_t MOST_PARTIALS = 1 << 24;  // floats of results that wait to be merged
constexpr int64_t PIECES_EACH = 4;          // for each thread, so that all have about the same to do
constexpr float UNSEEN = -1.f;              // the sum of weights of a row that has seen nothing

struct Job {
  const rk_layer& layer;
  const rk_attend_call& call;
  Shape shape;
  const uint16_t* q;  // bf16 [rows][heads][q_dim], rotated and scaled
  int64_t heads_per_kv;
  float cap;  // softcap in units of log 2, or 0

  int64_t sum_floats() const { return shape.sum_floats(); }
  int64_t state_floats() const { return sum_floats() + LANES; }
};

// Rows first .. end of a span with `heads` query heads from `first_head` on, all of one K/V head, and the segments that
// they see.
struct Piece {
  const rk_span* span;
  int64_t first, end, kv_head, first_head, heads;
  int64_t first_segment, end_segment;
  float* partials;  // [segment][folded row][state], where several threads share the piece

  int64_t rows() const { return (end - first) * heads; }
  int64_t segments() const { return end_segment - first_segment; }
};

// The position after the last token that a row of a span sees; no less than that of the row before.
int64_t end_of(const rk_span& span, int64_t index) { return span.ends ? span.ends[index] : span.start + index + 1; }

// Where a folded row of a piece is: (row, query head).
struct Row {
  int64_t position, end, row, head;

  Row(const Piece& piece, int64_t folded) {
    const int64_t index = piece.first + folded / piece.heads;
    position = piece.span->start + index;
    end = end_of(*piece.span, index);
    row = piece.span->row + index;
    head = piece.first_head + folded % piece.heads;
  }
};

// How many of the query heads of a K/V head are in a piece of so many rows; about as many in each.
int64_t heads_together(const Job& job, int64_t rows) {
  const int64_t most = PIECE_QUERIES / rows, pieces = (job.heads_per_kv + most - 1) / most;
  return (job.heads_per_kv + pieces - 1) / pieces;
}

struct Scratch {
  products::Registers registers;
  Segment segment;
  float* scores;      // [MOST_ROWS][SCORE_ROW]
  uint32_t* weights;  // [MOST_ROWS][weight_row]: [TOKENS / 2][entries], and a vector more
  float* sums;        // [MOST_ROWS][sums of V]
  float* states;      // [folded row of a piece][state]
  void* memory;

  explicit Scratch(const Job& job) {
    const Shape& shape = job.shape;
    const int64_t rows = products::MOST_ROWS;
    const int64_t sizes[] = {shape.k_words(),
                             shape.k_steps(),
                             shape.v_words(),
                             shape.v_steps(),
                             shape.query_words(),
                             rows * softmax::SCORE_ROW,
                             rows * softmax::weight_row(shape.entries),
                             rows * shape.sum_floats(),
                             std::min(PIECE_QUERIES, PIECE_ROWS * job.heads_per_kv) * job.state_floats()};
    constexpr int COUNT = sizeof sizes / sizeof *sizes;
    int64_t offsets[COUNT + 1] = {};
    for (int i = 0; i < COUNT; i++) offsets[i + 1] = offsets[i] + (sizes[i] + 15) / 16 * 16;
    memory = aligned_alloc(64, offsets[COUNT] * 4);
    if (memory == nullptr) abort();
    memset(memory, 0, offsets[5] * 4);
    const auto words = [&](int i) { return (uint32_t*)memory + offsets[i]; };
    const auto floats = [&](int i) { return (float*)memory + offsets[i]; };
    segment = {words(0), floats(1), words(2), floats(3), words(4)};
    scores = floats(5), weights = words(6), sums = floats(7), states = floats(8);
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() { free(memory); }
};

// Scales and rotates the queries as K is, so that their products are those of the original vectors.
void prepare_queries(const Job& job, uint16_t* out) {
  const rk_attend_call& call = job.call;
  const int dim = (int)q4h::query_dim(job.layer);
  const float factor = call.softcap == 0.f ? call.scaling * softmax::LOG2_E : call.scaling / call.softcap;
  for (int64_t s = 0; s < call.num_spans; s++) {
    const rk_span& span = call.spans[s];
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < span.rows * call.heads; i++) {
      const int64_t row = span.row + i / call.heads, head = i % call.heads;
      const uint16_t* from = call.q.values + row * call.q.row_stride + head * call.q.head_stride;
      alignas(64) float x[q4h::MOST_QUERY + LANES];
      q4h::widen(from, dim, x);
      if (job.layer.k_format != RK_BF16) q4h::rotate(x, (int)job.layer.k_dim, job.layer.signs);
      alignas(64) uint16_t line[q4h::MOST_QUERY + LANES];
      for (int d = 0; d < dim; d += LANES) {
        simd::store_bf16(line + d, simd::mul(simd::load(x + d), simd::broadcast(factor)));
      }
      memcpy(out + (row * call.heads + head) * dim, line, dim * sizeof *line);
    }
  }
#pragma omp barrier
}

// Adds a segment's sums and mass to a row's state: [sums of V][largest score, sum of weights].
void merge(const float* sums, Mass mass, int64_t count, float* state) {
  float* largest = state + count;
  float* sum = largest + 1;
  if (*sum == UNSEEN) {
    memcpy(state, sums, count * sizeof *sums);
    *largest = mass.largest, *sum = mass.sum;
    return;
  }
  const float most = mass.largest > *largest ? mass.largest : *largest;
  alignas(64) float factors[LANES] = {*largest - most, mass.largest - most};
  simd::store(factors, simd::exp2(simd::load(factors)));
  const simd::Vec before = simd::broadcast(factors[0]), now = simd::broadcast(factors[1]);
  for (int64_t i = 0; i < count; i += LANES) {
    simd::store(state + i, simd::fmadd(simd::load(sums + i), now, simd::mul(simd::load(state + i), before)));
  }
  *largest = most, *sum = *sum * factors[0] + mass.sum * factors[1];
}

Seen seen_by(const Job& job, const Row& row, int64_t start) {
  const int64_t window = job.call.window;
  const int64_t end = row.end - start, first = window > 0 ? row.position + 1 - window - start : 0;
  return {(int)(first > 0 ? (first < TOKENS ? first : TOKENS) : 0), (int)(end < TOKENS ? end : TOKENS)};
}

// Folded rows of a piece, from `folded` on, over the unpacked segment that begins at `start`.
void attend_rows(const Job& job, const Piece& piece, int64_t folded, int rows, int64_t start, float* states,
                 Scratch& s) {
  const uint16_t* q[products::MOST_ROWS];
  Seen seen[products::MOST_ROWS];
  int tokens = 0;
  for (int r = 0; r < rows; r++) {
    const Row row(piece, folded + r);
    q[r] = job.q + (row.row * job.call.heads + row.head) * q4h::query_dim(job.layer);
    seen[r] = seen_by(job, row, start);
    if (seen[r].any() && seen[r].end > tokens) tokens = seen[r].end;
  }
  if (tokens == 0) return;
  tokens = (tokens + softmax::STEP - 1) / softmax::STEP * softmax::STEP;
  Mass mass[products::MOST_ROWS];
  products::attend(s.segment, job.shape, {q, seen, rows, tokens, job.cap, s.scores, s.weights, s.sums, mass});
  for (int r = 0; r < rows; r++) {
    float* state = states + (folded + r) * job.state_floats();
    if (seen[r].any()) merge(s.sums + r * job.sum_floats(), mass[r], job.sum_floats(), state);
  }
}

// Merges what a piece's rows see of one segment into their states.
void attend_segment(const Job& job, const Piece& piece, int64_t index, float* states, Scratch& s) {
  const int64_t start = index * TOKENS, last = end_of(*piece.span, piece.end - 1);
  const int count = (int)(last - start < TOKENS ? last - start : TOKENS);
  products::unpack(job.layer, piece.span->blocks, start, count, piece.kv_head, job.shape, s.segment);
  const int64_t rows = piece.rows(), groups = (rows + products::MOST_ROWS - 1) / products::MOST_ROWS;
  const int64_t step = (rows + groups - 1) / groups;
  for (int64_t folded = 0; folded < rows; folded += step) {
    attend_rows(job, piece, folded, (int)std::min(step, rows - folded), start, states, s);
  }
}

// What a row's weights sum up to is 1 after this factor, the sink's included.
float normaliser(const rk_attend_call& call, int64_t head, Mass mass) {
  if (call.sinks == nullptr) return 1.f / mass.sum;
  const float sink = call.sinks[head] * softmax::LOG2_E, most = sink > mass.largest ? sink : mass.largest;
  alignas(64) float factors[LANES] = {mass.largest - most, sink - most};
  simd::store(factors, simd::exp2(simd::load(factors)));
  return factors[0] / (mass.sum * factors[0] + factors[1]);
}

void finish_row(const Job& job, const Row& row, const float* state) {
  const rk_layer& layer = job.layer;
  const int dim = (int)q4h::output_dim(layer);
  alignas(64) float x[q4h::MOST_DIMS + LANES];
  const Mass mass{state[job.sum_floats()], state[job.sum_floats() + 1]};
  products::gather(layer, job.shape, state, normaliser(job.call, row.head, mass), x);
  if (q4h::output_format(layer) != RK_BF16) q4h::unrotate(x, dim, layer.signs);
  alignas(64) uint16_t line[q4h::MOST_DIMS + LANES];
  for (int d = 0; d < dim; d += LANES) simd::store_bf16(line + d, simd::load(x + d));
  memcpy(job.call.output + (row.row * job.call.heads + row.head) * dim, line, dim * sizeof *line);
}

void forget(const Job& job, int64_t rows, float* states) {
  for (int64_t i = 0; i < rows; i++) states[i * job.state_floats() + job.sum_floats() + 1] = UNSEEN;
}

void attend_piece(const Job& job, const Piece& piece, Scratch& s) {
  forget(job, piece.rows(), s.states);
  for (int64_t index = piece.first_segment; index < piece.end_segment; index++) {
    attend_segment(job, piece, index, s.states, s);
  }
  for (int64_t i = 0; i < piece.rows(); i++) {
    finish_row(job, Row(piece, i), s.states + i * job.state_floats());
  }
}

// Merges in order what threads have computed of a row's segments.
void merge_row(const Job& job, const Piece& piece, int64_t folded, float* state) {
  const int64_t size = job.state_floats();
  forget(job, 1, state);
  for (int64_t n = 0; n < piece.segments(); n++) {
    const float* part = piece.partials + (n * piece.rows() + folded) * size;
    const Mass mass{part[job.sum_floats()], part[job.sum_floats() + 1]};
    if (mass.sum != UNSEEN) merge(part, mass, job.sum_floats(), state);
  }
  finish_row(job, Row(piece, folded), state);
}

// All pieces, the longest of each span first; returns how many. `pieces`: NULL to count them.
int64_t list_pieces(const Job& job, Piece* pieces) {
  int64_t count = 0;
  for (int64_t s = 0; s < job.call.num_spans; s++) {
    const rk_span& span = job.call.spans[s];
    for (int64_t chunk = (span.rows - 1) / PIECE_ROWS; chunk >= 0; chunk--) {
      const int64_t first = chunk * PIECE_ROWS, end = std::min(span.rows, first + PIECE_ROWS);
      const int64_t window = job.call.window, oldest = window > 0 ? span.start + first + 1 - window : 0;
      const int64_t first_segment = oldest > 0 ? oldest / TOKENS : 0;
      const int64_t end_segment = (end_of(span, end - 1) + TOKENS - 1) / TOKENS;
      const int64_t together = heads_together(job, end - first);
      for (int64_t head = 0; head < job.call.heads; count++) {
        const int64_t kv_head = head / job.heads_per_kv, left = (kv_head + 1) * job.heads_per_kv - head;
        const int64_t heads = std::min(together, left);
        if (pieces) pieces[count] = {&span, first, end, kv_head, head, heads, first_segment, end_segment, nullptr};
        head += heads;
      }
    }
  }
  return count;
}

// Several threads share the segments of each piece; all threads of a team call it.
void attend_by_segment(const Job& job, Piece* pieces, int64_t count, float* partials, Scratch& s) {
#pragma omp single
  for (int64_t i = 0; i < count; i++) {
    pieces[i].partials = partials;
    partials += pieces[i].segments() * pieces[i].rows() * job.state_floats();
  }
  for (int64_t i = 0; i < count; i++) {
    const Piece& piece = pieces[i];
#pragma omp for schedule(dynamic) nowait
    for (int64_t n = 0; n < piece.segments(); n++) {
      float* states = piece.partials + n * piece.rows() * job.state_floats();
      forget(job, piece.rows(), states);
      attend_segment(job, piece, piece.first_segment + n, states, s);
    }
  }
#pragma omp barrier
  for (int64_t i = 0; i < count; i++) {
    const Piece& piece = pieces[i];
#pragma omp for schedule(static) nowait
    for (int64_t folded = 0; folded < piece.rows(); folded++) merge_row(job, piece, folded, s.states);
  }
}

int64_t partial_floats(const Job& job, const Piece* pieces, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) total += pieces[i].segments() * pieces[i].rows();
  return total * job.state_floats();
}

int64_t count_scores(const rk_attend_call& call) {
  int64_t count = 0;
  for (int64_t s = 0; s < call.num_spans; s++) count += call.spans[s].rows * (call.spans[s].start + call.spans[s].rows);
  return count * call.heads;
}

static void attend(const rk_layer& layer, const rk_attend_call& call, int32_t threads) {
  int64_t rows = 0;
  for (int64_t s = 0; s < call.num_spans; s++) rows = std::max(rows, call.spans[s].row + call.spans[s].rows);
  const Taken<uint16_t> q(rows * call.heads * q4h::query_dim(layer));
  const Job job{layer, call, Shape(layer), q.memory, call.heads / layer.kv_heads, call.softcap * softmax::LOG2_E};
  const int64_t count = list_pieces(job, nullptr);
  const Taken<Piece> pieces(count);
  list_pieces(job, pieces.memory);
  if (count_scores(call) < SERIAL_SCORES) threads = 1;
  const bool shared =
      threads > 1 && count < PIECES_EACH * threads && partial_floats(job, pieces.memory, count) <= MOST_PARTIALS;
  const Taken<float> partials(shared ? partial_floats(job, pieces.memory, count) : 0);
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch(job);
    prepare_queries(job, q.memory);
    if (shared) {
      attend_by_segment(job, pieces.memory, count, partials.memory, scratch);
    } else {
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < count; i++) attend_piece(job, pieces.memory[i], scratch);
    }
  }
}
