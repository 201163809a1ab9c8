// Vectors of floats, used by the kernels of attention and of row-wise operations.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// floats per vector
#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(W * 4), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(W * 4), aligned(4)));

static inline Vec load(const float* at) { return *(const Vec*)at; }
static inline void store(float* at, Vec value) { *(Vec*)at = value; }
static inline Vec choose(Ints mask, Vec yes, Vec no) { return mask ? yes : no; }

static inline float widen(float value) { return value; }
static inline float widen(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static inline void narrow(float value, float* at) { *at = value; }
static inline void narrow(float value, uint16_t* at) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  *at = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (uint16_t)rounded;
}

// exp for arguments up to 88: 2^n times the polynomial of Cephes' expf (Moshier), about 1 ulp.
static inline Vec exponential(Vec x) {
  const Ints large = x > -87.0f;
  x = choose(large, x, Vec{} - 87.0f);
  const Vec shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: n is in the low bits
  const Vec n = shifted - 12582912.0f;
  const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = (((Ints)shifted - 0x4b400000) + 127) << 23;
  return (Vec)((Ints)(p * (Vec)power) & large);
}

static inline float sum(Vec x) {
  float total = 0;
  for (int i = 0; i < W; i++) total += x[i];
  return total;
}
