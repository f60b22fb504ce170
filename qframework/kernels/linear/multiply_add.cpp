// The product a @ b.T of INT8 matrices on x86 processors without VNNI, exact in INT32.
//
// Its instruction, pmaddwd, multiplies pairs of INT16 and adds both products in INT32: twice as many products as a float
// multiply-add of the same width. pack() widens the values to INT16 and orders them by pairs of the inner dimension, a
// in panels of ROWS rows and b in panels of COLUMNS, so that the innermost loop reads memory in order. Nothing is kept
// between calls.
//
// QFRAMEWORK_BITS is the width of the vectors: 256 (AVX2) or 512 (AVX-512).

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#if QFRAMEWORK_BITS == 512
#define SIMD __attribute__((target("avx512f,avx512bw")))
using Vector = __m512i;
SIMD static inline Vector zero() { return _mm512_setzero_si512(); }
SIMD static inline Vector load(const void* x) { return _mm512_loadu_si512(x); }
SIMD static inline void store(void* x, Vector v) { _mm512_storeu_si512(x, v); }
SIMD static inline Vector repeated(int32_t pair) { return _mm512_set1_epi32(pair); }
SIMD static inline Vector add(Vector x, Vector y) { return _mm512_add_epi32(x, y); }
SIMD static inline Vector multiply_add(Vector x, Vector y) { return _mm512_madd_epi16(x, y); }
SIMD static inline Vector widened(const int8_t* x) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)x)); }
constexpr int ROWS = 8;
#else
#define SIMD __attribute__((target("avx2")))
using Vector = __m256i;
SIMD static inline Vector zero() { return _mm256_setzero_si256(); }
SIMD static inline Vector load(const void* x) { return _mm256_loadu_si256((const Vector*)x); }
SIMD static inline void store(void* x, Vector v) { _mm256_storeu_si256((Vector*)x, v); }
SIMD static inline Vector repeated(int32_t pair) { return _mm256_set1_epi32(pair); }
SIMD static inline Vector add(Vector x, Vector y) { return _mm256_add_epi32(x, y); }
SIMD static inline Vector multiply_add(Vector x, Vector y) { return _mm256_madd_epi16(x, y); }
SIMD static inline Vector widened(const int8_t* x) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)x)); }
constexpr int ROWS = 4;  // 5 spill: 8 sums, 2 vectors of b, the pair of a and 2 products of 16 registers
#endif

#define PACK __attribute__((target("avx2")))

constexpr int LANES = QFRAMEWORK_BITS / 32;
constexpr int COLUMNS = 2 * LANES;
constexpr int64_t STEP = 16;        // columns that are packed together
constexpr int64_t INNER = 512;      // columns of b in one panel; COLUMNS * INNER * 2 bytes fit the L1 cache
constexpr int64_t ROW_BLOCK = 768;  // rows of a that are packed together
constexpr int64_t FEW_ROWS = 6;     // with so few rows, packing b would take longer than multiplying

// 8 pairs each of 8 rows of x, widened to INT16: out[p] holds pair p of all rows.
PACK static inline void transpose(const int8_t* const rows[8], __m256i out[8]) {
  __m256i x[8], y[8];
  for (int r = 0; r < 8; ++r) x[r] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)rows[r]));
  for (int r = 0; r < 8; r += 2) {
    y[r] = _mm256_unpacklo_epi32(x[r], x[r + 1]);
    y[r + 1] = _mm256_unpackhi_epi32(x[r], x[r + 1]);
  }
  for (int r = 0; r < 8; r += 4) {
    x[r] = _mm256_unpacklo_epi64(y[r], y[r + 2]);
    x[r + 1] = _mm256_unpackhi_epi64(y[r], y[r + 2]);
    x[r + 2] = _mm256_unpacklo_epi64(y[r + 1], y[r + 3]);
    x[r + 3] = _mm256_unpackhi_epi64(y[r + 1], y[r + 3]);
  }
  for (int r = 0; r < 4; ++r) {
    out[r] = _mm256_permute2x128_si256(x[r], x[r + 4], 0x20);
    out[r + 4] = _mm256_permute2x128_si256(x[r], x[r + 4], 0x31);
  }
}

// Packs 8 rows and columns [0, inner) of x into panels [pair][WIDTH] that are `panel` apart. Zeros pad the columns to a
// multiple of STEP. Rows from `rows` on repeat the first row; their results are not stored.
template <int WIDTH>
PACK static void pack(const int8_t* x, int64_t stride, int64_t rows, int64_t inner, int32_t* packed, int64_t panel) {
  for (int64_t k = 0; k < inner; k += STEP) {
    int8_t tail[8][STEP] = {};
    const int8_t* at[8];
    for (int r = 0; r < 8; ++r) {
      at[r] = x + (r < rows ? r : 0) * stride + k;
      if (inner - k < STEP) at[r] = std::copy(at[r], at[r] + (inner - k), tail[r]) - (inner - k);
    }
    __m256i pairs[8];
    transpose(at, pairs);
    for (int p = 0; p < 8; ++p) {
      int32_t* to = packed + (k / 2 + p) * WIDTH;
      if (WIDTH >= 8) {
        _mm256_storeu_si256((__m256i*)to, pairs[p]);
      } else {
        _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(pairs[p]));
        _mm_storeu_si128((__m128i*)(to + panel), _mm256_extracti128_si256(pairs[p], 1));
      }
    }
  }
}

// Multiplies a panel of a by a panel of b: ROWS x COLUMNS of the result, which are added to `out` unless `from_zero`.
SIMD static void tile(const int32_t* a, const int32_t* b, int64_t pairs, int32_t* out, int64_t stride, int64_t rows,
                      int64_t columns, bool from_zero) {
  Vector sums[ROWS][2];
  for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = zero();
  for (int64_t p = 0; p < pairs; ++p) {
    const Vector low = load(b + p * COLUMNS), high = load(b + p * COLUMNS + LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Vector x = repeated(a[p * ROWS + r]);
      sums[r][0] = add(sums[r][0], multiply_add(x, low));
      sums[r][1] = add(sums[r][1], multiply_add(x, high));
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    if (r >= rows) break;
    int32_t edge[COLUMNS];
    int32_t* to = out + r * stride;
    if (columns < COLUMNS) to = std::copy(to, to + columns, edge) - columns;
    for (int i = 0; i < 2; ++i) store(to + i * LANES, from_zero ? sums[r][i] : add(sums[r][i], load(to + i * LANES)));
    if (columns < COLUMNS) std::copy(edge, edge + columns, out + r * stride);
  }
}

// One column of the result: a row of b times all rows of a, which are already widened to INT16.
SIMD static void column(const int16_t* a, const int8_t* b, int64_t M, int64_t K, int32_t* out, int64_t stride) {
  constexpr int64_t WIDE = 2 * LANES;
  const int64_t whole = K / WIDE * WIDE;
  for (int64_t m = 0; m < M; ++m) {
    Vector sum = zero();
    for (int64_t k = 0; k < whole; k += WIDE) sum = add(sum, multiply_add(load(a + m * K + k), widened(b + k)));
    int32_t lanes[LANES], total = 0;
    store(lanes, sum);
    for (int i = 0; i < LANES; ++i) total += lanes[i];
    for (int64_t k = whole; k < K; ++k) total += (int32_t)a[m * K + k] * b[k];
    out[m * stride] = total;
  }
}

static void few_rows(const int8_t* a, const int8_t* b, int32_t* out, int64_t M, int64_t N, int64_t K, int threads) {
  const std::unique_ptr<int16_t[]> wide(new int16_t[M * K]);
  std::copy(a, a + M * K, wide.get());
#pragma omp parallel for num_threads(threads)
  for (int64_t n = 0; n < N; ++n) column(wide.get(), b + n * K, M, K, out + n, N);
}

// a (M, K), b (N, K), out (M, N), all contiguous.
extern "C" void int8_product(const int8_t* a, const int8_t* b, int32_t* out, int64_t M, int64_t N, int64_t K,
                             int threads) {
  if (M <= FEW_ROWS) return few_rows(a, b, out, M, N, K, threads);
  const int64_t pairs = (K + STEP - 1) / STEP * (STEP / 2);
  const std::unique_ptr<int32_t[]> packed(new int32_t[(std::min(M, ROW_BLOCK) + 7) / 8 * 8 * pairs]);
#pragma omp parallel num_threads(threads)
  for (int64_t first = 0; first < M; first += ROW_BLOCK) {
    const int64_t rows = std::min(ROW_BLOCK, M - first);
#pragma omp for
    for (int64_t m = 0; m < rows; m += 8)
      pack<ROWS>(a + (first + m) * K, K, rows - m, K, packed.get() + m * pairs, ROWS * pairs);
#pragma omp for
    for (int64_t n = 0; n < N; n += COLUMNS) {
      int32_t panel[INNER / 2 * COLUMNS];
      for (int64_t k = 0; k < K; k += INNER) {
        const int64_t inner = std::min(INNER, K - k);
        for (int64_t i = 0; i < COLUMNS; i += 8)
          pack<COLUMNS>(b + (n + i < N ? n + i : n) * K + k, K, N - n - i, inner, panel + i, 0);
        for (int64_t m = 0; m < rows; m += ROWS)
          tile(packed.get() + m * pairs + k / 2 * ROWS, panel, (inner + STEP - 1) / STEP * (STEP / 2),
               out + (first + m) * N + n, N, rows - m, N - n, k == 0);
      }
    }
  }
}
