// P V for a block of ROWS queries. P and its sums come in panels [ROWS][COLUMNS] of 32-bit lanes, one for COLUMNS keys;
// V in panels of COLUMNS keys and COLUMNS channels.
//
// Without AMX, P is float32 and V is converted to it. With AMX, P is the sum of two bfloat16 numbers, 2^-15 of it away at
// most, V is exact in bfloat16, and sums are float32. A row of a panel of P has its 32 upper parts, then its 32 lower ones.
// Lane i of both has keys i and i + 16, as lane i of a panel of V has in each channel.

// Panels of logits are further apart than their size: from 4,096 bytes, each load would wait for the store before it.
constexpr int64_t PANEL = (ROWS + 1) * COLUMNS;

#if QFRAMEWORK_AMX

constexpr int64_t VALUES = COLUMNS * COLUMNS / 2;  // lanes of a panel of V
constexpr int32_t UPPER = (int32_t)0xffff0000;

INLINE void store_pairs(int32_t* to, Ints left, Ints right) {
  store(to, ((left >> 16) & 0xffff) | (right & UPPER));
}

INLINE void store_weights(int32_t* to, Floats left, Floats right) {
  const Ints left_bits = (Ints)left, right_bits = (Ints)right;
  const Floats left_rest = left - (Floats)(left_bits & UPPER), right_rest = right - (Floats)(right_bits & UPPER);
  store_pairs(to, left_bits, right_bits);
  store_pairs(to + LANES, (Ints)left_rest + 0x8000, (Ints)right_rest + 0x8000);
}

INLINE void store_values(int32_t* panel, int64_t i, int64_t lane, Floats left, Floats right) {
  store_pairs(panel + i * COLUMNS + lane, (Ints)left, (Ints)right);
}

SIMD static void weigh(const int32_t* p, const int32_t* v, int64_t panels, int64_t rows, float* sums) {
  constexpr int64_t LINE = COLUMNS * 4, LOWER = 16 * COLUMNS;
  const bool both = rows > 16;
  publish(p);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (const int32_t* end = p + panels * PANEL; p < end; p += PANEL, v += VALUES) {
    _tile_loadd(6, v, LINE);
    _tile_loadd(7, v + 16, LINE);
#pragma GCC unroll 2
    for (int part = 0; part < COLUMNS; part += 16) {  // each sum is needed again after four products
      _tile_loadd(4, p + part, LINE);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (both) {
        _tile_loadd(5, p + LOWER + part, LINE);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, sums, LINE);
  _tile_stored(1, sums + 16, LINE);
  _tile_stored(2, sums + LOWER, LINE);
  _tile_stored(3, sums + LOWER + 16, LINE);
}

#else

constexpr int64_t VALUES = COLUMNS * COLUMNS;

INLINE void store_weights(int32_t* to, Floats left, Floats right) {
  store(to, left);
  store(to + LANES, right);
}

INLINE void store_values(int32_t* panel, int64_t i, int64_t lane, Floats left, Floats right) {
  store(panel + i * COLUMNS + lane, left);
  store(panel + (i + LANES) * COLUMNS + lane, right);
}

SIMD static void weigh(const int32_t* p, const int32_t* v, int64_t panels, int64_t, float* sums) {
  Floats sum[ROWS][2] = {};
  for (const int32_t* end = p + panels * PANEL; p < end; p += PANEL, v += VALUES) {
    for (int64_t k = 0; k < COLUMNS; ++k) {
      const Floats left = load<Floats>(v + k * COLUMNS), right = load<Floats>(v + k * COLUMNS + LANES);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        const Floats x = repeated(load<float>(p + r * COLUMNS + k));
        sum[r][0] = fused(x, left, sum[r][0]);
        sum[r][1] = fused(x, right, sum[r][1]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < 2; ++i) store(sums + r * COLUMNS + i * LANES, sum[r][i]);
}

#endif

// A vector of channels of one key, of which there are `channels`; others are zeros.
INLINE Floats values_of(const int8_t* v, int64_t channels) {
  int8_t padded[LANES] = {};
  if (channels < LANES) v = (const int8_t*)std::memcpy(padded, v, std::max<int64_t>(channels, 0));
  return converted(from_bytes(v));
}

// Packs `keys` rows of v, `stride` apart, and `channels` of their values into a panel; missing ones are zeros.
SIMD static void pack_values(const int8_t* v, int64_t stride, int64_t keys, int64_t channels, int32_t* panel) {
  for (int64_t i = 0; i < LANES; ++i)
    for (int64_t lane = 0; lane < COLUMNS; lane += LANES) {
      const int64_t left = i < keys ? channels - lane : 0, right = i + LANES < keys ? channels - lane : 0;
      store_values(panel, i, lane, values_of(v + i * stride + lane, left), values_of(v + (i + LANES) * stride + lane, right));
    }
}
