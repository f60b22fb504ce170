// mixed_attention on x86 processors: for each block of queries, the logits of all of its keys, their exponentials in
// place, and the product of these and V, so that none of them leaves the L2 cache up to some thousands of keys. Each task
// packs K and V of one head.

struct Operand {
  const int8_t* at;
  int64_t batch, head, token;  // strides
  const float* scale;
  int64_t per_head;  // 1, or 0 if the scale is one number
};

// What is added to logits: rows of as many numbers as there are keys. Batch b has the mask b % batches.
struct Mask {
  const float* at;  // null if there is none
  int64_t batches, batch, head, token;
};

struct Attention {
  Operand q, k, v;
  Mask mask;
  void* out;  // (batch, queries, heads, width)
  const float* out_scale;
  int64_t out_scale_per_head;
  int64_t batch, heads, kv_heads, queries, keys, channels, width;
  float logit_scale;
  int32_t causal;
  Dtype dtype;
};

// 2^x up to an error of 2e-7 of it; below -100 the value there, which is lost beside the 1 of the
// largest logit. NaN stays NaN.
INLINE Floats power_of_2(Floats x) {
  x = larger(repeated(-100), x);
  const Ints n = rounded(x);
  const Floats r = x - converted(n);
  // Least squares of the relative error at Chebyshev's nodes of [-1/2, 1/2], exact at 0.
  Floats p = fused(r, repeated(1.3218672e-3f), repeated(9.6716983e-3f));
  p = fused(p, r, repeated(5.5508930e-2f));
  p = fused(p, r, repeated(0.24022238f));
  p = fused(p, r, repeated(0.69314688f));
  p = fused(p, r, repeated(1));
  return (Floats)((Ints)p + (n << 23));
}

// Which lanes have one of `keys` keys.
INLINE Ints seen(int64_t keys) {
  Ints index = {};
  for (int i = 0; i < LANES; ++i) index[i] = i;
  return index < (int32_t)keys;
}

constexpr float LOG2_E = 1.44269504f;

// Exponentials of products times a number, the largest of which is `top`; of numbers without `products`.
template <bool products>
INLINE Floats weights(const int32_t* s, Floats factor, Floats top) {
  if (products) return power_of_2(fused(converted(load<Ints>(s)), factor, -top));
  return power_of_2((load<Floats>(s) - top) * LOG2_E);
}

// The exponentials of a panel's row of logits, of which `keys` are kept, and what they add up to.
template <bool products>
INLINE Floats weigh_panel(int32_t* s, Floats factor, Floats top, int64_t keys) {
  Floats left = weights<products>(s, factor, top), right = weights<products>(s + LANES, factor, top);
  if (keys < COLUMNS) {
    left = (Floats)((Ints)left & seen(keys));
    right = (Floats)((Ints)right & seen(keys - LANES));
  }
  store_weights(s, left, right);
  return left + right;
}

// The same for a row of all panels; the sum of `keys` exponentials. Those of other keys are zeros.
template <bool products>
INLINE float weigh_row(int32_t* s, int64_t keys, int64_t panels, Floats factor, Floats top) {
  const int64_t whole = keys / COLUMNS, rest = keys % COLUMNS;
  Floats sum = {};
  for (int64_t i = 0; i < whole; ++i) sum += weigh_panel<products>(s + i * PANEL, factor, top, COLUMNS);
  if (rest) sum += weigh_panel<products>(s + whole * PANEL, factor, top, rest);
  for (int64_t i = whole + (rest > 0); i < panels; ++i) std::memset(s + i * PANEL, 0, COLUMNS * 4);
  return added_up(sum);
}

// Softmax of a row of logits without the division: the sum of exponentials.
SIMD static float exponentials(int32_t* s, int64_t keys, int64_t panels, float logit_scale) {
  const int64_t whole = keys / COLUMNS, rest = keys % COLUMNS;
  Ints left = INT32_MIN - Ints{}, right = left;
  for (int64_t i = 0; i < whole; ++i) {
    left = larger(left, load<Ints>(s + i * PANEL));
    right = larger(right, load<Ints>(s + i * PANEL + LANES));
  }
  if (rest) {
    left = larger(left, seen(rest) ? load<Ints>(s + whole * PANEL) : left);
    right = larger(right, seen(rest - LANES) ? load<Ints>(s + whole * PANEL + LANES) : right);
  }
  const Floats factor = repeated(logit_scale * LOG2_E);
  return weigh_row<true>(s, keys, panels, factor, factor * (float)largest_of(larger(left, right)));
}

// The same with a row of a mask. Logits are natural ones: masks hold the lowest float32, which log2(e) would overflow.
// Without a key that is not -inf, all exponentials and their sum are zeros.
SIMD static float masked_exponentials(int32_t* s, const float* mask, int64_t keys, int64_t panels, float logit_scale) {
  const Floats lowest = repeated(-INFINITY);
  Floats top = lowest;
  for (int64_t key = 0; key < keys; key += COLUMNS) {
    int32_t* const at = s + key / COLUMNS * PANEL;
    float last[COLUMNS];
    const float* added = mask + key;
    if (keys - key < COLUMNS) {
      for (int i = 0; i < COLUMNS; i += LANES) store(last + i, lowest);
      added = (const float*)std::memcpy(last, added, (keys - key) * 4);
    }
    for (int i = 0; i < COLUMNS; i += LANES) {
      const Floats y = fused(converted(load<Ints>(at + i)), repeated(logit_scale), load<Floats>(added + i));
      top = larger(top, y);
      store(at + i, y);
    }
  }
  float largest = top[0];
  for (int i = 1; i < LANES; ++i) largest = top[i] > largest ? top[i] : largest;
  if (largest == -INFINITY) keys = 0;
  return weigh_row<false>(s, keys, panels, repeated(0), repeated(largest));
}

// Rows that are read soon: those of one head are too far apart for the processor to foresee.
static void prefetch(const int8_t* x, int64_t stride, int64_t rows, int64_t bytes) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)x + r * stride + i, _MM_HINT_T0);
}

// What a thread needs, for one head of K and V at a time.
struct Work {
  const Attention& x;
  const int64_t panels, groups, lanes;  // of keys, of channels of V, of channels of Q and K
  std::unique_ptr<int32_t[]> keys, values, logits;
  std::unique_ptr<Element[]> queries;

  explicit Work(const Attention& x)
      : x(x),
        panels((x.keys + COLUMNS - 1) / COLUMNS),
        groups((x.width + COLUMNS - 1) / COLUMNS),
        lanes(round_up(x.channels, ALIGNED) / GROUP),
        keys(new int32_t[panels * lanes * COLUMNS]),
        values(new int32_t[groups * panels * VALUES]),
        logits(new int32_t[panels * PANEL]),
        queries(new Element[ROWS * lanes * GROUP]) {}

  SIMD void pack_head(int64_t batch, int64_t head) {
    const int8_t* const k = x.k.at + batch * x.k.batch + head * x.k.head;
    const int8_t* const v = x.v.at + batch * x.v.batch + head * x.v.head;
    for (int64_t i = 0, key = 0; i < panels; ++i, key += COLUMNS) {
      const int64_t next = std::clamp<int64_t>(x.keys - key - COLUMNS, 0, COLUMNS);
      prefetch(k + (key + COLUMNS) * x.k.token, x.k.token, next, x.channels);
      prefetch(v + (key + COLUMNS) * x.v.token, x.v.token, next, x.width);
      pack(k + key * x.k.token, x.k.token, x.channels, x.keys - key, lanes, keys.get() + i * lanes * COLUMNS);
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t channel = group * COLUMNS;
        pack_values(v + key * x.v.token + channel, x.v.token, x.keys - key, x.width - channel,
                    values.get() + (group * panels + i) * VALUES);
      }
    }
  }

  // Queries [first, first + ROWS) of a head.
  SIMD void attend(int64_t batch, int64_t head, int64_t kv_head, int64_t first) {
    const int64_t rows = std::min<int64_t>(ROWS, x.queries - first), stride = lanes * GROUP;
    const int8_t* const q = x.q.at + batch * x.q.batch + head * x.q.head;
    int32_t starts[ROWS];
    for (int64_t r = 0; r < ROWS; ++r)
      starts[r] = prepare_row(q + (first + r) * x.q.token, r < rows ? x.channels : 0, stride,
                              queries.get() + r * stride, PACKED_OFFSET);
    const int64_t next = std::clamp<int64_t>(x.queries - first - ROWS, 0, ROWS);
    prefetch(q + (first + ROWS) * x.q.token, x.q.token, next, x.channels);
    const int64_t last = x.causal ? std::min(x.keys, first + rows) : x.keys, used = (last + COLUMNS - 1) / COLUMNS;
    for (int64_t i = 0; i < used; ++i)
      tile(queries.get(), stride, keys.get() + i * lanes * COLUMNS, lanes, logits.get() + i * PANEL, rows,
           starts, [] {});
    const float logit_scale = x.q.scale[head * x.q.per_head] * x.k.scale[kv_head * x.k.per_head] * x.logit_scale;
    const float value_scale = x.v.scale[kv_head * x.v.per_head];
    const float* const mask =
        x.mask.at ? x.mask.at + batch % x.mask.batches * x.mask.batch + head * x.mask.head : nullptr;
    float scales[ROWS];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t some = x.causal ? std::min(x.keys, first + r + 1) : x.keys;
      int32_t* const s = logits.get() + r * COLUMNS;
      const float sum = mask ? masked_exponentials(s, mask + (first + r) * x.mask.token, some, used, logit_scale)
                             : exponentials(s, some, used, logit_scale);
      scales[r] = sum == 0 ? 0 : value_scale / sum;
    }
    for (int64_t group = 0; group < groups; ++group) {
      float sums[ROWS * COLUMNS];
      weigh(logits.get(), values.get() + group * panels * VALUES, used, rows, sums);
      for (int64_t r = 0; r < rows; ++r)
        finish(sums + r * COLUMNS, scales[r], head, (batch * x.queries + first + r) * x.heads + head, group * COLUMNS);
    }
  }

  // Channels of the result's row from `channel` on.
  SIMD void finish(const float* sums, float scale, int64_t head, int64_t row, int64_t channel) {
    const int64_t channels = std::min<int64_t>(COLUMNS, x.width - channel), bytes = size_of(x.dtype);
    char* const out = (char*)x.out + (row * x.width + channel) * bytes;
    char written[COLUMNS * 4];
    char* const to = channels < COLUMNS ? written : out;
    const Floats quantize = repeated(x.out_scale ? 1 / x.out_scale[head * x.out_scale_per_head] : 1);
    for (int64_t i = 0; i < COLUMNS; i += LANES) {
      const Floats y = load<Floats>(sums + i) * scale;
      if (x.dtype == INT8)
        store_bytes((int8_t*)to + i, rounded(smaller(larger(y * quantize, repeated(-127)), repeated(127))));
      else
        store_as(x.dtype, to, i, y);
    }
    if (channels < COLUMNS) std::memcpy(out, written, channels * bytes);
  }
};

static bool positive(const float* scale, int64_t per_head, int64_t heads) {
  for (int64_t i = 0; i < (per_head ? heads : 1); ++i)
    if (!(scale[i] > 0 && scale[i] <= 1e30f)) return false;
  return true;
}

// Returns 1, and computes nothing, if a scale is not a positive number.
extern "C" int mixed_attention(const Attention* attention, int threads) {
  const Attention& x = *attention;
  if (!positive(x.q.scale, x.q.per_head, x.heads) || !positive(x.k.scale, x.k.per_head, x.kv_heads) ||
      !positive(x.v.scale, x.v.per_head, x.kv_heads) || !positive(&x.logit_scale, 0, 1) ||
      (x.out_scale && !positive(x.out_scale, x.out_scale_per_head, x.heads)))
    return 1;
  const int64_t group = x.heads / x.kv_heads, blocks = (x.queries + ROWS - 1) / ROWS, pairs = x.batch * x.kv_heads;
  const int64_t wanted = threads > 1 ? (4 * threads + pairs - 1) / pairs : 1;  // so that no thread waits long
  const int64_t parts = std::min(wanted, group * blocks);
#pragma omp parallel num_threads(threads)
  {
    const Unit unit;
    Work work(x);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < pairs * parts; ++task) {
      const int64_t part = task % parts, batch = task / parts / x.kv_heads, kv_head = task / parts % x.kv_heads;
      work.pack_head(batch, kv_head);
      for (int64_t i = group * blocks * part / parts; i < group * blocks * (part + 1) / parts; ++i)
        work.attend(batch, kv_head * group + i / blocks, kv_head, i % blocks * ROWS);
    }
  }
  return 0;
}
