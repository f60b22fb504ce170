// int8_linear on x86 processors: the exact INT32 product a @ b.T and its epilogue, block by block, so that no sum is
// written to memory. Nothing is kept between calls: b is packed by each.

constexpr int64_t COPIED_ROWS = 768;       // rows that are copied at once where they have to be
constexpr int64_t PACKED_BYTES = 1 << 19;  // of b that are packed at once, and stay in the L2 cache
constexpr int64_t FEW_ROWS = 6;

// Rows of a as Elements, padded with zeros to `stride` values: in place if they are that already, or in a buffer.
struct Rows {
  const int8_t* a;
  int64_t M, K, stride, copied_from;  // rows before `copied_from` are in place
  int32_t offset;                     // what is added to the values of b
  std::unique_ptr<Element[]> buffer;
  std::unique_ptr<int32_t[]> start;  // the numbers at which sums of each row start

  Rows(const int8_t* a, int64_t M, int64_t K, int64_t alignment, int32_t offset)
      : a(a), M(M), K(K), stride(round_up(K, alignment)), offset(offset) {
    copied_from = fits(K, alignment) ? M / ROWS * ROWS : 0;
    buffer.reset(new Element[(round_up(M, ROWS) - copied_from) * stride]);
    start.reset(new int32_t[round_up(M, ROWS)]);
  }

  static bool fits(int64_t K, int64_t alignment) { return sizeof(Element) == 1 && K % alignment == 0; }

  const Element* at(int64_t row) const {
    if (row < copied_from) return (const Element*)a + row * K;
    return buffer.get() + (row - copied_from) * stride;
  }

  // Fill ROWS rows from `first` on.
  SIMD void prepare(int64_t first) {
    for (int64_t row = first; row < first + ROWS; ++row) {
      Element* const to = row < copied_from ? nullptr : buffer.get() + (row - copied_from) * stride;
      start[row] = prepare_row(a + row * K, row < M ? K : 0, stride, to, offset);
    }
  }
};

// With few rows, packing b would take longer than multiplying: sums of COLUMNS columns from `column` on.
SIMD static void few_rows(const Rows& rows, int64_t M, const int8_t* b, int64_t K, int64_t columns, int32_t* sums) {
  for (int64_t n = 0; n < columns; ++n) {
    Ints sum[FEW_ROWS] = {};
    for (int64_t k = 0; k < K; k += WIDE) {
      int8_t padded[WIDE] = {};
      const int8_t* from = b + n * K + k;
      if (K - k < WIDE) from = (const int8_t*)std::memcpy(padded, from, K - k);
      const Ints y = wide_lanes(from);
      for (int64_t m = 0; m < M; ++m) sum[m] = multiplied(sum[m], load<Ints>(rows.at(m) + k), y);
    }
    for (int64_t m = 0; m < M; ++m) sums[m * COLUMNS + n] = added_up(sum[m]) + rows.start[m];
  }
}

static void multiply_few(const int8_t* a, const int8_t* b, int64_t M, int64_t N, int64_t K, const Epilogue& epilogue,
                         const Scales& scales, int threads) {
  Rows rows(a, M, K, WIDE, OFFSET);
  for (int64_t m = 0; m < M; m += ROWS) rows.prepare(m);
#pragma omp parallel for num_threads(threads)
  for (int64_t column = 0; column < N; column += COLUMNS) {
    int32_t sums[FEW_ROWS * COLUMNS];
    few_rows(rows, M, b + column * K, K, std::min<int64_t>(COLUMNS, N - column), sums);
    Unfinished{sums, 0, M, column}.finish(M, epilogue, scales, N);
  }
}

// Rows [first, first + M) of the result, of which `a` is the first. A few rows of a, in the L1 cache, are multiplied by
// one packed panel of b after the other, which are read in order.
static void multiply(const int8_t* a, const int8_t* b, int64_t first, int64_t M, int64_t N, int64_t K,
                     const Epilogue& epilogue, const Scales& scales, int threads) {
  Rows rows(a, M, K, ALIGNED, PACKED_OFFSET);
  const int64_t panels = (N + COLUMNS - 1) / COLUMNS, tiles = (M + ROWS - 1) / ROWS;
  const int64_t lanes = rows.stride / GROUP, panel_size = lanes * COLUMNS;
  const int64_t together = std::clamp<int64_t>(PACKED_BYTES / (panel_size * 4), 1, panels);
  const int64_t parts = std::clamp<int64_t>(4 * threads / tiles, 1, together);  // so that no thread waits long
  const int64_t some = (ROWS * 16 + lanes - 1) / lanes;  // rows to finish in each step of a tile
  const std::unique_ptr<int32_t[]> packed(new int32_t[together * panel_size]);
#pragma omp parallel num_threads(threads)
  {
    const Unit unit;
    int32_t sums[2][ROWS * COLUMNS];
#pragma omp for
    for (int64_t m = 0; m < M; m += ROWS) rows.prepare(m);
    for (int64_t from = 0; from < panels; from += together) {
      const int64_t count = std::min(together, panels - from);
#pragma omp for
      for (int64_t i = 0; i < count; ++i) {
        const int64_t column = (from + i) * COLUMNS;
        pack(b + column * K, K, K, N - column, lanes, packed.get() + i * panel_size);
      }
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < tiles * parts; ++task) {
        const int64_t row = task / parts * ROWS, height = std::min<int64_t>(ROWS, M - row), part = task % parts;
        Unfinished last = {};
        const auto finish_some = [&] { last.finish(some, epilogue, scales, N); };
        for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) {
          tile(rows.at(row), rows.stride, packed.get() + i * panel_size, lanes, sums[i % 2], height,
               rows.start.get() + row, finish_some);
          last.finish(ROWS, epilogue, scales, N);
          last = {sums[i % 2], first + row, first + row + height, (from + i) * COLUMNS};
        }
        last.finish(ROWS, epilogue, scales, N);
      }
    }
  }
}

static bool positive(const Numbers& x, bool or_negative) {
  for (int64_t i = 0; i < x.period; ++i)
    if (or_negative ? x.at[i] == 0 : x.at[i] <= 0) return false;
  return true;
}

// a (M, K) and b (N, K), contiguous. Returns 1, and computes nothing, if a scale is not positive.
extern "C" int int8_linear(const int8_t* a, const int8_t* b, int64_t M, int64_t N, int64_t K, const Epilogue* epilogue,
                           int threads) {
  const Epilogue& x = *epilogue;
  if (!positive(x.b_scale, false) || !positive(x.out_scale_rows, false) || !positive(x.out_scale_columns, true))
    return 1;
  const Scales scales(x, M, N);
  if (M <= FEW_ROWS) {
    multiply_few(a, b, M, N, K, x, scales, threads);
    return 0;
  }
  const int64_t together = Rows::fits(K, ALIGNED) ? M : COPIED_ROWS;
  for (int64_t first = 0; first < M; first += together)
    multiply(a + first * K, b, first, std::min(together, M - first), N, K, x, scales, threads);
  return 0;
}
