
// Dequantizes packed weights: some rows, all rows, or a part of a matrix; see packing.py for the layout.

// The scales and minima of a group of a panel's 16 rows, as floats.
struct Scales {
  float scale[PANEL], minimum[PANEL];
};

static Scales scales_of(const Product& w, int64_t panel, int64_t g) {
  const int64_t place = (panel * (w.columns / w.group) + g) * PANEL;
  Scales s = {};
  store(s.scale, load_scale(w.scales, w.has_wide_scales, place));
  if (w.minima) store(s.minimum, load_scale(w.minima, w.has_wide_scales, place));
  return s;
}

// The columns of a group of row `r` of a panel as floats.
static void unpack_group(const Product& w, int64_t panel, int64_t g, int64_t r, const Scales& s,
                         float* __restrict out) {
  const int64_t step = w.bits == 8 ? 4 : 8;
  const uint8_t* from = w.packed + (panel * w.columns + g * w.group) * PANEL * w.bits / 8;
  const float scale = s.scale[r], minimum = s.minimum[r];
  for (int64_t c = 0; c < w.group; c++) {
    const uint8_t byte = from[c / step * BLOCK + 4 * r + c % 4];
    const int nibble = c % 8 < 4 ? byte & 15 : byte >> 4;
    const int value = w.bits == 8 ? (int8_t)byte : nibble - (w.minima ? 0 : 8);
    out[c] = (float)value * scale + minimum;
  }
}

static const int64_t TILE = 32;  // columns that are dequantized at a time

// Columns `first` to `end` of a panel, (columns, 16), each column `stride` numbers after the last.
template <typename E>
static void unpack_tile(const Product& w, int64_t panel, int64_t first, int64_t end, E* out,
                        int64_t stride) {
  const int64_t step = w.bits == 8 ? 4 : 8, groups = w.columns / w.group;
  const uint8_t* from = w.packed + (panel * w.columns + first) * PANEL * w.bits / 8;
  const Floats values = nibble_values(w.minima ? 0 : 8);
  for (int64_t c = first; c < end;) {
    const int64_t g = c / w.group, last = std::min(end, (g + 1) * w.group);
    const int64_t place = (panel * groups + g) * PANEL;
    const Floats scale = load_scale(w.scales, w.has_wide_scales, place);
    const Floats minimum =
        w.minima ? load_scale(w.minima, w.has_wide_scales, place) : floats(0.0f);
    const auto put = [&](int64_t column, Floats value) {
      store(out + column * stride, add(mul(value, scale), minimum));
    };
    for (; c < last; c += step, from += BLOCK, out += step * stride) {
      const Block block = load_block(from);
      if (w.bits == 8) {
        put(0, column<0>(block)), put(1, column<1>(block));
        put(2, column<2>(block)), put(3, column<3>(block));
      } else {
        put(0, nibble<0>(block, values)), put(4, nibble<4>(block, values));
        put(1, nibble<8>(block, values)), put(5, nibble<12>(block, values));
        put(2, nibble<16>(block, values)), put(6, nibble<20>(block, values));
        put(3, nibble<24>(block, values)), put(7, nibble<28>(block, values));
      }
    }
  }
}

// Panels `panel` to `last`, columns `first` to `end` of a matrix. Rows or, if the part is transposed,
// columns are `stride` numbers apart.
struct Part {
  int64_t panel, last, first, end, stride;
  int32_t is_half, is_transposed;
};

// Transposed: (columns, rows of the panels). Neighboring panels fill a cache line, so all panels of
// a tile's columns come before the next tile.
template <typename E>
static void unpack_transposed(const Product& w, const Part& p, E* out) {
  const int64_t tiles = (p.end - p.first + TILE - 1) / TILE;
#pragma omp parallel for num_threads(w.threads) schedule(static) if (w.threads > 1)
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t first = p.first + t * TILE, end = std::min(first + TILE, p.end);
    E* to = out + (first - p.first) * p.stride;
    for (int64_t panel = p.panel; panel < p.last; panel++, to += PANEL)
      unpack_tile(w, panel, first, end, to, p.stride);
  }
}

// The integers of `count` <= TILE columns of a panel as bytes, four columns of all rows per block.
static void read_blocks(const Product& w, int64_t panel, int64_t first, int64_t count,
                        Words* blocks) {
  const uint8_t* from = w.packed + (panel * w.columns + first) * PANEL * w.bits / 8;
  if (w.bits == 8) {
    memcpy(blocks, from, count * PANEL);
    return;
  }
  for (int64_t c = 0; c < count; c += 8, from += BLOCK, blocks += 2) {
    const Block both = load_block(from);
    const Block low = w.minima ? low_nibbles(both) : less_eight(low_nibbles(both));
    const Block high = w.minima ? high_nibbles(both) : less_eight(high_nibbles(both));
    memcpy(blocks, &low, BLOCK);
    memcpy(blocks + 1, &high, BLOCK);
  }
}

// (rows, columns).
template <typename E>
static void unpack_rows(const Product& w, const Part& p, E* out) {
#pragma omp parallel for num_threads(w.threads) schedule(static) if (w.threads > 1)
  for (int64_t panel = p.panel; panel < p.last; panel++) {
    const int64_t row = panel * PANEL, rows = std::min<int64_t>(PANEL, w.rows - row);
    for (int64_t first = p.first; first < p.end; first += TILE) {
      const int64_t count = std::min(TILE, p.end - first);
      Words blocks[TILE / 4] = {};
      read_blocks(w, panel, first, count, blocks);
      transpose(blocks);
      for (int64_t c = 0; c < count; c += PANEL) {
        const Scales s = scales_of(w, panel, (first + c) / w.group);
        E* to = out + (row - p.panel * PANEL) * p.stride + first + c - p.first;
        for (int64_t r = 0; r < rows; r++, to += p.stride) {
          const int8_t* from = (const int8_t*)(blocks + r % 8) + r / 8 * TILE + c;
          const Floats scaled = mul(load(from), floats(s.scale[r]));
          const Floats values = add(scaled, floats(s.minimum[r]));
          if (count - c >= PANEL) {
            store(to, values);
          } else {
            E rest[PANEL];
            store(rest, values);
            memcpy(to, rest, (count - c) * sizeof(E));
          }
        }
      }
    }
  }
}

// Dequantize a part of a matrix to fp32 or bf16; of `product` only the weights, sizes, threads and
// `out` are used.
extern "C" void unpack_part(const Product* product, const Part* part) {
  const Product w = *product;
  const Part p = *part;
  if (p.is_half && p.is_transposed) unpack_transposed(w, p, (Bf16*)w.out);
  else if (p.is_transposed) unpack_transposed(w, p, w.out);
  else if (p.is_half) unpack_rows(w, p, (Bf16*)w.out);
  else unpack_rows(w, p, w.out);
}

// Dequantize the rows with the given indices; returns false if an index is out of range.
extern "C" bool pick_rows(const Product* product, const int64_t* rows, int64_t count) {
  const Product w = *product;
  for (int64_t i = 0; i < count; i++)
    if (rows[i] < 0 || rows[i] >= w.rows) return false;
  for (int64_t i = 0; i < count; i++) {
    const int64_t panel = rows[i] / PANEL, r = rows[i] % PANEL;
    for (int64_t g = 0; g < w.columns / w.group; g++)
      unpack_group(w, panel, g, r, scales_of(w, panel, g), w.out + i * w.columns + g * w.group);
  }
  return true;
}
