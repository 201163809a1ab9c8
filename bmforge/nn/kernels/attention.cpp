// Attention over whole sequences on a CPU: softmax(scale q k^T + mask) v, and its gradients.
//
// Scores are computed one tile at a time, and recomputed in backward from the log-sum-exp, as in
// FlashAttention (Dao et al. 2022). Arithmetic is fp32, also for bf16 tensors. One thread processes
// one key-value head with all query heads that share it, so sums do not depend on the thread count.
// floats.hpp is included before this file.

// Rows and vectors of one block of accumulators, which fill the registers.
#if defined(__AVX512F__)
constexpr int ROWS = 6, VECS = 4;
#elif defined(__AVX2__)
constexpr int ROWS = 6, VECS = 2;
#else
constexpr int ROWS = 4, VECS = 2;
#endif
constexpr int TILE = 64;  // queries and keys per tile of scores

// Set c (rows x vecs * W) to a (rows x depth, any strides) times b (depth rows, `ldb` floats
// apart), or add the product to c.
template <int rows, int vecs>
static void multiply_block(int depth, const float* a, int64_t a_row, int64_t a_depth,
                           const float* b, int64_t ldb, float* c, int64_t ldc, bool adds) {
  Vec sums[rows][vecs];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < vecs; j++) sums[i][j] = adds ? load(c + i * ldc + j * W) : Vec{};
  for (int k = 0; k < depth; k++) {
    Vec line[vecs];
#pragma GCC unroll 8
    for (int j = 0; j < vecs; j++) line[j] = load(b + k * ldb + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
      const float factor = a[i * a_row + k * a_depth];
#pragma GCC unroll 8
      for (int j = 0; j < vecs; j++) sums[i][j] += line[j] * factor;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < vecs; j++) store(c + i * ldc + j * W, sums[i][j]);
}

template <int vecs, int rows = ROWS>
static void multiply_rows(int count, int depth, const float* a, int64_t a_row, int64_t a_depth,
                          const float* b, int64_t ldb, float* c, int64_t ldc, bool adds) {
  for (; count >= rows; count -= rows, a += rows * a_row, c += rows * ldc)
    multiply_block<rows, vecs>(depth, a, a_row, a_depth, b, ldb, c, ldc, adds);
  if constexpr (rows > 1)
    if (count) multiply_rows<vecs, rows - 1>(count, depth, a, a_row, a_depth, b, ldb, c, ldc, adds);
}

template <int vecs = VECS>
static void multiply(int count, int columns, int depth, const float* a, int64_t a_row,
                     int64_t a_depth, const float* b, int64_t ldb, float* c, int64_t ldc,
                     bool adds) {
  for (; columns >= vecs * W; columns -= vecs * W, b += vecs * W, c += vecs * W)
    multiply_rows<vecs>(count, depth, a, a_row, a_depth, b, ldb, c, ldc, adds);
  if constexpr (vecs > 1)
    if (columns)
      multiply<vecs - 1>(count, columns, depth, a, a_row, a_depth, b, ldb, c, ldc, adds);
}

struct Shape {
  int64_t batch, heads, shared_heads, queries, keys, width, seed;
  float scale, dropout;
  int32_t causal, threads, is_narrow;
};

// (batch, heads, tokens, width); strides in elements, that of the width is 1.
struct Array {
  void* data;
  int64_t row, head, token;
};

// Bytes (batch, queries, keys), 1 where a query attends to a key; without data all are 1.
struct Mask {
  const uint8_t* data;
  int64_t row, query;
};

template <typename E>
static E* place(const Array& x, int64_t row, int64_t head, int64_t token) {
  return (E*)x.data + row * x.row + head * x.head + token * x.token;
}

template <typename E>
static void read_tokens(const Array& x, int64_t row, int64_t head, int64_t first, int count,
                        int64_t width, float factor, float* out) {
  for (int i = 0; i < count; i++) {
    const E* in = place<E>(x, row, head, first + i);
    for (int64_t h = 0; h < width; h++) out[i * width + h] = widen(in[h]) * factor;
  }
}

template <typename E>
static void write_tokens(const Array& x, int64_t row, int64_t head, int64_t first, int count,
                         int64_t width, const float* in) {
  for (int i = 0; i < count; i++) {
    E* out = place<E>(x, row, head, first + i);
    for (int64_t h = 0; h < width; h++) narrow(in[i * width + h], out + h);
  }
}

// Read keys into transposed tiles, (width, TILE) each, padded with zeros.
template <typename E>
static void read_turned(const Array& x, int64_t row, int64_t head, int64_t count, int64_t width,
                        float* out) {
  for (int64_t first = 0; first < count; first += TILE, out += width * TILE)
    for (int i = 0; i < TILE; i++) {
      const E* in = first + i < count ? place<E>(x, row, head, first + i) : nullptr;
      for (int64_t h = 0; h < width; h++) out[h * TILE + i] = in ? widen(in[h]) : 0.0f;
    }
}

enum class Sight { none, some, all };

// Whether the queries of a tile attend to none, some or all of its keys.
static Sight look(const Shape& s, const Mask& mask, int64_t row, int64_t query, int queries,
                  int64_t key, int keys) {
  if (s.causal && key > query + queries - 1) return Sight::none;
  if (!mask.data) return keys == TILE && (!s.causal || key + keys - 1 <= query) ? Sight::all
                                                                               : Sight::some;
  int64_t seen = 0;
  for (int i = 0; i < queries; i++) {
    const uint8_t* line = mask.data + row * mask.row + (query + i) * mask.query + key;
    for (int j = 0; j < keys; j++) seen += line[j];
  }
  if (!seen) return Sight::none;
  return seen == (int64_t)queries * TILE && !s.causal ? Sight::all : Sight::some;
}

// Set the score to `hidden` where a query does not attend to a key.
static void hide(const Shape& s, const Mask& mask, int64_t row, int64_t query, int queries,
                 int64_t key, int keys, float hidden, float* scores) {
  for (int i = 0; i < queries; i++) {
    float* line = scores + i * TILE;
    int64_t end = s.causal ? std::min<int64_t>(keys, query + i - key + 1) : keys;
    end = std::max<int64_t>(end, 0);
    if (mask.data) {
      const uint8_t* seen = mask.data + row * mask.row + (query + i) * mask.query + key;
      for (int64_t j = 0; j < end; j++) line[j] = seen[j] ? line[j] : hidden;
    }
    std::fill(line + end, line + TILE, hidden);
  }
}

// The dropout mask is a hash of the seed and the position of the weight, so that backward computes
// the same one; the hashes are the finalizers of two known generators.
static inline uint32_t hash_line(const Shape& s, int64_t row, int64_t head, int64_t query) {
  const uint64_t line = (row * s.heads + head) * s.queries + query + 1;
  uint64_t x = (uint64_t)s.seed + line * 0x9e3779b97f4a7c15u;  // SplitMix64 (Steele et al. 2014)
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (uint32_t)(x ^ (x >> 31));
}

// Dropout factors of W weights from `key` on: 0 or 1 / (1 - dropout).
static inline Vec keep(const Shape& s, uint32_t line, int64_t key) {
  Words x;
  for (int i = 0; i < W; i++) x[i] = i;
  x = (x + (uint32_t)key) * 0x9e3779b9u + line;
  x = (x ^ (x >> 16)) * 0x85ebca6bu;  // finalizer of MurmurHash3 (Appleby)
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  x = (x ^ (x >> 16)) >> 8;  // 24 bits, which are exact in a float
  const Vec drawn = __builtin_convertvector((Ints)x, Vec);
  return choose(drawn >= s.dropout * 16777216.0f, Vec{} + 1.0f / (1.0f - s.dropout), Vec{});
}

// Add a tile to the running softmax of a row: scores become weights, previous sums are rescaled.
static void soften(const Shape& s, uint32_t line, int64_t key, float* scores, float* largest,
                   float* total, float* sums) {
  Vec top = load(scores);
  for (int j = W; j < TILE; j += W) {
    const Vec x = load(scores + j);
    top = choose(x > top, x, top);
  }
  float now = *largest;
  for (int i = 0; i < W; i++) now = std::max(now, top[i]);
  if (now == -INFINITY) {  // no visible key so far
    std::fill(scores, scores + TILE, 0.0f);
    return;
  }
  Vec added = {};
  for (int j = 0; j < TILE; j += W) {
    const Vec weight = exponential(load(scores + j) - now);
    store(scores + j, s.dropout > 0 ? weight * keep(s, line, key + j) : weight);
    added += weight;
  }
  if (now > *largest) {
    const float factor = std::exp(*largest - now);
    *total *= factor;
    for (int64_t h = 0; h < s.width; h += W) store(sums + h, load(sums + h) * factor);
    *largest = now;
  }
  *total += sum(added);
}

// Recompute a row's weights from scores, and gradients of scores from those of weights.
static void unsoften(const Shape& s, uint32_t line, int64_t key, float lse, float common,
                     float* weights, float* of_scores) {
  for (int j = 0; j < TILE; j += W) {
    const Vec weight = exponential(load(weights + j) - lse);
    const Vec kept = s.dropout > 0 ? keep(s, line, key + j) : Vec{} + 1.0f;
    store(weights + j, weight * kept);
    store(of_scores + j, weight * (load(of_scores + j) * kept - common));
  }
}

template <typename E>
static void forward_head(const Shape& s, const Array& q, const Array& k, const Array& v,
                         const Array& out, float* lse, const Mask& mask, int64_t row,
                         int64_t shared, float* scratch) {
  const int64_t width = s.width, tiles = (s.keys + TILE - 1) / TILE;
  float* keys = scratch;
  float* values = keys + tiles * TILE * width;
  float* query = values + tiles * TILE * width;
  float* sums = query + TILE * width;
  float* scores = sums + TILE * width;
  read_turned<E>(k, row, shared, s.keys, width, keys);
  read_tokens<E>(v, row, shared, 0, s.keys, width, 1.0f, values);
  const int64_t group = s.heads / s.shared_heads;
  for (int64_t head = shared * group; head < (shared + 1) * group; head++)
    for (int64_t first = 0; first < s.queries; first += TILE) {
      const int count = std::min<int64_t>(TILE, s.queries - first);
      float largest[TILE], total[TILE] = {};
      std::fill(largest, largest + TILE, -INFINITY);
      std::fill(sums, sums + count * width, 0.0f);
      read_tokens<E>(q, row, head, first, count, width, s.scale, query);
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t key = tile * TILE;
        const int here = std::min<int64_t>(TILE, s.keys - key);
        const Sight sight = look(s, mask, row, first, count, key, here);
        if (sight == Sight::none) continue;
        multiply(count, TILE, width, query, width, 1, keys + key * width, TILE, scores, TILE,
                 false);
        if (sight == Sight::some)
          hide(s, mask, row, first, count, key, here, -INFINITY, scores);
        for (int i = 0; i < count; i++)
          soften(s, hash_line(s, row, head, first + i), key, scores + i * TILE, largest + i,
                 total + i, sums + i * width);
        multiply(count, width, here, scores, TILE, 1, values + key * width, width, sums, width,
                 true);
      }
      float* kept = lse + (row * s.heads + head) * s.queries + first;
      for (int i = 0; i < count; i++) {
        const float share = total[i] > 0 ? 1 / total[i] : 0.0f;
        for (int64_t h = 0; h < width; h++) sums[i * width + h] *= share;
        kept[i] = total[i] > 0 ? largest[i] + std::log(total[i]) : 0.0f;
      }
      write_tokens<E>(out, row, head, first, count, width, sums);
    }
}

template <typename E>
static void backward_head(const Shape& s, const Array& q, const Array& k, const Array& v,
                          const Array& out, const Array& grad, const float* lse, const Mask& mask,
                          const Array& grad_q, const Array& grad_k, const Array& grad_v,
                          int64_t row, int64_t shared, float* scratch) {
  const int64_t width = s.width, tiles = (s.keys + TILE - 1) / TILE, size = tiles * TILE * width;
  float* keys = scratch;
  float* turned_keys = keys + size;
  float* turned_values = turned_keys + size;
  float* of_keys = turned_values + size;
  float* of_values = of_keys + size;
  float* query = of_values + size;
  float* of_out = query + TILE * width;
  float* of_query = of_out + TILE * width;
  float* weights = of_query + TILE * width;
  float* of_scores = weights + TILE * TILE;
  read_tokens<E>(k, row, shared, 0, s.keys, width, 1.0f, keys);
  read_turned<E>(k, row, shared, s.keys, width, turned_keys);
  read_turned<E>(v, row, shared, s.keys, width, turned_values);
  std::fill(of_keys, of_keys + 2 * size, 0.0f);
  const int64_t group = s.heads / s.shared_heads;
  for (int64_t head = shared * group; head < (shared + 1) * group; head++)
    for (int64_t first = 0; first < s.queries; first += TILE) {
      const int count = std::min<int64_t>(TILE, s.queries - first);
      float common[TILE];
      // The outputs are stored where the gradients of the queries will be.
      read_tokens<E>(out, row, head, first, count, width, 1.0f, of_query);
      read_tokens<E>(grad, row, head, first, count, width, 1.0f, of_out);
      for (int i = 0; i < count; i++) {
        Vec both = {};
        for (int64_t h = i * width; h < (i + 1) * width; h += W)
          both += load(of_query + h) * load(of_out + h);
        common[i] = sum(both);
      }
      read_tokens<E>(q, row, head, first, count, width, s.scale, query);
      std::fill(of_query, of_query + count * width, 0.0f);
      const float* kept = lse + (row * s.heads + head) * s.queries + first;
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t key = tile * TILE;
        const int here = std::min<int64_t>(TILE, s.keys - key);
        const Sight sight = look(s, mask, row, first, count, key, here);
        if (sight == Sight::none) continue;
        multiply(count, TILE, width, query, width, 1, turned_keys + key * width, TILE, weights,
                 TILE, false);
        multiply(count, TILE, width, of_out, width, 1, turned_values + key * width, TILE,
                 of_scores, TILE, false);
        if (sight == Sight::some)
          hide(s, mask, row, first, count, key, here, -INFINITY, weights);
        for (int i = 0; i < count; i++)
          unsoften(s, hash_line(s, row, head, first + i), key, kept[i], common[i],
                   weights + i * TILE, of_scores + i * TILE);
        multiply(count, width, here, of_scores, TILE, 1, keys + key * width, width, of_query,
                 width, true);
        multiply(here, width, count, of_scores, 1, TILE, query, width, of_keys + key * width,
                 width, true);
        multiply(here, width, count, weights, 1, TILE, of_out, width, of_values + key * width,
                 width, true);
      }
      for (int64_t h = 0; h < count * width; h++) of_query[h] *= s.scale;
      write_tokens<E>(grad_q, row, head, first, count, width, of_query);
    }
  // The queries were scaled, so the gradients of the keys are too.
  write_tokens<E>(grad_k, row, shared, 0, s.keys, width, of_keys);
  write_tokens<E>(grad_v, row, shared, 0, s.keys, width, of_values);
}

// Floats of scratch memory per thread.
extern "C" int64_t attention_scratch(const Shape* s, int backward) {
  const int64_t size = (s->keys + TILE - 1) / TILE * TILE * s->width, tile = TILE * s->width;
  return backward ? 5 * size + 3 * tile + 2 * TILE * TILE : 2 * size + 2 * tile + TILE * TILE;
}

extern "C" void attention_forward(const Shape* s, const Array* q, const Array* k, const Array* v,
                                  const Array* out, float* lse, const Mask* mask, float* scratch) {
  const int64_t each = attention_scratch(s, 0);
#pragma omp parallel for num_threads(s->threads) schedule(static, 1)
  for (int64_t thread = 0; thread < s->threads; thread++)
    for (int64_t i = thread; i < s->batch * s->shared_heads; i += s->threads) {
      const int64_t row = i / s->shared_heads, head = i % s->shared_heads;
      float* own = scratch + thread * each;
      if (s->is_narrow)
        forward_head<uint16_t>(*s, *q, *k, *v, *out, lse, *mask, row, head, own);
      else forward_head<float>(*s, *q, *k, *v, *out, lse, *mask, row, head, own);
    }
}

extern "C" void attention_backward(const Shape* s, const Array* q, const Array* k, const Array* v,
                                   const Array* out, const Array* grad, const float* lse,
                                   const Mask* mask, const Array* grad_q, const Array* grad_k,
                                   const Array* grad_v, float* scratch) {
  const int64_t each = attention_scratch(s, 1);
#pragma omp parallel for num_threads(s->threads) schedule(static, 1)
  for (int64_t thread = 0; thread < s->threads; thread++)
    for (int64_t i = thread; i < s->batch * s->shared_heads; i += s->threads) {
      const int64_t row = i / s->shared_heads, head = i % s->shared_heads;
      float* own = scratch + thread * each;
      if (s->is_narrow)
        backward_head<uint16_t>(*s, *q, *k, *v, *out, *grad, lse, *mask, *grad_q, *grad_k,
                                *grad_v, row, head, own);
      else
        backward_head<float>(*s, *q, *k, *v, *out, *grad, lse, *mask, *grad_q, *grad_k, *grad_v,
                             row, head, own);
    }
}
