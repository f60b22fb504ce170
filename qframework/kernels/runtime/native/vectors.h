// Vectors of 32-bit lanes on x86, and the transposition with which operands are packed.
//
// QFRAMEWORK_BITS is the width of the vectors, 256 (AVX2) or 512 (AVX-512), QFRAMEWORK_TARGET the instructions that the
// processor has.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

constexpr int LANES = QFRAMEWORK_BITS / 32;
using Floats = float __attribute__((vector_size(LANES * 4)));
using Ints = int32_t __attribute__((vector_size(LANES * 4)));

#define SIMD __attribute__((target(QFRAMEWORK_TARGET)))
#define INLINE SIMD static inline __attribute__((always_inline))

template <typename T>
INLINE T load(const void* x) {
  T v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
template <typename T>
INLINE void store(void* x, T v) {
  std::memcpy(x, &v, sizeof v);
}

static inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// The 8 x 8 matrix of 32-bit lanes in x, transposed.
INLINE void transpose(__m256i x[8]) {
  __m256i y[8];
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
    y[r] = _mm256_permute2x128_si256(x[r], x[r + 4], 0x20);
    y[r + 4] = _mm256_permute2x128_si256(x[r], x[r + 4], 0x31);
  }
  std::copy(y, y + 8, x);
}
