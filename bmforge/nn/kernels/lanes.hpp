// Sixteen lanes, one per row of a panel, for three instruction sets.
//
// A block is 64 bytes: lane r has bytes 4r to 4r + 3, four columns of row r. `dot` adds the products
// of a lane's four bytes with four activations, which are common to all lanes. Integer sums are
// exact; float operations are single multiplications and additions, and fused only by `fused`; so all
// three instruction sets give identical bits.

#include <cstdint>
#include <cstring>

struct Bf16 { uint16_t bits; };  // upper half of a float

#if defined(__AVX2__)

#include <immintrin.h>

static inline float sum_eight(__m256 x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// Offset added to signed bytes before they are multiplied; `begin` subtracts its effect.
static const int BYTE_SHIFT = 128;
typedef __m512 Floats;
typedef __m512i Ints;
typedef __m512i Block;
typedef __m512i Shorts;  // partial sums for Ints
static const int MOST_PANELS = 2, MOST_TOKENS = 6;  // tile sizes whose sums fit into the registers
static const int TILE_ROWS = 6, TILE_TOKENS = 4;  // the same for plain weights

static inline Floats floats(float value) { return _mm512_set1_ps(value); }
static inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
static inline Floats load(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
static inline Floats load(const Bf16* from) {
  const __m256i bits = _mm256_loadu_si256((const __m256i*)from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
static inline Floats load(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
static inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
// Sum of the lanes: lanes i and i + 8 first, then i and i + 4, and so on.
static inline float sum(Floats x) {
  const __m256 high = _mm512_castps512_ps256(_mm512_shuffle_f32x4(x, x, 0x4e));
  return sum_eight(_mm256_add_ps(_mm512_castps512_ps256(x), high));
}
static inline Floats add(Floats x, Floats y) { return _mm512_add_ps(x, y); }
static inline Floats mul(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
static inline Floats fused(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
static inline Floats as_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
static inline Ints ints(int32_t value) { return _mm512_set1_epi32(value); }

static inline Block load_block(const uint8_t* from) {
  return _mm512_loadu_si512((const void*)from);
}
static inline Block low_nibbles(Block x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
static inline Block high_nibbles(Block x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
static inline Block ready_bytes(Block x) {
  return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80));
}
// Assembly, since with the intrinsic gcc copies every sum twice.
static inline Ints dot(Ints sum, Block x, int32_t four) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(_mm512_set1_epi32(four)));
  return sum;
}
static inline Ints dot_bytes(Ints sum, Block ready, Block, int32_t four) {
  return dot(sum, ready, four);
}
static inline Shorts begin_shorts(Ints sum) { return sum; }
static inline Ints end_shorts(Ints, Shorts part) { return part; }
static inline Shorts dot_nibbles(Shorts sum, Block x, int32_t four) { return dot(sum, x, four); }
static inline Block less_eight(Block x) { return _mm512_sub_epi8(x, _mm512_set1_epi8(8)); }

// Column `j` of four in a lane, as a float.
template <int j>
static inline Floats column(Block x) {
  return as_floats(_mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * j), 24));
}
// The values of a nibble: 0 to 15, minus `shift`.
static inline Floats nibble_values(int shift) {
  const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return as_floats(_mm512_sub_epi32(numbers, ints(shift)));
}
// The nibble `bit` bits above the lowest of each lane, as a float.
template <int bit>
static inline Floats nibble(Block x, Floats values) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(x, bit), values);  // reads 4 bits of each lane
}

#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)

static const int BYTE_SHIFT = 0;
struct Floats { __m256 a, b; };
struct Ints { __m256i a, b; };
typedef Ints Block;
typedef Ints Shorts;
static const int MOST_PANELS = 1, MOST_TOKENS = 2;
static const int TILE_ROWS = 1, TILE_TOKENS = 4;

static inline Floats floats(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline Floats load(const float* from) {
  return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
static inline Floats load(const uint16_t* from) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8)))};
}
static inline __m256 widen_bf16(const Bf16* from) {
  const __m128i bits = _mm_loadu_si128((const __m128i*)from);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
static inline Floats load(const Bf16* from) { return {widen_bf16(from), widen_bf16(from + 8)}; }
static inline __m256 widen_bytes(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
static inline Floats load(const int8_t* from) { return {widen_bytes(from), widen_bytes(from + 8)}; }
static inline float sum(Floats x) { return sum_eight(_mm256_add_ps(x.a, x.b)); }
static inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.a);
  _mm256_storeu_ps(to + 8, x.b);
}
static inline Floats add(Floats x, Floats y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
static inline Floats mul(Floats x, Floats y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
static inline Floats fused(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline Floats as_floats(Ints x) {
  return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
static inline Ints ints(int32_t value) {
  return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
}

static inline Block load_block(const uint8_t* from) {
  return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)from + 1)};
}
static inline Block low_nibbles(Block x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
static inline Block high_nibbles(Block x) {
  return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
static inline Block ready_bytes(Block x) {
  return {_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)};
}
// |w| * (x with the sign of w): two products are at most 2 * 128 * 127, which fits 16 bits.
static inline __m256i dot_half(__m256i sum, __m256i ready, __m256i bytes, __m256i four) {
  const __m256i pairs = _mm256_maddubs_epi16(ready, _mm256_sign_epi8(four, bytes));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline Ints dot_bytes(Ints sum, Block ready, Block bytes, int32_t four) {
  const __m256i x = _mm256_set1_epi32(four);
  return {dot_half(sum.a, ready.a, bytes.a, x), dot_half(sum.b, ready.b, bytes.b, x)};
}
static inline Shorts begin_shorts(Ints) {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
// Eight of these are at most 8 * 2 * 15 * 127 < 2^15.
static inline Shorts dot_nibbles(Shorts sum, Block x, int32_t four) {
  const __m256i y = _mm256_set1_epi32(four);
  return {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(x.a, y)),
          _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(x.b, y))};
}
static inline Ints end_shorts(Ints sum, Shorts x) {
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, one)),
          _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, one))};
}
static inline Block less_eight(Block x) {
  const __m256i eight = _mm256_set1_epi8(8);
  return {_mm256_sub_epi8(x.a, eight), _mm256_sub_epi8(x.b, eight)};
}
template <int j>
static inline Floats column(Block x) {
  return as_floats({_mm256_srai_epi32(_mm256_slli_epi32(x.a, 24 - 8 * j), 24),
                    _mm256_srai_epi32(_mm256_slli_epi32(x.b, 24 - 8 * j), 24)});
}
static inline Floats nibble_values(int shift) { return floats(-(float)shift); }
template <int bit>
static inline Floats nibble(Block x, Floats values) {
  const __m256i mask = _mm256_set1_epi32(15);
  return add(as_floats({_mm256_and_si256(_mm256_srli_epi32(x.a, bit), mask),
                        _mm256_and_si256(_mm256_srli_epi32(x.b, bit), mask)}), values);
}

#else

static const int BYTE_SHIFT = 0;
struct Floats { float v[16]; };
struct Ints { int32_t v[16]; };
struct Block { uint8_t v[64]; };
typedef Ints Shorts;
static const int MOST_PANELS = 1, MOST_TOKENS = 2;
static const int TILE_ROWS = 1, TILE_TOKENS = 4;
#define LANES for (int i = 0; i < 16; i++)

static inline float widen(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits = (rest << 13) + ((127 - 15) << 23);
  if (rest >= 0x7c00) bits += (255 - 31 - (127 - 15)) << 23;
  float value;
  memcpy(&value, &bits, 4);
  if (rest < 0x0400) value = (float)rest * 5.9604644775390625e-8f;  // subnormal
  memcpy(&bits, &value, 4);
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}
static inline Floats floats(float value) { Floats y; LANES y.v[i] = value; return y; }
static inline Floats load(const float* from) { Floats y; LANES y.v[i] = from[i]; return y; }
static inline Floats load(const int8_t* from) { Floats y; LANES y.v[i] = from[i]; return y; }
static inline Floats load(const uint16_t* from) { Floats y; LANES y.v[i] = widen(from[i]); return y; }
static inline Floats load(const Bf16* from) {
  uint32_t bits[16];
  LANES bits[i] = (uint32_t)from[i].bits << 16;
  Floats y;
  memcpy(y.v, bits, 64);
  return y;
}
static inline void store(float* to, Floats x) { LANES to[i] = x.v[i]; }
static inline float sum(Floats x) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
  return x.v[0];
}
static inline Floats add(Floats x, Floats y) { LANES x.v[i] += y.v[i]; return x; }
static inline Floats mul(Floats x, Floats y) { LANES x.v[i] *= y.v[i]; return x; }
static inline Floats fused(Floats x, Floats y, Floats z) {
  LANES z.v[i] = __builtin_fmaf(x.v[i], y.v[i], z.v[i]);
  return z;
}
static inline Floats as_floats(Ints x) { Floats y; LANES y.v[i] = (float)x.v[i]; return y; }
static inline Ints ints(int32_t value) { Ints y; LANES y.v[i] = value; return y; }
static inline Block load_block(const uint8_t* from) { Block y; memcpy(y.v, from, 64); return y; }
static inline Block low_nibbles(Block x) { for (auto& v : x.v) v &= 15; return x; }
static inline Block high_nibbles(Block x) { for (auto& v : x.v) v >>= 4; return x; }
static inline Block ready_bytes(Block x) { return x; }
static inline Ints dot_bytes(Ints sum, Block x, Block, int32_t four) {
  int8_t y[4];
  memcpy(y, &four, 4);
  for (int j = 0; j < 4; j++) LANES sum.v[i] += (int8_t)x.v[4 * i + j] * y[j];
  return sum;
}
static inline Shorts begin_shorts(Ints sum) { return sum; }
static inline Ints end_shorts(Ints, Shorts part) { return part; }
static inline Block less_eight(Block x) { for (auto& v : x.v) v -= 8; return x; }
static inline Shorts dot_nibbles(Shorts sum, Block x, int32_t four) {
  return dot_bytes(sum, x, x, four);
}
template <int j>
static inline Floats column(Block x) {
  Floats y;
  LANES y.v[i] = (float)(int8_t)x.v[4 * i + j];
  return y;
}
static inline Floats nibble_values(int shift) { return floats(-(float)shift); }
template <int bit>
static inline Floats nibble(Block x, Floats values) {
  LANES values.v[i] += (float)(x.v[4 * i + bit / 8] >> bit % 8 & 15);
  return values;
}

#endif

typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// Round to nearest even. NaN is not supported.
static inline void store(Bf16* to, Floats x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x));
#else
  Words bits;
  memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Halves upper = __builtin_convertvector(bits, Halves);
  memcpy(to, &upper, sizeof(upper));
#endif
}

// Exchange `size` words of one row with those of the other: a step of the transposition below.
template <int size>
static inline void exchange(Words& a, Words& b) {
#if defined(__AVX512F__)
  const __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 upper = _mm512_test_epi32_mask(place, ints(size));
  const __m512i flipped = _mm512_xor_si512(place, ints(size));
  const __m512i from_b = _mm512_or_si512(flipped, ints(16));
  const __m512i x = (__m512i)a, y = (__m512i)b;
  a = (Words)_mm512_permutex2var_epi32(x, _mm512_mask_mov_epi32(place, upper, from_b), y);
  b = (Words)_mm512_permutex2var_epi32(
      x, _mm512_mask_mov_epi32(flipped, upper, _mm512_or_si512(place, ints(16))), y);
#else
  for (int i = 0; i < 16; i++)
    if (i & size) {
      const uint32_t word = a[i];
      a[i] = b[i ^ size];
      b[i ^ size] = word;
    }
#endif
}

template <int size>
static inline void exchange_rows(Words* rows) {
  for (int i = 0; i < 8; i++)
    if (!(i & size)) exchange<size>(rows[i], rows[i + size]);
}

// Transpose both halves of 8 rows of 16 words, by exchanging quarters of ever smaller blocks: row r
// then holds columns r and r + 8.
static inline void transpose(Words* rows) {
  exchange_rows<4>(rows);
  exchange_rows<2>(rows);
  exchange_rows<1>(rows);
}
