// The epilogue of int8_linear on a block of INT32 sums: scales, bias, activation, residual, and the result's dtype.

enum Activation : int32_t { NONE, GELU, RELU, SILU };

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
    } else {
      store_as(x.dtype, out, i, y);
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
