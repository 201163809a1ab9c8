// Products of packed weights with one to many tokens; see packing.py for the layout.
//
// The rounding of every step is fixed: activations are quantized by group, a group's products are
// summed as integers, and the groups' sums, multiplied by the scales, are added in group order.

#include <algorithm>
#include <limits>

struct Product {
  const uint8_t* packed;  // (panels, blocks, 64)
  const void* scales;     // (panels, groups, 16)
  const void* minima;     // the same, or null
  const float* bias;      // (rows), or null
  const float* x;         // (tokens, columns)
  float* out;             // (tokens, rows)
  uint8_t* room;          // scratch memory of `room_bytes` bytes
  int64_t tokens, rows, columns, group;
  int32_t bits, has_wide_scales, threads;
};

static const int PANEL = 16, BLOCK = 64;
// Activations up to this size stay in a core's cache while it reads all its weights.
static const int64_t NEAR_BYTES = 384 << 10;
// Distance of the software prefetch. The hardware prefetcher alone is too late with 4 bits or
// several tokens. Some processors are faster with a smaller distance (`_AHEAD_BYTES`).
#ifndef AHEAD_BYTES
#define AHEAD_BYTES 2048
#endif
// Smaller products take less time than waking up threads.
static const int64_t FEW_ELEMENTS = 1 << 17;

struct Activations {
  int8_t* values;  // (tokens, columns)
  float* scales;   // (tokens, groups)
  int32_t* sums;   // (tokens, groups): sums of the integer values
};

static int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static Activations place(uint8_t* room, int64_t tokens, int64_t columns, int64_t groups) {
  Activations a;
  a.values = (int8_t*)room;
  a.scales = (float*)(room + align(tokens * columns));
  a.sums = (int32_t*)((uint8_t*)a.scales + align(tokens * groups * 4));
  return a;
}

// The scale is the largest absolute value of the group / 127; values are rounded half to even. If a
// value is not finite, the group's scale, and so every result of the token, is NaN.
static void quantize_group(const float* __restrict x, int64_t count, int8_t* __restrict values,
                           float* scale, int32_t* sum) {
  int32_t largest_bits = 0;  // bits of absolute values have the same order as the values
  for (int64_t i = 0; i < count; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  float largest;
  memcpy(&largest, &largest_bits, 4);
  *scale = largest / 127.0f;
  *sum = 0;
  if (largest_bits >= 0x7f800000 || *scale < std::numeric_limits<float>::min()) {
    *scale = largest_bits >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    memset(values, 0, count);
    return;
  }
  const float inverse = 127.0f / largest;
  int32_t total = 0;
  for (int64_t i = 0; i < count; i++) {
    const float shifted = x[i] * inverse + 12582912.0f;  // 1.5 * 2^23: the last bit is worth 1
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    const int32_t value = bits - 0x4b400000;
    values[i] = (int8_t)value;
    total += value;
  }
  *sum = total;
}

static void quantize_token(const float* x, int64_t token, int64_t columns, int64_t group,
                           const Activations& a) {
  const int64_t groups = columns / group;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = token * columns + g * group, place = token * groups + g;
    quantize_group(x + first, group, a.values + first, a.scales + place, a.sums + place);
  }
}

static inline int32_t four_at(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return four;
}

static inline Floats load_scale(const void* scales, bool is_wide, int64_t place) {
  return is_wide ? load((const float*)scales + place) : load((const uint16_t*)scales + place);
}

// Write a tile's results to the output, plus the bias; padding rows are omitted.
static inline void write_rows(const Product& w, int64_t panel, int64_t token, Floats total) {
  float values[PANEL];
  store(values, total);
  const int64_t row = panel * PANEL, count = std::min<int64_t>(PANEL, w.rows - row);
  float* out = w.out + token * w.rows + row;
  if (w.bias)
    for (int64_t r = 0; r < count; r++) values[r] += w.bias[row + r];
  memcpy(out, values, count * sizeof(float));
}

// P panels times T tokens, all columns. The sums of a group stay in registers.
template <int P, int T, int BITS>
static void multiply_tile(const Product& w, const Activations& a, int64_t panel, int64_t token) {
  const int64_t groups = w.columns / w.group, width = w.columns * PANEL * BITS / 8;
  const int64_t steps = w.group * BITS / 32;  // blocks of a group
  const uint8_t* from = w.packed + panel * width;
  const int8_t* x = a.values + token * w.columns;
  const int32_t shift = BITS == 8 ? BYTE_SHIFT : w.minima ? 0 : 8;
  Floats total[P][T];
  for (int p = 0; p < P; p++)
    for (int t = 0; t < T; t++) total[p][t] = floats(0.0f);
  for (int64_t g = 0; g < groups; g++) {
    const float* x_scale = a.scales + token * groups + g;
    const int32_t* x_sum = a.sums + token * groups + g;
    Ints sum[P][T];
    for (int p = 0; p < P; p++)
      for (int t = 0; t < T; t++) sum[p][t] = ints(-shift * x_sum[t * groups]);
    if (BITS == 8) {
      for (int64_t s = 0; s < steps; s++, from += BLOCK, x += 4)
        for (int p = 0; p < P; p++) {
          const Block bytes = load_block(from + p * width), ready = ready_bytes(bytes);
          __builtin_prefetch(from + p * width + AHEAD_BYTES);
          for (int t = 0; t < T; t++)
            sum[p][t] = dot_bytes(sum[p][t], ready, bytes, four_at(x + t * w.columns));
        }
    } else {
      for (int64_t s = 0; s < steps; s += 4) {
        Shorts part[P][T];
        for (int p = 0; p < P; p++)
          for (int t = 0; t < T; t++) part[p][t] = begin_shorts(sum[p][t]);
        for (int i = 0; i < 4; i++, from += BLOCK, x += 8)
          for (int p = 0; p < P; p++) {
            const Block both = load_block(from + p * width);
            __builtin_prefetch(from + p * width + AHEAD_BYTES);
            const Block low = low_nibbles(both), high = high_nibbles(both);
            for (int t = 0; t < T; t++) {
              part[p][t] = dot_nibbles(part[p][t], low, four_at(x + t * w.columns));
              part[p][t] = dot_nibbles(part[p][t], high, four_at(x + t * w.columns + 4));
            }
          }
        for (int p = 0; p < P; p++)
          for (int t = 0; t < T; t++) sum[p][t] = end_shorts(sum[p][t], part[p][t]);
      }
    }
    for (int p = 0; p < P; p++) {
      const int64_t place = ((panel + p) * groups + g) * PANEL;
      const Floats scale = load_scale(w.scales, w.has_wide_scales, place);
      for (int t = 0; t < T; t++) {
        const Floats both = mul(scale, floats(x_scale[t * groups]));
        total[p][t] = add(total[p][t], mul(as_floats(sum[p][t]), both));
      }
      if (w.minima) {
        const Floats minimum = load_scale(w.minima, w.has_wide_scales, place);
        for (int t = 0; t < T; t++) {
          const float x_total = x_scale[t * groups] * (float)x_sum[t * groups];
          total[p][t] = add(total[p][t], mul(minimum, floats(x_total)));
        }
      }
    }
  }
  for (int p = 0; p < P; p++)
    for (int t = 0; t < T; t++) write_rows(w, panel + p, token + t, total[p][t]);
}

// Four columns of a block times T tokens' floats, one column after the other.
template <int T>
static inline void add_columns(Floats* sum, Block bytes, const float* x, int64_t columns) {
  const Floats c0 = column<0>(bytes), c1 = column<1>(bytes);
  const Floats c2 = column<2>(bytes), c3 = column<3>(bytes);
  for (int t = 0; t < T; t++, x += columns) {
    sum[t] = add(sum[t], mul(c0, floats(x[0])));
    sum[t] = add(sum[t], mul(c1, floats(x[1])));
    sum[t] = add(sum[t], mul(c2, floats(x[2])));
    sum[t] = add(sum[t], mul(c3, floats(x[3])));
  }
}

// The same with activations that are not quantized: a group is summed column by column.
template <int T, int BITS>
static void multiply_float_tile(const Product& w, int64_t panel, int64_t token) {
  const int64_t groups = w.columns / w.group, width = w.columns * PANEL * BITS / 8;
  const int64_t steps = w.group * BITS / 32;
  const uint8_t* from = w.packed + panel * width;
  const float* x = w.x + token * w.columns;
  Floats total[T];
  for (int t = 0; t < T; t++) total[t] = floats(0.0f);
  for (int64_t g = 0; g < groups; g++) {
    const float* x_group = x;
    Floats sum[T];
    for (int t = 0; t < T; t++) sum[t] = floats(0.0f);
    for (int64_t s = 0; s < steps; s++, from += BLOCK) {
      const Block block = load_block(from);
      __builtin_prefetch(from + AHEAD_BYTES);
      if (BITS == 8) {
        add_columns<T>(sum, block, x, w.columns);
        x += 4;
      } else {
        const Block low = low_nibbles(block), high = high_nibbles(block);
        add_columns<T>(sum, w.minima ? low : less_eight(low), x, w.columns);
        add_columns<T>(sum, w.minima ? high : less_eight(high), x + 4, w.columns);
        x += 8;
      }
    }
    const int64_t place = (panel * groups + g) * PANEL;
    const Floats scale = load_scale(w.scales, w.has_wide_scales, place);
    for (int t = 0; t < T; t++) total[t] = add(total[t], mul(sum[t], scale));
    if (w.minima) {
      const Floats minimum = load_scale(w.minima, w.has_wide_scales, place);
      for (int t = 0; t < T; t++) {
        float x_total = 0.0f;
        for (int64_t c = 0; c < w.group; c++) x_total += x_group[t * w.columns + c];
        total[t] = add(total[t], mul(minimum, floats(x_total)));
      }
    }
  }
  for (int t = 0; t < T; t++) write_rows(w, panel, token + t, total[t]);
}

// The remaining `count` <= T tokens, in one tile.
template <int P, int T, int BITS>
static void multiply_rest(const Product& w, const Activations& a, int64_t panel, int64_t token,
                          int64_t count) {
  if constexpr (T > 0) {
    if (count == T) multiply_tile<P, T, BITS>(w, a, panel, token);
    else multiply_rest<P, T - 1, BITS>(w, a, panel, token, count);
  }
}

template <int P, int BITS>
static void multiply_tokens(const Product& w, const Activations& a, int64_t panel, int64_t token,
                            int64_t last) {
  for (; token + MOST_TOKENS <= last; token += MOST_TOKENS)
    multiply_tile<P, MOST_TOKENS, BITS>(w, a, panel, token);
  multiply_rest<P, MOST_TOKENS - 1, BITS>(w, a, panel, token, last - token);
}

template <int BITS>
static void multiply_float_tokens(const Product& w, int64_t panel, int64_t token, int64_t last) {
  for (; token + 4 <= last; token += 4) multiply_float_tile<4, BITS>(w, panel, token);
  for (; token < last; token++) multiply_float_tile<1, BITS>(w, panel, token);
}

template <int BITS>
static void multiply_panels(const Product& w, const Activations* a, int64_t panel, int64_t end,
                            int64_t token, int64_t last) {
  if (a == nullptr) {
    for (; panel < end; panel++) multiply_float_tokens<BITS>(w, panel, token, last);
    return;
  }
  // A product with one token is memory-bound, and reading one panel is faster than alternating two.
  for (; w.tokens > 1 && panel + MOST_PANELS <= end; panel += MOST_PANELS)
    multiply_tokens<MOST_PANELS, BITS>(w, *a, panel, token, last);
  for (; panel < end; panel++) multiply_tokens<1, BITS>(w, *a, panel, token, last);
}

static void multiply(const Product& w, const Activations* a) {
  const int64_t panels = (w.rows + PANEL - 1) / PANEL, per_token = a ? w.columns : 4 * w.columns;
  const int64_t near = std::max<int64_t>(NEAR_BYTES / per_token / MOST_TOKENS, 1) * MOST_TOKENS;
  const int64_t elements = w.tokens * w.rows * w.columns;
  const int threads = elements < FEW_ELEMENTS ? 1 : w.threads;
  // Several pieces per thread, scheduled dynamically: another program may delay a thread.
  const int64_t piece = std::max<int64_t>(panels / (8 * threads) / MOST_PANELS, 1) * MOST_PANELS;
  const int64_t pieces = threads == 1 ? 1 : (panels + piece - 1) / piece;
  const int64_t length = threads == 1 ? panels : piece;
  const bool quantizes_first = w.tokens * w.columns < FEW_ELEMENTS;
  if (a && quantizes_first)
    for (int64_t t = 0; t < w.tokens; t++) quantize_token(w.x, t, w.columns, w.group, *a);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (a && !quantizes_first) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < w.tokens; t++) quantize_token(w.x, t, w.columns, w.group, *a);
    }
    for (int64_t token = 0; token < w.tokens; token += near) {
      const int64_t last = std::min(token + near, w.tokens);
#pragma omp for schedule(dynamic) nowait
      for (int64_t i = 0; i < pieces; i++) {
        const int64_t first = i * length, end = std::min(first + length, panels);
        if (w.bits == 8) multiply_panels<8>(w, a, first, end, token, last);
        else multiply_panels<4>(w, a, first, end, token, last);
      }
    }
  }
}

extern "C" void multiply_quantized(const Product* w) {
  const Activations a = place(w->room, w->tokens, w->columns, w->columns / w->group);
  multiply(*w, &a);
}

extern "C" void multiply_floats(const Product* w) { multiply(*w, nullptr); }

// Bytes of scratch memory for the quantized activations: values, then scales, then sums.
extern "C" int64_t room_bytes(int64_t tokens, int64_t columns, int64_t group) {
  return align(tokens * columns) + 2 * align(tokens * (columns / group) * 4);
}

extern "C" void quantize_rows(const float* x, int64_t tokens, int64_t columns, int64_t group,
                              int8_t* values, float* scales, int32_t* sums) {
  const Activations a = {values, scales, sums};
  for (int64_t t = 0; t < tokens; t++) quantize_token(x, t, columns, group, a);
}
