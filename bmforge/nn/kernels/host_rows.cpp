// Operations of a block between its products, each in one pass forward and one backward: the tanh
// form of GELU and the root-mean-square norm; and the backward pass of gated activations. Arithmetic
// is fp32, also of bf16. floats.hpp is included before this file.

constexpr int64_t PART = 256;       // floats that are widened at a time
constexpr int64_t CHUNK = 1 << 14;  // elements that one thread processes at a time
constexpr int64_t LINES = 64;       // rows whose weight gradients are summed together

struct Slope {
  Vec value, slope;
};

// x s and its derivative, where s = sigmoid(t) and `rate` is the derivative of t.
static inline Slope times_sigmoid(Vec x, Vec t, Vec rate) {
  // Beyond 88 an exponential overflows; the sigmoid there is 0 or 1 to 38 digits.
  t = choose(t > -88.0f, t, Vec{} - 88.0f);
  t = choose(t < 88.0f, t, Vec{} + 88.0f);
  const Vec one = Vec{} + 1.0f, power = exponential(-t), s = one / (one + power);
  // power * s is 1 - s, without the digits that the difference loses.
  return {x * s, s * (one + x * (power * s) * rate)};
}

// GELU's tanh form (Hendrycks and Gimpel 2016): t = 2 sqrt(2 / pi) (x + 0.044715 x^3).
static inline Slope bend(Vec x) {
  constexpr float first = 1.5957691216f, third = first * 0.044715f;
  const Vec square = x * x;
  return times_sigmoid(x, x * (square * third + first), square * (3 * third) + first);
}

static inline Slope silu(Vec x) { return times_sigmoid(x, x, Vec{} + 1.0f); }

template <typename E>
static void read(const E* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i++) to[i] = widen(from[i]);
}

// Pads with zeros to whole vectors.
template <typename E>
static void read_padded(const E* from, int64_t count, float* to) {
  read(from, count, to);
  std::fill(to + count, to + (count + W - 1) / W * W, 0.0f);
}

template <typename E>
static void write(const float* from, int64_t count, E* to) {
  for (int64_t i = 0; i < count; i++) narrow(from[i], to + i);
}

// Write GELU(x) to `out` or, if `grad` is not null, the gradient of x.
template <typename E>
static void bend_part(int64_t count, const E* x, const E* grad, E* out) {
  float in[PART] = {}, given[PART] = {}, made[PART];
  read(x, count, in);
  if (grad) read(grad, count, given);
  for (int64_t i = 0; i < count; i += W) {
    const Slope here = bend(load(in + i));
    store(made + i, grad ? load(given + i) * here.slope : here.value);
  }
  write(made, count, out);
}

template <typename E>
static void run_bend(int64_t size, int threads, const E* x, const E* grad, E* out) {
#pragma omp parallel for num_threads(threads) schedule(static) if (size > CHUNK)
  for (int64_t start = 0; start < size; start += CHUNK)
    for (int64_t at = start; at < std::min(size, start + CHUNK); at += PART)
      bend_part(std::min(PART, size - at), x + at, grad ? grad + at : nullptr, out + at);
}

struct Gated {
  const void *gate, *up, *grad;
  void *of_gate, *of_up;
};

// Gradients of gate and up, given the gradient of f(gate) * up.
template <typename E, Slope (*f)(Vec)>
static void gate_part(int64_t at, int64_t count, const Gated& all) {
  float gate[PART], up[PART], grad[PART], of_gate[PART], of_up[PART];
  read_padded((const E*)all.gate + at, count, gate);
  read_padded((const E*)all.up + at, count, up);
  read_padded((const E*)all.grad + at, count, grad);
  for (int64_t i = 0; i < count; i += W) {
    const Slope part = f(load(gate + i));
    store(of_gate + i, load(up + i) * load(grad + i) * part.slope);
    store(of_up + i, load(grad + i) * part.value);
  }
  write(of_gate, count, (E*)all.of_gate + at);
  write(of_up, count, (E*)all.of_up + at);
}

template <typename E, Slope (*f)(Vec)>
static void run_gate(int64_t size, int threads, const Gated& all) {
#pragma omp parallel for num_threads(threads) schedule(static) if (size > CHUNK)
  for (int64_t start = 0; start < size; start += CHUNK)
    for (int64_t at = start; at < std::min(size, start + CHUNK); at += PART)
      gate_part<E, f>(at, std::min(PART, size - at), all);
}

template <typename E>
static void norm_row(int64_t width, float eps, const E* x, const E* weight, E* out, float* row) {
  read(x, width, row);
  Vec squares = {};
  for (int64_t i = 0; i < width; i += W) squares += load(row + i) * load(row + i);
  const float scale = 1 / std::sqrt(sum(squares) / width + eps);
  for (int64_t i = 0; i < width; i++) {
    E rounded;  // the normalized value is rounded before it is multiplied by the weight
    narrow(row[i] * scale, &rounded);
    narrow(widen(rounded) * widen(weight[i]), out + i);
  }
}

// Gradients of y = w n with n = x r, r = 1 / sqrt(mean(x^2) + eps), given the gradient g of y:
// r (g w - n mean(g w n)) for x, and sum(g n) for w.
template <typename E>
static void norm_row_backward(int64_t width, float eps, const E* x, const E* weight, const E* grad,
                              E* of_x, float* of_weight, float* row, float* into) {
  read(x, width, row);
  read(grad, width, into);
  Vec squares = {}, shared = {};
  for (int64_t i = 0; i < width; i += W) squares += load(row + i) * load(row + i);
  const float scale = 1 / std::sqrt(sum(squares) / width + eps);
  for (int64_t i = 0; i < width; i++) {
    row[i] *= scale;
    E rounded;
    narrow(row[i], &rounded);
    of_weight[i] += into[i] * widen(rounded);
    into[i] *= widen(weight[i]);
  }
  for (int64_t i = 0; i < width; i += W) shared += load(row + i) * load(into + i);
  const float mean = sum(shared) / width;
  for (int64_t i = 0; i < width; i++) narrow(scale * (into[i] - row[i] * mean), of_x + i);
}

template <typename E>
static void run_norm(int64_t rows, int64_t width, float eps, int threads, const E* x,
                     const E* weight, E* out, float* scratch) {
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (rows * width > CHUNK)
  for (int64_t thread = 0; thread < threads; thread++)
    for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++)
      norm_row(width, eps, x + row * width, weight, out + row * width, scratch + thread * width);
}

// The weight gradient is summed over LINES rows each, and then over these sums in order, so that
// it does not depend on the number of threads.
template <typename E>
static void run_norm_backward(int64_t rows, int64_t width, float eps, int threads, const E* x,
                              const E* weight, const E* grad, E* of_x, float* of_weight,
                              float* scratch) {
  const int64_t parts = (rows + LINES - 1) / LINES;
  float* sums = scratch + 2 * threads * width;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (rows * width > CHUNK)
  for (int64_t thread = 0; thread < threads; thread++) {
    float* own = scratch + 2 * thread * width;
    for (int64_t part = thread; part < parts; part += threads) {
      float* of_part = sums + part * width;
      std::fill(of_part, of_part + width, 0.0f);
      for (int64_t row = part * LINES; row < std::min(rows, (part + 1) * LINES); row++)
        norm_row_backward(width, eps, x + row * width, weight, grad + row * width,
                          of_x + row * width, of_part, own, own + width);
    }
  }
  std::fill(of_weight, of_weight + width, 0.0f);
  for (int64_t part = 0; part < parts; part++)
    for (int64_t i = 0; i < width; i++) of_weight[i] += sums[part * width + i];
}

extern "C" int64_t norm_scratch(int64_t rows, int64_t width, int threads) {
  return (2 * threads + (rows + LINES - 1) / LINES) * width;
}

#define BOTH(call) (is_narrow ? call(uint16_t) : call(float))

extern "C" void gelu(int is_narrow, int threads, int64_t size, const void* x, const void* grad,
                     void* out) {
#define CALL(E) run_bend(size, threads, (const E*)x, (const E*)grad, (E*)out)
  BOTH(CALL);
#undef CALL
}

extern "C" void gate_backward(int is_narrow, int is_silu, int threads, int64_t size,
                              const void* gate, const void* up, const void* grad, void* of_gate,
                              void* of_up) {
  const Gated all = {gate, up, grad, of_gate, of_up};
#define CALL(E) \
  (is_silu ? run_gate<E, silu>(size, threads, all) : run_gate<E, bend>(size, threads, all))
  BOTH(CALL);
#undef CALL
}

extern "C" void norm_forward(int is_narrow, int threads, int64_t rows, int64_t width, float eps,
                             const void* x, const void* weight, void* out, float* scratch) {
#define CALL(E) run_norm(rows, width, eps, threads, (const E*)x, (const E*)weight, (E*)out, scratch)
  BOTH(CALL);
#undef CALL
}

extern "C" void norm_backward(int is_narrow, int threads, int64_t rows, int64_t width, float eps,
                              const void* x, const void* weight, const void* grad, void* of_x,
                              float* of_weight, float* scratch) {
#define CALL(E)                                                                              \
  run_norm_backward(rows, width, eps, threads, (const E*)x, (const E*)weight, (const E*)grad, \
                    (E*)of_x, of_weight, scratch)
  BOTH(CALL);
#undef CALL
}
