// Products of plain weights in torch's layout with one to a few tokens.
//
// Every result is summed in a fixed order by fused multiplications and additions: four sums of
// sixteen lanes, 64 columns per step; then the four sums are added in pairs, and then the lanes. So
// results do not depend on token count or instruction set.

#include <unistd.h>

// A matrix (rows, columns) of fp32, bf16 or fp16.
struct Rows {
  const void* weight;
  int64_t rows, columns;
  int32_t kind;
};

enum Kind { FP32, BF16, FP16, PACKED };

static const int STEP = 64;  // columns
static const int FLOAT_TOKENS = 4;
static const int ROW_SUMS = 16;  // rows times tokens whose sums are kept in registers

// How the rows are read from memory: whole, or in parts.
enum Origin { MEMORY, PARTS };

// Bytes of a core's L1 cache.
static int64_t nearest_bytes() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const int64_t told = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#else
  static const int64_t told = 0;
#endif
  return told > 0 ? told : 32 << 10;
}

// The rest of a row after whole steps, padded with zeros.
template <typename E>
static inline void copy_rest(const E* from, int64_t count, E* to) {
  memset(to, 0, STEP * sizeof(E));
  memcpy(to, from, count * sizeof(E));
}

template <int T, typename E>
static inline void add_step(Floats (*total)[4], const E* w, const float* x, int64_t stride) {
  for (int j = 0; j < 4; j++) {
    const Floats weight = load(w + 16 * j);
    for (int t = 0; t < T; t++)
      total[t][j] = fused(weight, load(x + t * stride + 16 * j), total[t][j]);
  }
}

// Add some columns of a row times T tokens to `total`; the last step is padded with zeros.
// Prefetches a little ahead or, if rows are read in parts, the next part.
template <int T, Origin ORIGIN, typename E>
static inline void add_columns_of(const E* w, const E* next, int64_t count, const float* x,
                                  int64_t stride, Floats (*total)[4]) {
  int64_t c = 0;
  for (; c + STEP <= count; c += STEP) {
    for (int b = 0; b < STEP * (int)sizeof(E); b += 64) {
      if (ORIGIN == PARTS) __builtin_prefetch((const char*)(next + c) + b, 0, 2);
      else __builtin_prefetch((const char*)(w + c) + b + AHEAD_BYTES);
    }
    add_step<T>(total, w + c, x + c, stride);
  }
  if (c == count) return;
  E weights[STEP];
  float values[T * STEP];
  copy_rest(w + c, count - c, weights);
  for (int t = 0; t < T; t++) copy_rest(x + t * stride + c, count - c, values + t * STEP);
  add_step<T>(total, weights, values, STEP);
}

static inline float sum_lanes(const Floats* total) {
  return sum(add(add(total[0], total[1]), add(total[2], total[3])));
}

// Rows times T tokens, with results `apart` floats apart.
template <int T, Origin ORIGIN, typename E>
static void multiply_whole_rows(const E* w, int64_t rows, int64_t columns, const float* x,
                                float* out, int64_t apart) {
  for (int64_t row = 0; row < rows; row++, w += columns) {
    Floats total[T][4];
    for (int t = 0; t < T; t++)
      for (int j = 0; j < 4; j++) total[t][j] = floats(0.0f);
    add_columns_of<T, ORIGIN>(w, w, columns, x, columns, total);
    for (int t = 0; t < T; t++) out[t * apart + row] = sum_lanes(total[t]);
  }
}

// The same, one part of the columns at a time, for a few rows: that part of the input stays in the
// L1 cache for all of these rows.
template <int T, typename E>
static void multiply_divided_rows(const E* w, int64_t rows, int64_t columns, const float* x,
                                  float* out, int64_t apart) {
  const int64_t staying = nearest_bytes() * 3 / 8 / (T * (int64_t)sizeof(float));
  const int64_t part = std::max<int64_t>(staying / STEP, 1) * STEP;
  while (rows > 0) {
    const int64_t few = std::min<int64_t>(ROW_SUMS / T, rows);
    Floats total[ROW_SUMS / T][T][4];
    for (int64_t row = 0; row < few; row++)
      for (int t = 0; t < T; t++)
        for (int j = 0; j < 4; j++) total[row][t][j] = floats(0.0f);
    const E* next_rows = few < rows ? w + few * columns : w;
    for (int64_t first = 0; first < columns; first += part) {
      const int64_t count = std::min(part, columns - first);
      const E* next_part = first + part < columns ? w + first + part : next_rows;
      for (int64_t row = 0; row < few; row++) {
        const E* from = w + row * columns + first;
        const E* next = row + 1 < few ? from + columns : next_part;
        if constexpr (T == 1) {  // memory-bound, and measured to be slower with sums in registers
          add_columns_of<T, PARTS>(from, next, count, x + first, columns, total[row]);
        } else {
          Floats own[T][4];
          memcpy(own, total[row], sizeof(own));
          add_columns_of<T, PARTS>(from, next, count, x + first, columns, own);
          memcpy(total[row], own, sizeof(own));
        }
      }
    }
    for (int64_t row = 0; row < few; row++)
      for (int t = 0; t < T; t++) out[t * apart + row] = sum_lanes(total[row][t]);
    w += few * columns;
    out += few;
    rows -= few;
  }
}

// One pass over the rows, with all tokens.
template <int T, typename E>
static void multiply_once(const E* w, int64_t rows, int64_t columns, const float* x, float* out,
                          int64_t apart) {
  // Whether the L1 cache keeps the input from one row to the next.
  const int64_t pass_by = columns * (int64_t)(T * sizeof(float) + sizeof(E));
  const bool stays = pass_by <= nearest_bytes() * 3 / 4;
  if (stays) multiply_whole_rows<T, MEMORY>(w, rows, columns, x, out, apart);
  else multiply_divided_rows<T>(w, rows, columns, x, out, apart);
}

// A tile of R rows in cache times T tokens. Only one of the four sums of every result is in the
// registers at a time; each pass reads every fourth line of the rows and of the tokens.
template <int R, int T, typename E>
static void multiply_tile(const E* w, int64_t columns, const float* x, float* out, int64_t apart) {
  const int64_t whole = columns / STEP * STEP;
  E weights[R * STEP];
  float values[T * STEP];
  if (whole < columns) {
    const int64_t rest = columns - whole;
    for (int r = 0; r < R; r++) copy_rest(w + r * columns + whole, rest, weights + r * STEP);
    for (int t = 0; t < T; t++) copy_rest(x + t * columns + whole, rest, values + t * STEP);
  }
  Floats pairs[2][R][T];
  for (int j = 0; j < 4; j++) {
    Floats own[R][T];
    for (int r = 0; r < R; r++)
      for (int t = 0; t < T; t++) own[r][t] = floats(0.0f);
    const auto add_lanes = [&](const E* rows, int64_t row_stride, const float* tokens,
                               int64_t token_stride) {
      Floats weight[R];
      for (int r = 0; r < R; r++) weight[r] = load(rows + r * row_stride);
      for (int t = 0; t < T; t++) {
        const Floats value = load(tokens + t * token_stride);
        for (int r = 0; r < R; r++) own[r][t] = fused(weight[r], value, own[r][t]);
      }
    };
    for (int64_t c = 16 * j; c < whole; c += STEP) add_lanes(w + c, columns, x + c, columns);
    if (whole < columns) add_lanes(weights + 16 * j, STEP, values + 16 * j, STEP);
    for (int r = 0; r < R; r++)
      for (int t = 0; t < T; t++)
        pairs[j / 2][r][t] = j % 2 ? add(pairs[j / 2][r][t], own[r][t]) : own[r][t];
  }
  for (int t = 0; t < T; t++)
    for (int r = 0; r < R; r++) out[t * apart + r] = sum(add(pairs[0][r][t], pairs[1][r][t]));
}

// Rows in cache times T tokens.
template <int T, typename E>
static void multiply_tiles(const E* w, int64_t rows, int64_t columns, const float* x, float* out,
                           int64_t apart) {
  int64_t row = 0;
  for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
    multiply_tile<TILE_ROWS, T>(w + row * columns, columns, x, out + row, apart);
  for (; row < rows; row++) multiply_tile<1, T>(w + row * columns, columns, x, out + row, apart);
}

// Call f with the number of tokens, 1 to T, as a compile-time constant.
template <int T = FLOAT_TOKENS, typename F>
static inline void with_tokens(int64_t count, F f) {
  if (count == T) f(std::integral_constant<int, T>());
  else if constexpr (T > 1) with_tokens<T - 1>(count, f);
}

// Rows `first` to `last` times all tokens; results of consecutive tokens are `apart` floats apart.
// Processes a few rows at a time, so that they stay in cache for all tokens.
template <typename E>
static void multiply_some_rows(const E* weight, int64_t columns, int64_t first, int64_t last,
                               const float* x, int64_t tokens, float* out, int64_t apart) {
  if (tokens <= FLOAT_TOKENS) {
    with_tokens(tokens, [&](auto count) {
      multiply_once<decltype(count)::value>(weight + first * columns, last - first, columns, x,
                                            out + first, apart);
    });
    return;
  }
  const int64_t near = std::max<int64_t>(NEAR_BYTES / (columns * (int64_t)sizeof(E)), 1);
  for (; first < last; first += near)
    for (int64_t t = 0; t < tokens; t += TILE_TOKENS)
      with_tokens<TILE_TOKENS>(std::min<int64_t>(TILE_TOKENS, tokens - t), [&](auto count) {
        multiply_tiles<decltype(count)::value>(
            weight + first * columns, std::min(near, last - first), columns, x + t * columns,
            out + t * apart + first, apart);
      });
}

static void multiply_rows_of(const Rows& w, int64_t first, int64_t last, const float* x,
                             int64_t tokens, float* out, int64_t apart) {
  if (w.kind == FP32)
    multiply_some_rows((const float*)w.weight, w.columns, first, last, x, tokens, out, apart);
  else if (w.kind == BF16)
    multiply_some_rows((const Bf16*)w.weight, w.columns, first, last, x, tokens, out, apart);
  else
    multiply_some_rows((const uint16_t*)w.weight, w.columns, first, last, x, tokens, out, apart);
}

extern "C" void multiply_rows(const Rows* w, const float* x, int64_t tokens, int threads,
                              float* out) {
  threads = tokens * w->rows * w->columns < FEW_ELEMENTS ? 1 : threads;
  const int64_t piece = std::max<int64_t>(w->rows / (8 * threads), 1);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t first = 0; first < w->rows; first += piece)
    multiply_rows_of(*w, first, std::min(first + piece, w->rows), x, tokens, out, w->rows);
}
