// Feed-forward layer with experts, of which each token uses some.
//
// Every thread sorts the tokens by expert itself; the rows of an expert's products are split.
// A token's outputs are summed in the order of its choices, independent of other tokens.

// Select the k best experts and their weights: softmax, over all experts or over the selected.
static void choose_experts(const Experts& e, float* scores, int32_t* chosen, float* weights) {
  const int64_t count = e.router.rows;
  float largest = scores[0];
  for (int64_t i = 1; i < count; i++) largest = scores[i] > largest ? scores[i] : largest;
  for (int64_t i = 0; i < count; i++) scores[i] = exponential(scores[i] - largest);
  const float total = sum_of(count, [=](int64_t i) { return scores[i]; });
  float picked = 0.0f;
  for (int64_t j = 0; j < e.per_token; j++) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
      if (scores[i] > scores[best]) best = i;
    chosen[j] = (int32_t)best;
    weights[j] = scores[best] / total;
    picked += weights[j];
    scores[best] = -1.0f;
  }
  for (int64_t j = 0; j < e.per_token; j++)
    weights[j] = !e.weighs ? 1.0f : e.normalizes ? weights[j] / picked : weights[j];
}

// Choices (token * k + j) sorted by expert, and the first position of each expert.
static void sort_choices(const Experts& e, const int32_t* chosen, int64_t count, int32_t* order,
                         int32_t* starts) {
  const int64_t experts = e.router.rows;
  for (int64_t i = 0; i <= experts; i++) starts[i] = 0;
  for (int64_t c = 0; c < count; c++) starts[chosen[c] + 1]++;
  for (int64_t i = 0; i < experts; i++) starts[i + 1] += starts[i];
  for (int64_t c = 0; c < count; c++) order[starts[chosen[c]]++] = (int32_t)c;
  for (int64_t i = experts; i > 0; i--) starts[i] = starts[i - 1];
  starts[0] = 0;
}

// activation(gate) * up, or activation(up), of contiguous rows.
static void multiply_inner(Thread& t, const FeedPart& p, const Matrix& gate, const Matrix& up,
                           const float* x, float* gates, float* ups) {
  enter(t, up, x);
  for_panels(t, up, [&](int64_t first, int64_t end) {
    if (p.gated) multiply_some(t, gate, x, first, end, gates);
    multiply_some(t, up, x, first, end, ups);
    const int64_t count = std::min(end * PANEL, up.rows) - first * PANEL;
    for (int64_t i = 0; i < t.count; i++) {
      const int64_t at = i * up.rows + first * PANEL;
      activate(p.activation, (p.gated ? gates : ups) + at, p.gated ? ups + at : nullptr, count);
    }
  });
}

// Remaining work after the products of one expert, from row `first` on, and of the next.
template <typename F>
static void for_experts(Thread& t, const Experts& e, F f) {
  const int64_t all = t.count;
  for (int64_t i = 0; i < e.router.rows; i++) {
    const int64_t first = t.room.starts[i], count = t.room.starts[i + 1] - first;
    if (!count) continue;
    t.count = count;
    t.quantized_from = nullptr;
    f(i, first);
  }
  t.count = all;
  t.quantized_from = nullptr;
}

static void add_experts(Thread& t, const Layer& layer, bool has_shared, float sum_scale) {
  const Experts& e = *layer.experts;
  const int64_t hidden = t.run.hidden, k = e.per_token;
  int32_t* places = t.room.places;
  for (int64_t c = 0; c < t.count * k; c++) places[t.room.order[c]] = (int32_t)c;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < t.count; i++) {
    float* residual = t.run.x + i * hidden;
    const float* weights = t.room.weights + i * k;
    const float* sums = t.room.sums + i * hidden;
    const float gate = e.shared_gate.rows ? sigmoid(t.room.gating[i]) : 1.0f;
    for (int64_t h = 0; h < hidden; h++) {
      float total = 0.0f;
      for (int64_t j = 0; j < k; j++)
        total += t.room.parts[(int64_t)places[i * k + j] * hidden + h] * weights[j];
      if (has_shared) total += gate * sums[h];
      residual[h] = (residual[h] + total * layer.feed.add_scale) * sum_scale;
    }
  }
}

static void run_experts(Thread& t, const Layer& layer, const float* x, float sum_scale) {
  const Experts& e = *layer.experts;
  const FeedPart& p = layer.feed;
  const int64_t hidden = t.run.hidden, k = e.per_token;
  const bool has_shared = p.up.rows > 0;
  multiply_into(t, e.router, x, t.room.routed);
  if (e.shared_gate.rows) multiply_into(t, e.shared_gate, x, t.room.gating);
  wait();
#pragma omp for schedule(static)
  for (int64_t i = 0; i < t.count; i++)
    choose_experts(e, t.room.routed + i * e.router.rows, t.room.chosen + i * k,
                   t.room.weights + i * k);
  sort_choices(e, t.room.chosen, t.count * k, t.room.order, t.room.starts);
  if (has_shared) {
    t.quantized_from = nullptr;
    multiply_inner(t, p, p.gate, p.up, x, t.room.gate, t.room.up);
    wait();
    t.quantized_from = nullptr;
    multiply_into(t, p.down, p.gated ? t.room.gate : t.room.up, t.room.sums);
    wait();
  }
  float* mine = x == t.room.normed ? t.room.entered : t.room.normed;
  for_experts(t, e, [&](int64_t i, int64_t first) {
    for (int64_t c = 0; c < t.count; c++)
      memcpy(mine + c * hidden, x + t.room.order[first + c] / k * hidden, hidden * sizeof(float));
    const int64_t width = e.ups[i].rows;
    multiply_inner(t, p, e.gates[i], e.ups[i], mine, t.room.gate + first * width,
                   t.room.up + first * width);
  });
  wait();
  for_experts(t, e, [&](int64_t i, int64_t first) {
    const float* inner = p.gated ? t.room.gate : t.room.up;
    multiply_into(t, e.downs[i], inner + first * e.ups[i].rows, t.room.parts + first * hidden);
  });
  wait();
  add_experts(t, layer, has_shared, sum_scale);
}

static void feed(Thread& t, const Layer& layer, const float* x) {
  if (layer.experts) run_experts(t, layer, x, layer.sum_scale);
  else run_feed(t, layer.feed, x, layer.sum_scale);
}

static void run_layer(Thread& t, const Layer& layer, const Past& own, const Past& memory) {
  const int place = layer.norm_place;
  if (place == PARALLEL) {
    // The residual changes meanwhile; its normalized form is kept here.
    run_attention(t, layer, layer.attn, own, true, 1.0f);
    t.quantized_from = nullptr;
    feed(t, layer, scaled(t, t.room.normed, layer.feed.in_scale));
    wait();
    return;
  }
  if (layer.attn.exists) {
    run_attention(t, layer, layer.attn, own, true, layer.sum_scale);
    end_part(t, layer.attn.norm, place);
  }
  if (layer.cross.exists) {
    run_attention(t, layer, layer.cross, memory, false, layer.sum_scale);
    end_part(t, layer.cross.norm, place);
  }
  if (layer.feed.exists) {
    feed(t, layer, read_residual(t, layer.feed.norm, place, layer.feed.in_scale));
    end_part(t, layer.feed.norm, place);
  }
}

extern "C" void run_step(const Run* r) {
#pragma omp parallel num_threads(r->threads) if (r->threads > 1)
  {
#ifdef _OPENMP
    const int thread = omp_get_thread_num();
#else
    const int thread = 0;
#endif
    Thread t = {*r, divide_room(*r, thread), r->rows * r->tokens, {}, nullptr, 0};
    for (int64_t i = 0; i < r->count; i++) run_layer(t, r->layers[i], r->own[i], r->memory[i]);
  }
}
