// The epilogue of int8_linear on a block of INT32 sums: scales, bias, activation, residual, and the result's dtype.

enum Activation : int32_t { NONE, GELU, RELU, SILU };
enum Dtype : int32_t { FLOAT32, FLOAT16, BFLOAT16, INT8, INT32 };  // INT32: the sums themselves

// Numbers for rows or columns, which repeat after `period`: 1 if all are the same.
struct Numbers {
  const float* at;
  int64_t period;
  float operator[](int64_t i) const { return period == 1 ? *at : at[i % period]; }
};

struct Epilogue {
  Numbers a_scale, b_scale, bias;  // of rows, of columns, of columns
  const void* residual;            // (M, N), null if there is none
  Numbers out_scale_rows, out_scale_columns;
  void* out;          // (M, N)
  const float* gelu;  // coefficients [power][interval] of GELU or its tanh form
  float zero_point;
  Activation activation;
  Dtype residual_dtype, dtype;
};

INLINE Floats repeated(float x) { return x - Floats{}; }
INLINE Floats smaller(Floats x, Floats y) { return x < y ? x : y; }
INLINE Floats larger(Floats x, Floats y) { return x > y ? x : y; }

#if QFRAMEWORK_BITS == 512
using HalfWords = __m256i;
INLINE Floats from_float16(HalfWords x) { return (Floats)_mm512_cvtph_ps(x); }
INLINE HalfWords to_float16(Floats x) { return _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
INLINE HalfWords low_halves(Ints x) { return _mm512_cvtepi32_epi16((__m512i)x); }
INLINE Floats from_high_halves(HalfWords x) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
INLINE void store_bytes(int8_t* to, Ints x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x)); }
INLINE Ints rounded(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }
INLINE Floats looked_up(const float* table, Ints i) {
  return (Floats)_mm512_permutexvar_ps((__m512i)i, (__m512)load<Floats>(table));
}
INLINE Floats reciprocal_estimate(Floats x) { return (Floats)_mm512_rcp14_ps((__m512)x); }
#else
using HalfWords = __m128i;
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
INLINE Ints rounded(Floats x) { return (Ints)_mm256_cvtps_epi32((__m256)x); }
INLINE Floats looked_up(const float* table, Ints i) {
  return (Floats)_mm256_permutevar8x32_ps((__m256)load<Floats>(table), (__m256i)i);
}
INLINE Floats reciprocal_estimate(Floats x) { return (Floats)_mm256_rcp_ps((__m256)x); }
#endif

#if QFRAMEWORK_BITS == 512
INLINE Floats fused(Floats x, Floats y, Floats z) { return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z); }
#else
INLINE Floats fused(Floats x, Floats y, Floats z) { return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); }
#endif

INLINE Floats converted(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints truncated(Floats x) { return __builtin_convertvector(x, Ints); }

// 1 / x by one step of Newton's method, an error of one or two units in the last place.
INLINE Floats reciprocal(Floats x) {
  const Floats y = reciprocal_estimate(x);
  return y * fused(-x, y, repeated(2));
}

// e^x with an error of about 1e-7 of it; below -87 and above 88 the value there.
INLINE Floats exponential(Floats x) {
  x = smaller(larger(x, repeated(-87)), repeated(88));
  const Ints n = rounded(x * 1.44269504f);
  const Floats whole = converted(n);
  const Floats r = fused(whole, repeated(2.12194440e-4f), fused(whole, repeated(-0.693359375f), x));
  Floats p = fused(r, repeated(1.3981999507e-3f), repeated(8.3334519073e-3f));
  p = fused(p, r, repeated(4.1665795894e-2f));
  p = fused(p, r, repeated(1.6666665459e-1f));
  p = fused(p, r, repeated(0.5f));
  p = fused(p, r * r, r + 1);
  return (Floats)((Ints)p + (n << 23));
}

// A function of |x| by polynomials: one interval of [0, RANGE) for each lane, looked up in one instruction each.
constexpr int DEGREE = LANES == 16 ? 4 : 6;
constexpr float RANGE = 5.6f;

// Both forms of GELU, relu(x) - |x| h(|x|); for the erf form h is 1 - Phi, below 1e-8 outside of the range.
INLINE Floats gelu(Floats x, const float* h) {
  const Floats z = smaller((Floats)((Ints)x & 0x7fffffff), repeated(RANGE * 0.9999999f));
  const Floats t = z * (LANES / RANGE);
  const Ints interval = truncated(t);
  const Floats u = t - converted(interval);
  Floats p = looked_up(h + DEGREE * LANES, interval);
#pragma GCC unroll 6
  for (int i = DEGREE - 1; i >= 0; --i) p = fused(p, u, looked_up(h + i * LANES, interval));
  return fused(-z, p, x < 0 ? repeated(0) : x);
}

INLINE Floats silu(Floats x) { return x * reciprocal(1 + exponential(-x)); }

template <Activation activation>
INLINE Floats activated(Floats x, const float* table) {
  if (activation == GELU) return gelu(x, table);
  if (activation == SILU) return silu(x);
  if (activation == RELU) return larger(x, repeated(0));
  return x;
}

// Sums become activation(sums * a_scale * b_scale + bias), in place.
template <Activation activation>
SIMD static void activate(int32_t* sums, const Epilogue& x, const float* scales, const float* bias, int64_t row,
                          int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const Floats scale = repeated(x.a_scale[row + r]);
    for (int64_t i = r * COLUMNS; i < (r + 1) * COLUMNS; i += LANES) {
      const Floats y = converted(load<Ints>(sums + i)) * scale;
      const int64_t column = i % COLUMNS;
      store(sums + i, activated<activation>(fused(y, load<Floats>(scales + column), load<Floats>(bias + column)), x.gelu));
    }
  }
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

INLINE void stored(void* x, int64_t i, Dtype dtype, Floats y) {
  if (dtype == FLOAT32) store((float*)x + i, y);
  if (dtype == FLOAT16) store((int16_t*)x + i, to_float16(y));
  if (dtype == BFLOAT16) store((int16_t*)x + i, to_bfloat16(y));
}

static inline int64_t size_of(Dtype dtype) { return dtype == INT8 ? 1 : dtype == FLOAT32 || dtype == INT32 ? 4 : 2; }

// Rows [row, row + rows) and columns [column, column + columns) of the result from `sums`, which it overwrites.
SIMD static void finish(int32_t* sums, const Epilogue& x, int64_t N, int64_t row, int64_t rows, int64_t column,
                        int64_t columns) {
  float scales[COLUMNS] = {}, bias[COLUMNS] = {}, quantize[COLUMNS] = {};
  for (int64_t i = 0; i < columns && x.dtype != INT32; ++i) {
    scales[i] = x.b_scale[column + i];
    if (x.bias.at) bias[i] = x.bias[column + i];
    if (x.dtype == INT8) quantize[i] = 1 / x.out_scale_columns[column + i];
  }
  if (x.dtype != INT32) {
    if (x.activation == NONE) activate<NONE>(sums, x, scales, bias, row, rows);
    if (x.activation == GELU) activate<GELU>(sums, x, scales, bias, row, rows);
    if (x.activation == RELU) activate<RELU>(sums, x, scales, bias, row, rows);
    if (x.activation == SILU) activate<SILU>(sums, x, scales, bias, row, rows);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = (row + r) * N + column, bytes = size_of(x.dtype);
    char* const to = (char*)x.out + at * bytes;
    int32_t* const from = sums + r * COLUMNS;
    char line[COLUMNS * 4];
    char* const written = columns < COLUMNS ? line : to;
    if (x.residual) {
      const char* added = (const char*)x.residual + at * size_of(x.residual_dtype);
      char padded[COLUMNS * 4] = {};
      if (columns < COLUMNS) added = (const char*)std::memcpy(padded, added, columns * size_of(x.residual_dtype));
      for (int i = 0; i < COLUMNS; i += LANES)
        store(from + i, load<Floats>(from + i) + loaded(added, i, x.residual_dtype));
    }
    if (x.dtype == INT32) {
      std::memcpy(written, from, COLUMNS * 4);
    } else if (x.dtype == INT8) {
      const Floats row_scale = repeated(1 / x.out_scale_rows[row + r]), zero = repeated(x.zero_point);
      for (int i = 0; i < COLUMNS; i += LANES) {
        const Floats y = load<Floats>(from + i) * row_scale * load<Floats>(quantize + i);
        const Floats inside = smaller(larger(y, repeated(-127) - zero), repeated(127) - zero);
        store_bytes((int8_t*)written + i, rounded(inside) + rounded(zero));
      }
    } else {
      for (int i = 0; i < COLUMNS; i += LANES) stored(written, i, x.dtype, load<Floats>(from + i));
    }
    if (columns < COLUMNS) std::memcpy(to, line, columns * bytes);
  }
}
