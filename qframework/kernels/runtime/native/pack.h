// Operands of a tile, laid out as it reads them.

// Packs `columns` rows of b, K values each and `stride` apart, into a panel [lane][COLUMNS]; missing columns and values
// are zeros.
SIMD static void pack(const int8_t* b, int64_t stride, int64_t K, int64_t columns, int64_t lanes, int32_t* panel) {
  constexpr int64_t VALUES = PACKED_LANES * GROUP;
  for (int64_t column = 0; column < COLUMNS; column += 8) {
    for (int64_t k = 0; k < lanes; k += PACKED_LANES) {
      __m256i x[8];
      const int64_t values = std::clamp<int64_t>(K - k * GROUP, 0, VALUES);
      for (int64_t c = 0; c < 8; ++c) {
        int8_t padded[32] = {};
        const int8_t* from = b + (column + c) * stride + k * GROUP;
        if (column + c >= columns || values < VALUES) {
          if (column + c < columns) std::memcpy(padded, from, values);
          from = padded;
        }
        x[c] = packed_lanes(from);
      }
      transpose(x);
      for (int64_t lane = 0; lane < std::min(PACKED_LANES, lanes - k); ++lane)
        store(panel + (k + lane) * COLUMNS + column, x[lane]);
    }
  }
}

// A row of a, K values, as Elements that zeros pad to `padded`, written to `to` unless it is null. Returns the number at
// which its sums start where `offset` was added to the values of b.
SIMD static int32_t prepare_row(const int8_t* a, int64_t K, int64_t padded, Element* to, int32_t offset) {
  Ints sum = {};
  for (int64_t k = 0; k < padded && (to || offset); k += WIDE) {
    const int64_t values = std::clamp<int64_t>(K - k, 0, WIDE), kept = std::min(WIDE, padded - k);
    int8_t last[WIDE] = {};
    const int8_t* from = a + k;
    if (values < WIDE) from = (const int8_t*)std::memcpy(last, from, values);
    const Ints x = lanes_of(from);
    if (to) std::memcpy(to + k, &x, kept * sizeof(Element));
    if (offset) sum = multiplied(sum, x, Ints{} + 0x01010101);
  }
  return -offset * added_up(sum);
}
