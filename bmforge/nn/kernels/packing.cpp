// Quantizes and packs symmetric weights; results are bit-identical to those of packing.py.

#include <vector>

// Quantize a group to integers, as `_quantize_symmetric` does, and return the scale.
static float quantize_weights(const float* __restrict x, int64_t count, int bits,
                              int8_t* __restrict values) {
  int32_t largest_bits = -1;
  int64_t where = 0;
  for (int64_t i = 0; i < count; i++) {
    int32_t size;
    memcpy(&size, x + i, 4);
    size &= 0x7fffffff;
    if (size > largest_bits) {
      largest_bits = size;
      where = i;
    }
  }
  const float largest = x[where];
  const float scale = bits == 8 ? (largest < 0 ? -largest : largest) / 127.0f : largest / -8.0f;
  const float smallest = std::numeric_limits<float>::min();
  const float inverse = scale > -smallest && scale < smallest ? 0.0f : 1.0f / scale;
  if (bits == 8) {
    for (int64_t i = 0; i < count; i++) {
      const float scaled = x[i] * inverse, size = scaled < 0 ? -scaled : scaled;
      const float whole = (float)(int32_t)size;
      const float rounded = whole + (float)(int32_t)((size - whole) * 2.0f);  // half away from 0
      values[i] = (int8_t)(int32_t)(scaled < 0 ? -rounded : rounded);
    }
  } else {
    for (int64_t i = 0; i < count; i++) {
      const double shifted = (double)x[i] * (double)inverse + 8.5;
      const int32_t value = (int32_t)shifted;
      values[i] = (int8_t)std::min(std::max(value, 0), 15);
    }
  }
  return scale;
}

// Quantize and pack a float matrix into panels; fp32 scales are ordered by panel, group and row.
extern "C" void pack_floats(const float* matrix, int64_t rows, int64_t columns, int64_t group,
                            int bits, int threads, uint8_t* packed, float* scales) {
  const int64_t panels = (rows + PANEL - 1) / PANEL, groups = columns / group;
  const int64_t width = columns * PANEL * bits / 8;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t panel = 0; panel < panels; panel++) {
    uint8_t* to = packed + panel * width;
    memset(to, 0, width);
    std::vector<int8_t> values(columns);
    for (int64_t r = 0; r < PANEL; r++) {
      const int64_t row = panel * PANEL + r;
      for (int64_t g = 0; g < groups; g++) {
        const float* x = matrix + row * columns + g * group;
        float* scale = scales + (panel * groups + g) * PANEL + r;
        *scale = row < rows ? quantize_weights(x, group, bits, values.data() + g * group) : 0.0f;
      }
      if (row >= rows) continue;
      const int8_t* from = values.data();
      uint8_t* block = to + 4 * r;
      if (bits == 8) {
        for (int64_t c = 0; c < columns; c += 4, block += BLOCK) memcpy(block, from + c, 4);
      } else {
        for (int64_t c = 0; c < columns; c += 8, block += BLOCK)
          for (int j = 0; j < 4; j++)
            block[j] = (uint8_t)from[c + j] | (uint8_t)(from[c + 4 + j] << 4);
      }
    }
  }
}

// Pack integers (rows, groups, width) into panels, as `pack_values` does. A group is contiguous;
// `row_size` and `group_size` are the strides of rows and groups.
extern "C" void pack_integers(const int8_t* values, int64_t rows, int64_t groups, int64_t width,
                              int64_t row_size, int64_t group_size, int bits, int shift,
                              int threads, uint8_t* packed) {
  const int64_t panels = (rows + PANEL - 1) / PANEL, columns = bits == 8 ? 4 : 8;
  const int64_t panel_size = groups * width / columns * BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t panel = 0; panel < panels; panel++) {
    uint8_t* to = packed + panel * panel_size;
    const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, rows - first);
    if (count < PANEL) memset(to, 0, panel_size);
    for (int64_t g = 0; g < groups; g++)
      for (int64_t r = 0; r < count; r++) {
        const int8_t* from = values + (first + r) * row_size + g * group_size;
        uint8_t* block = to + g * width / columns * BLOCK + 4 * r;
        for (int64_t c = 0; c < width; c += columns, block += BLOCK)
          if (bits == 8)
            memcpy(block, from + c, 4);
          else
            for (int j = 0; j < 4; j++)
              block[j] = (uint8_t)(from[c + j] + shift) | (uint8_t)((from[c + 4 + j] + shift) << 4);
      }
  }
}
