// Operations of a step besides products: norms, activations, rotary positions, attention.
//
// Loops are over single operations in a fixed order, so that all instruction sets give one result.

#include <cmath>

// Vector of fp32, bf16 or fp16 numbers; may be empty.
struct Vector {
  const void* data;
  int64_t kind;
};

static const int64_t BYTES = 4;  // dtype of keys and values: integers, with one scale per token

static inline float widen_one(const void* data, int64_t kind, int64_t i) {
  if (kind == FP32) return ((const float*)data)[i];
  if (kind == BYTES) return ((const int8_t*)data)[i];
  uint16_t many[16] = {((const uint16_t*)data)[i]};
  float wide[16];
  store(wide, kind == BF16 ? load((const Bf16*)many) : load(many));
  return wide[0];
}

// Numbers as floats: in place, or converted to `room`.
static const float* as_floats(const Vector& v, int64_t first, int64_t count, float* room) {
  if (v.kind == FP32) return (const float*)v.data + first;
  const uint16_t* from = (const uint16_t*)v.data + first;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    store(room + i, v.kind == BF16 ? load((const Bf16*)from + i) : load(from + i));
  for (; i < count; i++) room[i] = widen_one(from, v.kind, i);
  return room;
}

// Sum of f(0) to f(count - 1): sixteen partial sums, added in the order of `sum`.
template <typename F>
static inline float sum_of(int64_t count, F f) {
  float part[16] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    for (int lane = 0; lane < 16; lane++) part[lane] += f(i + lane);
  for (int lane = 0; i + lane < count; lane++) part[lane] += f(i + lane);
  return sum(load(part));
}

enum NormKind { NO_NORM, RMS, LAYER };

struct Norm {
  Vector weight, bias;
  float eps;
  int32_t kind;
};

// `out` may be `x`; `room` holds two vectors.
static void normalize(const Norm& norm, const float* x, int64_t count, float* out, float* room) {
  if (norm.kind == NO_NORM) {
    if (out != x) memcpy(out, x, count * sizeof(float));
    return;
  }
  float mean = 0.0f;
  if (norm.kind == LAYER) mean = sum_of(count, [=](int64_t i) { return x[i]; }) / (float)count;
  const float squares =
      sum_of(count, [=](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  const float scale = 1.0f / std::sqrt(squares / (float)count + norm.eps);
  for (int64_t i = 0; i < count; i++) out[i] = (x[i] - mean) * scale;
  if (norm.weight.data) {
    const float* weight = as_floats(norm.weight, 0, count, room);
    for (int64_t i = 0; i < count; i++) out[i] *= weight[i];
  }
  if (norm.bias.data) {
    const float* bias = as_floats(norm.bias, 0, count, room);
    for (int64_t i = 0; i < count; i++) out[i] += bias[i];
  }
}

// e^x; 0 below the smallest normal float. Taylor series to x^7, for |rest| <= log(2) / 2.
static inline float exponential(float x) {
  const float low = x < -87.0f ? -87.0f : x, held = low > 88.0f ? 88.0f : low;
  const float shifted = held * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the last bit is 1
  const float whole = shifted - 12582912.0f;
  const float rest = held - whole * 0.693359375f + whole * 2.12194440e-4f;
  float y = 1.0f / 5040.0f;
  y = y * rest + 1.0f / 720.0f;
  y = y * rest + 1.0f / 120.0f;
  y = y * rest + 1.0f / 24.0f;
  y = y * rest + 1.0f / 6.0f;
  y = y * rest + 0.5f;
  y = y * rest + 1.0f;
  y = y * rest + 1.0f;
  int32_t bits;
  memcpy(&bits, &shifted, 4);
  bits = (bits - 0x4b400000 + 127) * (1 << 23);
  float power;
  memcpy(&power, &bits, 4);
  return x < -87.0f ? 0.0f : y * power;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
static inline float tanh_of(float x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

// Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26: within 1.5e-7.
static inline float erf_of(float x) {
  const float size = x < 0 ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
  float y = 1.061405429f;
  y = y * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  y = 1.0f - y * t * exponential(-size * size);
  return x < 0 ? -y : y;
}

enum Activation { GELU, GELU_TANH, RELU, SILU, TANH };

template <typename F>
static inline void change_all(float* x, const float* times, int64_t count, F f) {
  if (times)
    for (int64_t i = 0; i < count; i++) x[i] = f(x[i]) * times[i];
  else
    for (int64_t i = 0; i < count; i++) x[i] = f(x[i]);
}

// x = activation(x), times another vector if there is one.
static void activate(int kind, float* x, const float* times, int64_t count) {
  if (kind == SILU) change_all(x, times, count, [](float v) { return v * sigmoid(v); });
  else if (kind == RELU) change_all(x, times, count, [](float v) { return v > 0 ? v : 0.0f; });
  else if (kind == TANH) change_all(x, times, count, tanh_of);
  else if (kind == GELU)
    change_all(x, times, count,
               [](float v) { return 0.5f * v * (1.0f + erf_of(v * 0.707106781f)); });
  else
    change_all(x, times, count, [](float v) {
      return 0.5f * v * (1.0f + tanh_of(0.797884561f * (v + 0.044715f * v * v * v)));
    });
}

// cos and sin of positions: (rows or 1, tokens, width); `row` is the row stride. May be null.
struct Rope {
  const float *cos, *sin;
  int64_t row, width;
};

static void turn(const Rope& rope, int64_t row, int64_t token, bool interleaved, float* x) {
  if (!rope.cos) return;
  const int64_t at = row * rope.row + token * rope.width, half = rope.width / 2;
  const float *cos = rope.cos + at, *sin = rope.sin + at;
  for (int64_t i = 0; i < half; i++) {
    const int64_t a = interleaved ? 2 * i : i, b = interleaved ? a + 1 : i + half;
    const float first = x[a], second = x[b];
    x[a] = first * cos[a] - second * sin[a];
    x[b] = second * cos[b] + first * sin[b];
  }
}

// Keys and values (pages, heads, tokens, width) of a dtype; strides in elements, 1 for the width.
// The page size is a parameter of the run: a row of a batch is a single page.
// Bytes have one scale per token, (pages, heads, tokens).
struct Past {
  void *keys, *values;
  float *key_scales, *value_scales;
  int64_t row, head, token, kind;
  int64_t scale_row, scale_head;
};

// Position of a token: the pages of its sequence, in order, and its index.
struct Place {
  const int32_t* pages;
  int64_t position;
};

// Location of the keys from `first` to before `last` of a sequence.
struct Stretch {
  const int32_t* pages;
  int64_t page_tokens, page_stride, stride, first, last;
  const float *key_scales, *value_scales;  // of a head; may be null
  int64_t scale_stride;                    // stride of pages
};

// Scale of a token's keys or values.
static inline float scale_of(const Stretch& s, const float* scales, int64_t j) {
  return scales[s.pages[j / s.page_tokens] * s.scale_stride + j % s.page_tokens];
}

// Call f(pointer to the first key, its index, end index) for every contiguous run of keys.
template <typename E, typename F>
static inline void for_pages(const Stretch& s, const E* from, F f) {
  for (int64_t j = s.first; j < s.last;) {
    const int64_t page = j / s.page_tokens, begin = page * s.page_tokens;
    const int64_t end = std::min(s.last, begin + s.page_tokens);
    f(from + s.pages[page] * s.page_stride + (j - begin) * s.stride, j, end);
    j = end;
  }
}

// Bytes (rows or 1, queries or 1, keys), 1 where a query attends to a key; without data all are 1.
struct Mask {
  const uint8_t* data;
  int64_t row, query;
};

// Bias of scores: (rows or 1, heads, queries, keys); may be empty.
struct Bias {
  const float* data;
  int64_t row, head, query;
};

static inline uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // not a number
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // overflow
  if (bits < 0x38800000) {  // subnormal: the last bit of 0.5 has the right weight
    float size;
    memcpy(&size, &bits, 4);
    size += 0.5f;
    memcpy(&bits, &size, 4);
    return sign | (uint16_t)(bits - 0x3f000000);
  }
  return sign | (uint16_t)((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

static void narrow_to(const float* from, int64_t count, int64_t kind, void* to) {
  if (kind == FP32) {
    memcpy(to, from, count * sizeof(float));
    return;
  }
  uint16_t* out = (uint16_t*)to;
  for (int64_t i = 0; i < count; i++) out[i] = kind == BF16 ? to_bf16(from[i]) : to_half(from[i]);
}

template <typename E>
static inline float dot(const float* x, const E* y, int64_t count, int64_t kind) {
  Floats total = floats(0.0f);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) total = add(total, mul(load(x + i), load(y + i)));
  float out = sum(total);
  for (; i < count; i++) out += x[i] * widen_one(y, kind, i);
  return out;
}

// Keys and values (heads, count, width) of a prefix, which all queries see; may be empty.
struct Prefix {
  const float *keys, *values;
  int64_t count;
};

// C times 16 columns of the weighted values, from column h on: the prefix, then the sequence.
template <int C, typename E>
static inline void mix_columns(const float* weights, const Prefix& front, const E* values,
                               const Stretch& s, int64_t width, int64_t h, float* out) {
  Floats total[C];
  for (int c = 0; c < C; c++) total[c] = floats(0.0f);
  for (int64_t j = 0; j < front.count; j++)
    for (int c = 0; c < C; c++) {
      const Floats value = load(front.values + j * width + h + 16 * c);
      total[c] = add(total[c], mul(floats(weights[j]), value));
    }
  weights += front.count;
  values += h;
  for_pages(s, values, [&](const E* value, int64_t j, int64_t end) {
    for (; j < end; j++, value += s.stride) {
      const Floats weight = floats(weights[j - s.first]);
      for (int c = 0; c < C; c++) total[c] = add(total[c], mul(weight, load(value + 16 * c)));
    }
  });
  for (int c = 0; c < C; c++) store(out + h + 16 * c, total[c]);
}

// softmax(scores) times values, written over the query. Hidden keys have no scores.
template <typename E>
static void attend(float* query, const Prefix& front, const E* keys, const E* values,
                   const Stretch& s, int64_t kind, int64_t width, float scale,
                   const uint8_t* seen, const float* bias, float* weights) {
  const int64_t count = front.count + s.last - s.first;
  float largest = -INFINITY, *scores = weights + front.count;
  for (int64_t j = 0; j < front.count; j++) {
    weights[j] = dot(query, front.keys + j * width, width, FP32) * scale;
    largest = std::max(largest, weights[j]);
  }
  for_pages(s, keys, [&](const E* key, int64_t j, int64_t end) {
    for (; j < end; j++, key += s.stride) {
      float* score = scores + j - s.first;
      *score = -INFINITY;
      if (seen && !seen[j]) continue;
      *score = dot(query, key, width, kind) * scale;
      if (s.key_scales) *score *= scale_of(s, s.key_scales, j);
      if (bias) *score += bias[j];
      largest = *score > largest ? *score : largest;
    }
  });
  if (largest == -INFINITY) largest = 0.0f;
  for (int64_t j = 0; j < count; j++) weights[j] = exponential(weights[j] - largest);
  const float total = sum_of(count, [=](int64_t j) { return weights[j]; });
  if (s.value_scales)
    for (int64_t j = s.first; j < s.last; j++)
      scores[j - s.first] *= scale_of(s, s.value_scales, j);
  int64_t h = 0;
  for (; h + 64 <= width; h += 64) mix_columns<4>(weights, front, values, s, width, h, query);
  for (; h + 16 <= width; h += 16) mix_columns<1>(weights, front, values, s, width, h, query);
  for (; h < width; h++) {
    float mixed = 0.0f;
    for (int64_t j = 0; j < front.count; j++) mixed += weights[j] * front.values[j * width + h];
    for_pages(s, values, [&](const E* value, int64_t j, int64_t end) {
      for (; j < end; j++, value += s.stride)
        mixed += scores[j - s.first] * widen_one(value, kind, h);
    });
    query[h] = mixed;
  }
  const float share = total > 0 ? 1.0f / total : 0.0f;
  for (int64_t i = 0; i < width; i++) query[i] *= share;
}
