// The epilogue of int8_linear on a block of INT32 sums: scales, bias, activation, residual, and the result's dtype.

enum Activation : int32_t { NONE, GELU, RELU, SILU };
enum Dtype : int32_t { FLOAT32, FLOAT16, BFLOAT16, INT8, INT32 };  // INT32: the sums themselves

// Numbers for rows or columns, which repeat after `period`: 1 if all are the same.
struct Numbers {
  const float* at;
  int64_t period;
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

// `smaller` and `larger` are their second argument where one of them is NaN.

#if QFRAMEWORK_BITS == 512
using HalfWords = __m256i;
INLINE Floats fused(Floats x, Floats y, Floats z) { return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z); }
INLINE Floats smaller(Floats x, Floats y) { return (Floats)_mm512_min_ps((__m512)x, (__m512)y); }
INLINE Floats larger(Floats x, Floats y) { return (Floats)_mm512_max_ps((__m512)x, (__m512)y); }
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
INLINE Floats fused(Floats x, Floats y, Floats z) { return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); }
INLINE Floats smaller(Floats x, Floats y) { return (Floats)_mm256_min_ps((__m256)x, (__m256)y); }
INLINE Floats larger(Floats x, Floats y) { return (Floats)_mm256_max_ps((__m256)x, (__m256)y); }
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

INLINE Floats converted(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints truncated(Floats x) { return __builtin_convertvector(x, Ints); }

// 1 / x by one step of Newton's method, an error of one or two units in the last place.
INLINE Floats reciprocal(Floats x) {
  const Floats y = reciprocal_estimate(x);
  return y * fused(-x, y, repeated(2));
}

// e^x by the polynomial of Cephes (S. Moshier), an error of about 1e-7 of it; below -87 and above 88 the value there.
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
  return fused(-z, p, larger(repeated(0), x));
}

INLINE Floats silu(Floats x) { return x * reciprocal(1 + exponential(-x)); }

template <Activation activation>
INLINE Floats activated(Floats x, const float* table) {
  if (activation == GELU) return gelu(x, table);
  if (activation == SILU) return silu(x);
  if (activation == RELU) return larger(repeated(0), x);
  return x;
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

static inline int64_t size_of(Dtype dtype) { return dtype == INT8 ? 1 : dtype == FLOAT32 || dtype == INT32 ? 4 : 2; }

// The numbers of all rows and columns; those of columns are padded to whole panels.
struct Scales {
  std::unique_ptr<float[]> rows, columns, bias, quantize_rows, quantize_columns;

  Scales(const Epilogue& x, int64_t M, int64_t N) {
    const int64_t padded = round_up(N, COLUMNS);
    rows = repeated(x.a_scale, M, M);
    columns = repeated(x.b_scale, N, padded);
    bias = repeated(x.bias, N, padded);
    quantize_rows = repeated(x.out_scale_rows, M, M);
    quantize_columns = repeated(x.out_scale_columns, N, padded);
    for (int64_t i = 0; i < M; ++i) quantize_rows[i] = 1 / quantize_rows[i];
    for (int64_t i = 0; i < padded; ++i) quantize_columns[i] = 1 / quantize_columns[i];
  }

 private:
  static std::unique_ptr<float[]> repeated(const Numbers& x, int64_t count, int64_t padded) {
    std::unique_ptr<float[]> y(new float[padded]());
    for (int64_t i = 0, from = 0; x.at && i < count; ++i, from = from + 1 < x.period ? from + 1 : 0) y[i] = x.at[from];
    return y;
  }
};

// A row of a panel. Results are rounded after each step, as torch does.
template <Activation activation>
INLINE void finish_row(const int32_t* sums, const Epilogue& x, const Scales& scales, int64_t row, int64_t column,
                       const void* residual, void* out) {
  const Floats scale = repeated(scales.rows[row]), quantize = repeated(scales.quantize_rows[row]);
  const Floats zero = repeated(x.zero_point);
  for (int i = 0; i < COLUMNS; i += LANES) {
    const Floats both = converted(load<Ints>(sums + i)) * scale * load<Floats>(&scales.columns[column + i]);
    Floats y = activated<activation>(both + load<Floats>(&scales.bias[column + i]), x.gelu);
    if (residual) y += loaded(residual, i, x.residual_dtype);
    if (x.dtype == INT8) {
      y = y * quantize * load<Floats>(&scales.quantize_columns[column + i]);
      store_bytes((int8_t*)out + i, rounded(smaller(larger(y, -127 - zero), 127 - zero)) + rounded(zero));
    } else if (x.dtype == FLOAT32) {
      store((float*)out + i, y);
    } else {
      store((int16_t*)out + i, x.dtype == FLOAT16 ? to_float16(y) : to_bfloat16(y));
    }
  }
}

template <Activation activation>
SIMD static void finish_as(const int32_t* sums, const Epilogue& x, const Scales& scales, int64_t N, int64_t row,
                           int64_t rows, int64_t column) {
  const int64_t columns = std::min<int64_t>(COLUMNS, N - column);
  const int64_t bytes = size_of(x.dtype), residual_bytes = size_of(x.residual_dtype);
  for (int64_t end = row + rows; row < end; ++row, sums += COLUMNS) {
    const int64_t at = row * N + column;
    char* out = (char*)x.out + at * bytes;
    const char* residual = x.residual ? (const char*)x.residual + at * residual_bytes : nullptr;
    char written[COLUMNS * 4], read[COLUMNS * 4];
    if (columns < COLUMNS && residual) residual = (const char*)std::memcpy(read, residual, columns * residual_bytes);
    void* const to = columns < COLUMNS ? written : out;
    if (x.dtype == INT32)
      std::memcpy(to, sums, COLUMNS * 4);
    else
      finish_row<activation>(sums, x, scales, row, column, residual, to);
    if (columns < COLUMNS) std::memcpy(out, written, columns * bytes);
  }
}

// Sums of a panel of the result, of which no more than rows [row, end) are left to be finished.
struct Unfinished {
  const int32_t* sums;
  int64_t row, end, column;

  SIMD void finish(int64_t rows, const Epilogue& x, const Scales& scales, int64_t N) {
    rows = std::min(rows, end - row);
    switch (x.activation) {
      case NONE: finish_as<NONE>(sums, x, scales, N, row, rows, column); break;
      case GELU: finish_as<GELU>(sums, x, scales, N, row, rows, column); break;
      case RELU: finish_as<RELU>(sums, x, scales, N, row, rows, column); break;
      case SILU: finish_as<SILU>(sums, x, scales, N, row, rows, column); break;
    }
    row += rows;
    sums += rows * COLUMNS;
  }
};
