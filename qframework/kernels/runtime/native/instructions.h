// What differs between instruction sets: how values fill a lane of 32 bits, and how two vectors are multiplied.
//
// QFRAMEWORK_GROUP is the number of values in a lane. With 2, pmaddwd multiplies pairs of INT16 and adds both products,
// twice as many as a float multiply-add of the same width: for processors without INT8 instructions. With 4, VNNI
// multiplies unsigned by signed INT8: b is stored with 128 added, and sums start at -128 times the sum of a's row.
// QFRAMEWORK_AMX: products of whole tiles, of signed INT8, instead.

constexpr int64_t GROUP = QFRAMEWORK_GROUP;
constexpr int64_t WIDE = LANES * GROUP;  // values in a vector
constexpr int64_t PACKED_LANES = 8;  // lanes of a row of b that are packed together

#if QFRAMEWORK_GROUP == 2
using Element = int16_t;
constexpr int32_t OFFSET = 0;
#else
using Element = int8_t;
constexpr int32_t OFFSET = 128;  // what is added to b
#endif
constexpr int32_t PACKED_OFFSET = QFRAMEWORK_AMX ? 0 : OFFSET;

// 8 lanes of a row of b as they are packed.
INLINE __m256i packed_lanes(const int8_t* b) {
#if QFRAMEWORK_GROUP == 2
  return _mm256_cvtepi8_epi16(load<__m128i>(b));
#else
  return _mm256_xor_si256(load<__m256i>(b), _mm256_set1_epi8((char)PACKED_OFFSET));
#endif
}

// A vector of lanes of a row of b, unsigned where values are INT8.
INLINE Ints wide_lanes(const int8_t* b) {
#if QFRAMEWORK_GROUP == 4
  return (Ints)_mm512_xor_si512(load<__m512i>(b), _mm512_set1_epi8((char)OFFSET));
#elif QFRAMEWORK_BITS == 512
  return (Ints)_mm512_cvtepi8_epi16(load<__m256i>(b));
#else
  return (Ints)_mm256_cvtepi8_epi16(load<__m128i>(b));
#endif
}

// sum + a * b, added up in each lane; b is unsigned where values are INT8.
INLINE Ints multiplied(Ints sum, Ints a, Ints b) {
#if QFRAMEWORK_GROUP == 4
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b, (__m512i)a);
#elif QFRAMEWORK_BITS == 512
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

INLINE int32_t added_up(Ints sum) {
  int32_t total = 0;
  for (int i = 0; i < LANES; ++i) total += sum[i];
  return total;
}

// A vector of lanes of a row of a.
INLINE Ints lanes_of(const int8_t* a) {
#if QFRAMEWORK_GROUP == 4
  return load<Ints>(a);
#else
  return wide_lanes(a);
#endif
}

#if QFRAMEWORK_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Whether the processor, and the operating system, have the instructions.
extern "C" int available() {
#if QFRAMEWORK_AMX
  constexpr int REQUEST = 0x1023, TILES = 18;  // arch_prctl: permission to use the registers of tiles
  return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
#else
  return 1;
#endif
}
