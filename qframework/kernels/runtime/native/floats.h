// Vectors of floats: arithmetic, and conversions from and to the dtypes of tensors.

enum Dtype : int32_t { FLOAT32, FLOAT16, BFLOAT16, INT8, INT32 };  // INT32: the sums themselves

INLINE Floats repeated(float x) { return x - Floats{}; }

// `smaller` and `larger` are their second argument where one of them is NaN.

#if QFRAMEWORK_BITS == 512
using HalfWords = __m256i;
INLINE Floats fused(Floats x, Floats y, Floats z) { return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z); }
INLINE Floats smaller(Floats x, Floats y) { return (Floats)_mm512_min_ps((__m512)x, (__m512)y); }
INLINE Floats larger(Floats x, Floats y) { return (Floats)_mm512_max_ps((__m512)x, (__m512)y); }
INLINE Ints larger(Ints x, Ints y) { return (Ints)_mm512_max_epi32((__m512i)x, (__m512i)y); }
INLINE Floats from_float16(HalfWords x) { return (Floats)_mm512_cvtph_ps(x); }
INLINE HalfWords to_float16(Floats x) { return _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
INLINE HalfWords low_halves(Ints x) { return _mm512_cvtepi32_epi16((__m512i)x); }
INLINE Floats from_high_halves(HalfWords x) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
INLINE void store_bytes(int8_t* to, Ints x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x)); }
INLINE Ints from_bytes(const int8_t* x) { return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(x)); }
INLINE Ints rounded(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }
INLINE Floats looked_up(const float* table, Ints i) {
  return (Floats)_mm512_permutexvar_ps((__m512i)i, (__m512)load<Floats>(table));
}
INLINE Floats reciprocal_estimate(Floats x) { return (Floats)_mm512_rcp14_ps((__m512)x); }
INLINE float added_up(Floats x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE int32_t largest_of(Ints x) { return _mm512_reduce_max_epi32((__m512i)x); }
#else
using HalfWords = __m128i;
INLINE Floats fused(Floats x, Floats y, Floats z) { return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); }
INLINE Floats smaller(Floats x, Floats y) { return (Floats)_mm256_min_ps((__m256)x, (__m256)y); }
INLINE Floats larger(Floats x, Floats y) { return (Floats)_mm256_max_ps((__m256)x, (__m256)y); }
INLINE Ints larger(Ints x, Ints y) { return (Ints)_mm256_max_epi32((__m256i)x, (__m256i)y); }
INLINE Floats from_float16(HalfWords x) { return (Floats)_mm256_cvtph_ps(x); }
INLINE HalfWords to_float16(Floats x) { return _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
INLINE HalfWords low_halves(Ints x) {
  const __m256i packed = _mm256_packus_epi32((__m256i)(x & 0xffff), (__m256i)(x & 0xffff));
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
INLINE Floats from_high_halves(HalfWords x) { return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16); }
INLINE void store_bytes(int8_t* to, Ints x) {
  const __m128i words = low_halves(x);
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
}
INLINE Ints from_bytes(const int8_t* x) { return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x)); }
INLINE Ints rounded(Floats x) { return (Ints)_mm256_cvtps_epi32((__m256)x); }
INLINE Floats looked_up(const float* table, Ints i) {
  return (Floats)_mm256_permutevar8x32_ps((__m256)load<Floats>(table), (__m256i)i);
}
INLINE Floats reciprocal_estimate(Floats x) { return (Floats)_mm256_rcp_ps((__m256)x); }
INLINE float added_up(Floats x) {
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += x[i];
  return total;
}
INLINE int32_t largest_of(Ints x) {
  int32_t largest = x[0];
  for (int i = 1; i < LANES; ++i) largest = std::max<int32_t>(largest, x[i]);
  return largest;
}
#endif

INLINE Floats converted(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints truncated(Floats x) { return __builtin_convertvector(x, Ints); }

// 1 / x by one step of Newton's method, an error of one or two units in the last place.
INLINE Floats reciprocal(Floats x) {
  const Floats y = reciprocal_estimate(x);
  return y * fused(-x, y, repeated(2));
}

INLINE Floats loaded(const void* x, int64_t i, Dtype dtype) {
  if (dtype == FLOAT32) return load<Floats>((const float*)x + i);
  const HalfWords words = load<HalfWords>((const int16_t*)x + i);
  return dtype == FLOAT16 ? from_float16(words) : from_high_halves(words);
}

// bfloat16, rounded to nearest, ties to even; NaN stays NaN.
INLINE HalfWords to_bfloat16(Floats x) {
  const Ints bits = (Ints)x, odd = (bits >> 16) & 1;
  return low_halves((x == x ? bits + 0x7fff + odd : bits | 0x400000) >> 16);
}

// A vector as float32, float16 or bfloat16, from value i of `to` on.
INLINE void store_as(Dtype dtype, void* to, int64_t i, Floats x) {
  if (dtype == FLOAT32)
    store((float*)to + i, x);
  else
    store((int16_t*)to + i, dtype == FLOAT16 ? to_float16(x) : to_bfloat16(x));
}

static inline int64_t size_of(Dtype dtype) { return dtype == INT8 ? 1 : dtype == FLOAT32 || dtype == INT32 ? 4 : 2; }
