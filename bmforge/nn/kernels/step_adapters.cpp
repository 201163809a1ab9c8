// LoRA updates of a linear layer in a decoding step; each token may have other adapters.

// out += scale * x @ down.T @ up.T, for the tokens that are marked, or for all.
struct LowRankUpdate {
  const void *down, *up;
  const uint8_t* tokens;
  int64_t rank, kind;
  float scale;
};

struct LowRankUpdates { const LowRankUpdate* data; int64_t count; };

// Inputs of the updates, x @ down.T: (tokens, rank) of each, one by one.
static void enter_updates(const LowRankUpdates& all, int64_t columns, const float* x,
                          int64_t tokens, float* low) {
  for (int64_t a = 0; a < all.count; a++) {
    const LowRankUpdate& u = all.data[a];
    const Rows down = {u.down, u.rank, columns, (int32_t)u.kind};
    for (int64_t i = 0, end; i < tokens; i = end) {  // runs of marked tokens
      for (end = i; end < tokens && (!u.tokens || u.tokens[end]);) end++;
      if (end == i) end++;
      else multiply_rows_of(down, 0, u.rank, x + i * columns, end - i, low + i * u.rank, u.rank);
    }
    low += tokens * u.rank;
  }
}

// Add rows [first, last) of the updates to the results, (tokens, width). A rank is too short for
// sums over lanes, so sixteen rows of `up` are transposed, once for all tokens.
static void add_updates(const LowRankUpdates& all, const float* low, int64_t tokens, int64_t first,
                        int64_t last, int64_t width, float* out) {
  for (int64_t a = 0; a < all.count; low += tokens * all.data[a++].rank) {
    const LowRankUpdate& u = all.data[a];
    for (int64_t row = first; row < last; row += 16) {
      const int64_t rows = std::min<int64_t>(16, last - row);
      for (int64_t start = 0; start < u.rank; start += 16) {
        const int64_t ranks = std::min<int64_t>(16, u.rank - start);
        float turned[256] = {}, sums[16];
        for (int64_t j = 0; j < rows; j++)
          for (int64_t r = 0; r < ranks; r++)
            turned[16 * r + j] = widen_one(u.up, u.kind, (row + j) * u.rank + start + r);
        for (int64_t i = 0; i < tokens; i++) {
          if (u.tokens && !u.tokens[i]) continue;
          Floats total = floats(0.0f);
          for (int64_t r = 0; r < ranks; r++)
            total = fused(floats(low[i * u.rank + start + r]), load(turned + 16 * r), total);
          store(sums, mul(floats(u.scale), total));
          for (int64_t j = 0; j < rows; j++) out[i * width + row + j] += sums[j];
        }
      }
    }
  }
}
