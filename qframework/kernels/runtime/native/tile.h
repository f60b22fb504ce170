// One tile of the product: ROWS rows of a times a panel of COLUMNS columns of b.
//
//     tile(a, stride, b, lanes, sums, rows, starts, meanwhile)
//
// a: rows of Elements, `stride` apart. b: panel [lane][COLUMNS]. sums: [ROWS][COLUMNS], which start at starts[row].
// Only `rows` of them are needed. meanwhile(): work for the vector unit that may be done while AMX multiplies.

#if QFRAMEWORK_AMX

constexpr int ROWS = 32, COLUMNS = 32;

// GCC does not know what the instructions of tiles read: what was written before is in memory from here on.
INLINE void publish(const void* x) { asm volatile("" : : "r"(x) : "memory"); }

constexpr int64_t ALIGNED = 64;  // values that a tile takes

// Tiles of 16 rows of 64 bytes, for one thread.
struct Unit {
  SIMD Unit() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    publish(&shape);
    _tile_loadconfig(&shape);
  }
  SIMD ~Unit() { _tile_release(); }
};

template <typename Work>
SIMD static void tile(const Element* a, int64_t stride, const int32_t* b, int64_t lanes, int32_t* sums, int64_t rows,
                      const int32_t*, Work meanwhile) {
  constexpr int64_t LINE = COLUMNS * 4, LOWER = 16 * COLUMNS;
  const bool both = rows > 16;
  publish(a);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < lanes; k += 16) {
    _tile_loadd(6, b + k * COLUMNS, LINE);
    _tile_loadd(7, b + k * COLUMNS + 16, LINE);
    _tile_loadd(4, a + k * GROUP, stride);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if (both) {
      _tile_loadd(5, a + 16 * stride + k * GROUP, stride);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    meanwhile();
  }
  _tile_stored(0, sums, LINE);
  _tile_stored(1, sums + 16, LINE);
  _tile_stored(2, sums + LOWER, LINE);
  _tile_stored(3, sums + LOWER + 16, LINE);
}

#else

// As many sums as registers hold beside two vectors of b and one value of a; AVX2 needs two more for products.
constexpr int ROWS = QFRAMEWORK_GROUP == 4 ? 12 : QFRAMEWORK_BITS == 512 ? 8 : 4, COLUMNS = 2 * LANES;
constexpr int64_t ALIGNED = GROUP;

struct Unit {};

template <typename Work>
SIMD static void tile(const Element* a, int64_t stride, const int32_t* b, int64_t lanes, int32_t* sums, int64_t,
                      const int32_t* starts, Work) {
  Ints sum[ROWS][2];
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < 2; ++i) sum[r][i] = starts[r] - Ints{};
  for (int64_t k = 0; k < lanes; ++k) {
    const Ints left = load<Ints>(b + k * COLUMNS), right = load<Ints>(b + k * COLUMNS + LANES);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const Ints x = load<int32_t>(a + r * stride + k * GROUP) - Ints{};
      sum[r][0] = multiplied(sum[r][0], x, left);
      sum[r][1] = multiplied(sum[r][1], x, right);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < 2; ++i) store(sums + r * COLUMNS + i * LANES, sum[r][i]);
}

#endif
