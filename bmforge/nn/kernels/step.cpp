// Transformer blocks for one to a few tokens, in one call: see infer/engine/native_step.py.
//
// All threads process the blocks together. Inputs of products are small, so each thread computes
// its own copy. Rows of a product are split over the threads, and each uses its own results.

#include <omp.h>

// A linear layer: a plain weight, or a packed weight with scales.
struct Matrix {
  const void *weight, *scales, *minima;
  Vector bias;
  int64_t rows, columns, group;
  int32_t kind, bits, has_wide_scales, keeps_floats;
  int32_t adapters;  // index of its LoRA updates in the run's table; 0 for none
};

struct AttentionPart {
  Norm norm, query_norm, key_norm;
  Matrix query, key, value, out;
  int64_t heads, shared_heads, width;
  float scale, in_scale, add_scale;
  // mask, prefix: index in the run's tables; prefix 0 means no prefix
  int32_t exists, causal, interleaved, mask, prefix;
};

struct FeedPart {
  Norm norm;
  Matrix gate, up, down;
  float in_scale, add_scale;
  int32_t exists, gated, activation;
};

enum NormPlace { BEFORE, AFTER, PARALLEL };

// Experts of the feed-forward layer; its own matrices are then those of the shared expert.
struct Experts {
  Matrix router, shared_gate;
  const Matrix *gates, *ups, *downs;
  int64_t per_token;
  int32_t normalizes, weighs;
};

struct Layer {
  AttentionPart attn, cross;
  FeedPart feed;
  const Experts* experts;  // may be null
  float sum_scale;
  int32_t norm_place, bias;  // bias: index of one of the run's biases
};

struct Run {
  const Layer* layers;
  const Past *own, *memory;  // one per layer
  const Mask* masks;
  const Bias* biases;
  const Place* places;     // one per token of all rows
  const int64_t* windows;  // number of visible keys per token, by mask index; may be null
  const LowRankUpdates* adapters;
  const Prefix* prefixes;
  Mask memory_mask;
  Rope rope;
  float* x;       // (rows * tokens, hidden), input and output
  uint8_t* room;  // scratch memory of step_room_bytes
  // `stored` keys are already in the caches; `length` is the maximum number of keys.
  int64_t count, rows, tokens, hidden, stored, page_tokens, memory_length, length;
  int64_t widest, heads_width, keys_width, inner, experts, per_token;  // maxima over the layers
  int64_t low_width;  // sum of the ranks of a matrix
  int32_t threads;
};

// Floats shared by all threads, (tokens, width) each, and those of one thread.
struct Room {
  float *query, *key, *value, *up, *gate, *sums, *parts, *routed, *gating, *weights;
  float *normed, *entered, *scores, *vectors, *low[2];
  int32_t *chosen, *order, *places, *starts;
  uint8_t* quantized;
};

struct Thread {
  const Run& run;
  Room room;
  int64_t count;  // tokens of all rows
  Activations a;
  const float* quantized_from;  // input of the last quantization, and its group size
  int64_t quantized_group;
};

static const int64_t SMALLEST_GROUP = 4;

static int64_t shared_floats(const Run& r) {
  const int64_t chosen = r.per_token * (r.hidden + 2) + r.experts + 1;
  const int64_t each = r.heads_width + 2 * r.keys_width + 2 * r.inner + r.hidden + chosen;
  return r.rows * r.tokens * each + 11 * 16;
}

static int64_t own_floats(const Run& r) {
  const int64_t sorted = 2 * r.rows * r.tokens * r.per_token + r.experts + 1;
  const int64_t each = 2 * (r.widest + r.low_width);
  return r.rows * r.tokens * each + r.length + 2 * r.widest + sorted + 9 * 16;
}

static int64_t own_bytes(const Run& r) {
  return align(own_floats(r) * 4) + room_bytes(r.rows * r.tokens, r.widest, SMALLEST_GROUP);
}

extern "C" int64_t step_room_bytes(const Run* r) {
  return align(shared_floats(*r) * 4) + r->threads * own_bytes(*r);
}

static float* take(float*& from, int64_t count) {
  float* start = from;
  from += (count + 15) / 16 * 16;
  return start;
}

static Room divide_room(const Run& r, int thread) {
  Room room;
  const int64_t count = r.rows * r.tokens;
  float* shared = (float*)r.room;
  room.query = take(shared, count * r.heads_width);
  room.key = take(shared, count * r.keys_width);
  room.value = take(shared, count * r.keys_width);
  room.up = take(shared, count * r.inner);
  room.gate = take(shared, count * r.inner);
  room.sums = take(shared, count * r.hidden);
  room.parts = take(shared, count * r.per_token * r.hidden);
  room.routed = take(shared, count * r.experts);
  room.gating = take(shared, count);
  room.weights = take(shared, count * r.per_token);
  room.chosen = (int32_t*)take(shared, count * r.per_token);
  uint8_t* own = r.room + align(shared_floats(r) * 4) + thread * own_bytes(r);
  float* floats = (float*)own;
  room.normed = take(floats, count * r.widest);
  room.entered = take(floats, count * r.widest);
  room.scores = take(floats, r.length);
  room.vectors = take(floats, 2 * r.widest);
  for (float*& low : room.low) low = take(floats, count * r.low_width);
  room.order = (int32_t*)take(floats, count * r.per_token);
  room.places = (int32_t*)take(floats, count * r.per_token);
  room.starts = (int32_t*)take(floats, r.experts + 1);
  room.quantized = own + align(own_floats(r) * 4);
  return room;
}

// Convert the input of a product to the format of the matrix. Two matrices with one input have
// different slots for the inputs of their LoRA updates.
static void enter(Thread& t, const Matrix& m, const float* x, int slot = 0) {
  if (m.adapters)
    enter_updates(t.run.adapters[m.adapters], m.columns, x, t.count, t.room.low[slot]);
  if (m.kind != PACKED || m.keeps_floats) return;
  if (t.quantized_from == x && t.quantized_group == m.group) return;
  t.a = place(t.room.quantized, t.count, m.columns, m.columns / m.group);
  for (int64_t i = 0; i < t.count; i++) quantize_token(x, i, m.columns, m.group, t.a);
  t.quantized_from = x;
  t.quantized_group = m.group;
}

// Panels of a product for all tokens, with biases; results of a token are m.rows floats.
static void multiply_some(Thread& t, const Matrix& m, const float* x, int64_t first, int64_t end,
                          float* out, int slot = 0) {
  const int64_t low = first * PANEL, high = std::min(end * PANEL, m.rows);
  if (m.kind != PACKED) {
    multiply_rows_of({m.weight, m.rows, m.columns, m.kind}, low, high, x, t.count, out, m.rows);
  } else {
    const Product w = {(const uint8_t*)m.weight, m.scales, m.minima, nullptr, x, out, nullptr,
                       t.count, m.rows, m.columns, m.group, m.bits, m.has_wide_scales, 1};
    const Activations* a = m.keeps_floats ? nullptr : &t.a;
    if (m.bits == 8) multiply_panels<8>(w, a, first, end, 0, t.count);
    else multiply_panels<4>(w, a, first, end, 0, t.count);
  }
  if (m.adapters)
    add_updates(t.run.adapters[m.adapters], t.room.low[slot], t.count, low, high, m.rows, out);
  if (!m.bias.data) return;
  float room[PANEL];
  for (int64_t row = low; row < high; row += PANEL) {
    const int64_t count = std::min<int64_t>(PANEL, high - row);
    const float* bias = as_floats(m.bias, row, count, room);
    for (int64_t i = 0; i < t.count; i++)
      for (int64_t j = 0; j < count; j++) out[i * m.rows + row + j] += bias[j];
  }
}

// Distribute the panels of a matrix over the threads dynamically.
template <typename F>
static void for_panels(const Thread& t, const Matrix& m, F f) {
  const int64_t panels = (m.rows + PANEL - 1) / PANEL;
  const int64_t wanted = std::max<int64_t>(panels / (8 * t.run.threads), 1);
  const int64_t piece = (wanted + MOST_PANELS - 1) / MOST_PANELS * MOST_PANELS;
#pragma omp for schedule(dynamic) nowait
  for (int64_t first = 0; first < panels; first += piece)
    f(first, std::min(first + piece, panels));
}

static void wait() {
#pragma omp barrier
}

static void multiply_into(Thread& t, const Matrix& m, const float* x, float* out) {
  enter(t, m, x);
  for_panels(t, m, [&](int64_t first, int64_t end) { multiply_some(t, m, x, first, end, out); });
}

// residual = (residual + product * scale) * sum_scale
static void multiply_onto(Thread& t, const Matrix& m, const float* x, float scale,
                          float sum_scale) {
  float *sums = t.room.sums, *residual = t.run.x;
  enter(t, m, x);
  for_panels(t, m, [&](int64_t first, int64_t end) {
    multiply_some(t, m, x, first, end, sums);
    const int64_t high = std::min(end * PANEL, m.rows);
    for (int64_t i = 0; i < t.count; i++)
      for (int64_t j = i * m.rows + first * PANEL; j < i * m.rows + high; j++)
        residual[j] = (residual[j] + sums[j] * scale) * sum_scale;
  });
}

static const float* scaled(Thread& t, const float* x, float factor) {
  if (factor == 1.0f) return x;
  for (int64_t i = 0; i < t.count * t.run.hidden; i++) t.room.entered[i] = x[i] * factor;
  return t.room.entered;
}

// Input of a layer: the residual, normalized if the norm comes first.
static const float* read_residual(Thread& t, const Norm& norm, int place, float factor) {
  const int64_t hidden = t.run.hidden;
  t.quantized_from = nullptr;
  for (int64_t i = 0; i < t.count; i++) {
    const float* x = t.run.x + i * hidden;
    float* out = t.room.normed + i * hidden;
    if (place == AFTER) memcpy(out, x, hidden * sizeof(float));
    else normalize(norm, x, hidden, out, t.room.vectors);
  }
  return scaled(t, t.room.normed, factor);
}

static void end_part(Thread& t, const Norm& norm, int place) {
  wait();
  if (place != AFTER) return;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < t.count; i++) {
    float* x = t.run.x + i * t.run.hidden;
    normalize(norm, x, t.run.hidden, x, t.room.vectors);
  }
}

// Store a token's new keys and values of a head in the cache.
template <typename E>
static void keep(Thread& t, const AttentionPart& p, const Past& past, int64_t token, int64_t head) {
  const Run& r = t.run;
  const Place& place = r.places[token];
  const int64_t page = place.position / r.page_tokens;
  const int64_t to = place.pages[page] * past.row + head * past.head +
                     (place.position - page * r.page_tokens) * past.token;
  const int64_t from = (token * p.shared_heads + head) * p.width;
  float* key = t.room.key + from;
  normalize(p.key_norm, key, p.width, key, t.room.vectors);
  turn(r.rope, token / r.tokens, token % r.tokens, p.interleaved, key);
  if (past.kind == BYTES) {
    const int64_t at = place.pages[page] * past.scale_row + head * past.scale_head +
                       place.position - page * r.page_tokens;
    int32_t sum;
    quantize_group(key, p.width, (int8_t*)past.keys + to, past.key_scales + at, &sum);
    quantize_group(t.room.value + from, p.width, (int8_t*)past.values + to,
                   past.value_scales + at, &sum);
    return;
  }
  narrow_to(key, p.width, past.kind, (E*)past.keys + to);
  narrow_to(t.room.value + from, p.width, past.kind, (E*)past.values + to);
}

// Keys visible to a token: those before it in its sequence, without masks and biases.
static Stretch find_keys(const Run& r, const AttentionPart& p, const Past& past, int64_t token,
                         int64_t head, bool hides, bool is_own) {
  const Place& place = r.places[token];
  Stretch s = {place.pages, r.page_tokens, past.row, past.token, 0, r.memory_length,
               nullptr, nullptr, past.scale_row};
  if (!is_own) return s;
  if (past.kind == BYTES) {
    s.key_scales = past.key_scales + head * past.scale_head;
    s.value_scales = past.value_scales + head * past.scale_head;
  }
  s.last = hides ? place.position + 1 : r.stored + r.tokens;
  const int64_t window = r.windows ? r.windows[p.mask] : 0;
  if (window) s.first = std::max<int64_t>(0, place.position + 1 - window);
  return s;
}

template <typename E>
static void attend_token(Thread& t, const Layer& layer, const AttentionPart& p, const Past& past,
                         int64_t token, int64_t head, bool is_own) {
  const Run& r = t.run;
  const Mask& mask = is_own ? r.masks[p.mask] : r.memory_mask;
  const Bias& bias = r.biases[is_own ? layer.bias : 0];  // the first bias is empty
  const int64_t group = p.heads / p.shared_heads, at = head * past.head;
  const int64_t row = token / r.tokens, i = token % r.tokens;
  const bool hides = is_own && p.causal && !mask.data && !bias.data;
  const Stretch keys = find_keys(r, p, past, token, head, hides, is_own);
  const Prefix& all = r.prefixes[p.prefix];
  const int64_t skipped = head * all.count * p.width;
  const Prefix front = {all.keys + skipped, all.values + skipped, all.count};
  const uint8_t* seen = mask.data ? mask.data + row * mask.row + i * mask.query : nullptr;
  for (int64_t n = head * group; n < (head + 1) * group; n++) {
    float* query = t.room.query + (token * p.heads + n) * p.width;
    normalize(p.query_norm, query, p.width, query, t.room.vectors);
    if (is_own) turn(r.rope, row, i, p.interleaved, query);
    const float* added =
        bias.data ? bias.data + row * bias.row + n * bias.head + i * bias.query : nullptr;
    attend(query, front, (const E*)past.keys + at, (const E*)past.values + at, keys, past.kind,
           p.width, p.scale, seen, added, t.room.scores);
  }
}

template <typename E>
static void attend_heads(Thread& t, const Layer& layer, const AttentionPart& p, const Past& past,
                         bool is_own) {
  if (is_own) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < t.count * p.shared_heads; i++)
      keep<E>(t, p, past, i % t.count, i / t.count);
  }
#pragma omp for schedule(dynamic) nowait
  for (int64_t i = 0; i < t.count * p.shared_heads; i++)
    attend_token<E>(t, layer, p, past, i % t.count, i / t.count, is_own);
}

static void run_attention(Thread& t, const Layer& layer, const AttentionPart& p, const Past& past,
                          bool is_own, float sum_scale) {
  const float* x = read_residual(t, p.norm, layer.norm_place, p.in_scale);
  multiply_into(t, p.query, x, t.room.query);
  if (is_own) {
    multiply_into(t, p.key, x, t.room.key);
    multiply_into(t, p.value, x, t.room.value);
  }
  wait();
  if (past.kind == FP32) attend_heads<float>(t, layer, p, past, is_own);
  else if (past.kind == BF16) attend_heads<Bf16>(t, layer, p, past, is_own);
  else if (past.kind == BYTES) attend_heads<int8_t>(t, layer, p, past, is_own);
  else attend_heads<uint16_t>(t, layer, p, past, is_own);
  wait();
  t.quantized_from = nullptr;
  multiply_onto(t, p.out, t.room.query, p.add_scale, sum_scale);
}

static void run_feed(Thread& t, const FeedPart& p, const float* x, float sum_scale) {
  float *up = t.room.up, *gate = p.gated ? t.room.gate : nullptr, *inner = gate ? gate : up;
  const int64_t width = p.up.rows;
  enter(t, p.up, x);
  if (gate) enter(t, p.gate, x, 1);
  for_panels(t, p.up, [&](int64_t first, int64_t end) {
    if (gate) multiply_some(t, p.gate, x, first, end, gate, 1);
    multiply_some(t, p.up, x, first, end, up);
    const int64_t count = std::min(end * PANEL, width) - first * PANEL;
    for (int64_t i = 0; i < t.count; i++) {
      const int64_t at = i * width + first * PANEL;
      activate(p.activation, inner + at, gate ? up + at : nullptr, count);
    }
  });
  wait();
  t.quantized_from = nullptr;
  multiply_onto(t, p.down, inner, p.add_scale, sum_scale);
}

