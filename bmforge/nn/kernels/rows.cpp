// Products of plain weights, as torch lays them out, with one to a few tokens.
//
// Every result is summed in one order: four sums of sixteen lanes, 64 columns a step, are added as
// pairs, and then the lanes; so the number of tokens and the instruction set change no bit.

// A matrix (rows, columns) of fp32, bf16 or fp16.
struct Rows {
  const void* weight;
  int64_t rows, columns;
  int32_t kind;
};

enum Kind { FP32, BF16, FP16, PACKED };

static const int STEP = 64;  // columns
static const int FLOAT_TOKENS = 4;

// What is left of a row behind whole steps, with zeros behind it.
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
      total[t][j] = add(total[t][j], mul(weight, load(x + t * stride + 16 * j)));
  }
}

// One row times T tokens, whose results are `apart` floats from each other.
template <int T, typename E>
static void multiply_row(const E* w, int64_t columns, const float* x, int64_t stride, float* out,
                         int64_t apart) {
  Floats total[T][4];
  for (int t = 0; t < T; t++)
    for (int j = 0; j < 4; j++) total[t][j] = floats(0.0f);
  int64_t c = 0;
  for (; c + STEP <= columns; c += STEP) {
    for (int b = 0; b < STEP * (int)sizeof(E); b += 64)
      __builtin_prefetch((const char*)(w + c) + b + AHEAD_BYTES);
    add_step<T>(total, w + c, x + c, stride);
  }
  if (c < columns) {
    E weights[STEP];
    float values[T * STEP];
    copy_rest(w + c, columns - c, weights);
    for (int t = 0; t < T; t++) copy_rest(x + t * stride + c, columns - c, values + t * STEP);
    add_step<T>(total, weights, values, STEP);
  }
  for (int t = 0; t < T; t++)
    out[t * apart] = sum(add(add(total[t][0], total[t][1]), add(total[t][2], total[t][3])));
}

// Rows from `first` to `last` times all tokens; results of a token are `apart` floats behind those
// of the one before. Some rows stay near the core while all tokens pass by, a few at a time.
template <typename E>
static void multiply_some_rows(const E* weight, int64_t columns, int64_t first, int64_t last,
                               const float* x, int64_t tokens, float* out, int64_t apart) {
  const int64_t near = std::max<int64_t>(NEAR_BYTES / (columns * (int64_t)sizeof(E)), 1);
  for (; first < last; first += near) {
    const int64_t end = std::min(first + near, last);
    int64_t t = 0;
    const auto multiply_rows_by = [&](auto count) {
      for (int64_t row = first; row < end; row++)
        multiply_row<decltype(count)::value>(weight + row * columns, columns, x + t * columns,
                                             columns, out + t * apart + row, apart);
      t += decltype(count)::value;
    };
    while (t + FLOAT_TOKENS <= tokens) multiply_rows_by(std::integral_constant<int, FLOAT_TOKENS>());
    while (t + 2 <= tokens) multiply_rows_by(std::integral_constant<int, 2>());
    if (t < tokens) multiply_rows_by(std::integral_constant<int, 1>());
  }
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
