/* Products of Q4_K, Q5_K, Q6_K and IQ4_XS with a few columns: the weights of a block are unpacked once for all columns.
 *
 * ggml unpacks them again for each column. Each sum here has the bits of `ggml_vec_dot_q4_K_q8_K` and its like on AVX2:
 * what is added up in integers, which is exact in any order, makes the same eight sums of a block (positions 4 i to
 * 4 i + 3 of all groups of 32 in sum i), each is then converted, and added by a fused multiply-add to one of eight
 * floats, block after block; the eight are added up in the same order at the end. Minima of Q4_K and Q5_K make four
 * floats more.
 *
 * With AVX2 one row of the matrix is computed after the other, as it lies in memory, which is asked for what comes next
 * or not (K_STREAMED, K_AVX2). With VNNI a register holds a group of two columns, and the weights of the group twice. A
 * single column has one register for two groups instead. Rows of the matrix are computed in pairs, and memory is asked
 * for the rows after the next ones meanwhile (K_AHEAD), or one after the other, as they lie there (K_IN_ORDER), which is
 * faster with few columns. IQ4_XS has kernels with AVX2 only.
 */
#include "k_quants.h"

#include "blocks.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <string.h>

enum { COLUMNS = 8, PAIRS = COLUMNS / 2, BLOCKS_MAX = 128, SHARE = 8, NEAR = 3 << 17 };
enum { LINE = 64, CLOSE = 1 << 12, FAR_ENOUGH = 1 << 13 };

#define ODD_WORDS 0xaaaaaaaa
#define UNROLL _Pragma("GCC unroll 8")
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

static int64_t block_bytes(int type) {
    return type == Q4_K   ? sizeof(struct q4_k)
           : type == Q5_K ? sizeof(struct q5_k)
           : type == Q6_K ? sizeof(struct q6_k)
                          : sizeof(struct iq4_xs);
}

AVX2 INLINE __m128i sums_of_groups(const int16_t *of_halves) {
    const __m128i *sums = (const __m128i *)(const void *)of_halves;
    return _mm_hadd_epi16(_mm_loadu_si128(sums), _mm_loadu_si128(sums + 1));
}

AVX2 INLINE float sum_of_eight(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

AVX2 INLINE float sum_of_four(__m128 x) {
    const __m128 sum = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* Of Q5_K ggml adds the four up in integers. */
AVX2 INLINE __m128i sum_in_all(__m128i x) {
    const __m128i twos = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_add_epi32(twos, _mm_shuffle_epi32(twos, 0xb1));
}

AVX2 INLINE float with_minima(const int type, float sum, __m128 minima) {
    return type == Q6_K ? sum : sum + (type == Q5_K ? _mm_cvtss_f32(minima) : sum_of_four(minima));
}

AVX2 INLINE __m256i load_256(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

/* ---- AVX2: columns as `align_columns` leaves them. ---- */

/* A block of a column. The columns of a batch have one after the other, block by block. */
struct __attribute__((aligned(REGISTER))) aligned_column {
    int8_t values[VALUES];
    int16_t sums[VALUES / 16];
    float scale;
};

static void align_columns(const struct k_product *t, int n, struct aligned_column *out) {
    for (int64_t l = 0; l < t->k; l++) {
        for (int j = 0; j < n; j++, out++) {
            const struct q8_k *y = (const struct q8_k *)t->b + j * t->ldb + l;
            memcpy(out->values, y->values, sizeof y->values);
            memcpy(out->sums, y->sums, sizeof y->sums);
            out->scale = y->scale;
        }
    }
}

/* Group `g` of 32 weights, one in each byte. */
AVX2 INLINE __m256i group_256(const int type, const char *block, const int g) {
    const __m256i nibble = _mm256_set1_epi8(15);
    if (type == Q6_K) {
        const struct q6_k *x = (const void *)block;
        const int half = g / 4, quarter = g % 4;
        const __m256i bits = load_256(x->values + 64 * half + 32 * (quarter % 2));
        const __m256i high = load_256(x->high + 32 * half);
        const __m256i low = _mm256_and_si256(quarter < 2 ? bits : _mm256_srli_epi16(bits, 4), nibble);
        const __m256i at_four = quarter == 0   ? _mm256_slli_epi16(high, 4)
                                : quarter == 1 ? _mm256_slli_epi16(high, 2)
                                : quarter == 2 ? high
                                               : _mm256_srli_epi16(high, 2);
        return _mm256_or_si256(low, _mm256_and_si256(at_four, _mm256_set1_epi8(0x30)));
    }
    const uint8_t *values = type == Q4_K ? ((const struct q4_k *)(const void *)block)->values
                                         : ((const struct q5_k *)(const void *)block)->values;
    const __m256i bits = load_256(values + 32 * (g / 2));
    const __m256i low = _mm256_and_si256(g % 2 == 0 ? bits : _mm256_srli_epi16(bits, 4), nibble);
    if (type == Q4_K) {
        return low;
    }
    const __m256i high = load_256(((const struct q5_k *)(const void *)block)->high);
    const __m256i at_four = g < 4 ? _mm256_slli_epi16(high, 4 - g) : _mm256_srli_epi16(high, g - 4);
    return _mm256_or_si256(low, _mm256_and_si256(at_four, _mm256_set1_epi8(0x10)));
}

AVX2 INLINE void row_256(const int type, const int n, const bool asks, const struct k_product *t,
                         const struct aligned_column *columns, const char *row, float *c) {
    const int64_t n_bytes = type == Q4_K ? sizeof(struct q4_k) : type == Q5_K ? sizeof(struct q5_k) : sizeof(struct q6_k);
    __m256 floats[COLUMNS];
    __m128 minima[COLUMNS];
    UNROLL for (int j = 0; j < n; j++) {
        floats[j] = _mm256_setzero_ps();
        minima[j] = _mm_setzero_ps();
    }
    for (int64_t l = 0; l < t->k; l++) {
        const char *block = row + l * n_bytes;
        const struct aligned_column *y = columns + l * n;
        __m256i sums[COLUMNS];
        if (asks) {
            UNROLL for (int at = 0; at < n_bytes; at += LINE) _mm_prefetch(block + STREAM_AHEAD + at, _MM_HINT_T0);
        }
        float scale;
        int16_t scales[16];
        if (type == Q6_K) {
            const struct q6_k *x = (const void *)block;
            const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)x->scales));
            const __m256i minus = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(words, 5));
            scale = _cvtsh_ss(x->scale);
            _mm256_storeu_si256((__m256i *)(void *)scales, words);
            UNROLL for (int j = 0; j < n; j++) sums[j] = _mm256_madd_epi16(load_256(y[j].sums), minus);
        } else {
            const struct q4_k *x = (const void *)block;
            uint64_t low, high;
            six_bit_scales(x->scales, &low, &high);
            scale = _cvtsh_ss(x->scale);
            const float minimum = _cvtsh_ss(x->minimum);
            _mm_storeu_si128((__m128i *)(void *)scales, _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)low)));
            const __m128i words = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)high));
            UNROLL for (int j = 0; j < n; j++) {
                const __m128i four = _mm_madd_epi16(words, sums_of_groups(y[j].sums));
                const __m128 both = _mm_set1_ps(-y[j].scale * minimum);
                minima[j] = _mm_fmadd_ps(both, _mm_cvtepi32_ps(type == Q5_K ? sum_in_all(four) : four), minima[j]);
                sums[j] = _mm256_setzero_si256();
            }
        }
        UNROLL for (int g = 0; g < 8; g++) {
            const __m256i x = group_256(type, block, g);
            const __m256i scaled = type == Q6_K
                                       ? _mm256_set_m128i(_mm_set1_epi16(scales[2 * g + 1]), _mm_set1_epi16(scales[2 * g]))
                                       : _mm256_set1_epi16(scales[g]);
            UNROLL for (int j = 0; j < n; j++) {
                const __m256i twos = _mm256_maddubs_epi16(x, load_256(y[j].values + GROUP * g));
                sums[j] = _mm256_add_epi32(sums[j], _mm256_madd_epi16(twos, scaled));
            }
        }
        UNROLL for (int j = 0; j < n; j++) {
            const __m256 both = _mm256_set1_ps(y[j].scale * scale);
            floats[j] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(sums[j]), floats[j]);
        }
    }
    UNROLL for (int j = 0; j < n; j++) {
        const float sum = sum_of_eight(floats[j]);
        c[j * t->ldc] = with_minima(type, sum, minima[j]);
    }
}

/* Weights have signs and come from a table, with a scale for each group. */
AVX2 INLINE void row_xs(const int n, const bool asks, const struct k_product *t, const struct aligned_column *columns,
                        const char *row, float *c) {
    const __m256i weights = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)iq4_weights));
    __m256 floats[COLUMNS];
    UNROLL for (int j = 0; j < n; j++) floats[j] = _mm256_setzero_ps();
    for (int64_t l = 0; l < t->k; l++) {
        const struct iq4_xs *x = (const struct iq4_xs *)(const void *)row + l;
        const struct aligned_column *y = columns + l * n;
        __m256i sums[COLUMNS];
        if (asks) {
            UNROLL for (int at = 0; at < (int)sizeof *x; at += LINE) {
                _mm_prefetch((const char *)x + STREAM_AHEAD + at, _MM_HINT_T0);
            }
        }
        UNROLL for (int j = 0; j < n; j++) sums[j] = _mm256_setzero_si256();
        UNROLL for (int g = 0; g < 8; g++) {
            const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)(x->values + 16 * g));
            const __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
            const __m256i signs = _mm256_shuffle_epi8(weights, _mm256_and_si256(both, _mm256_set1_epi8(15)));
            const __m256i size = _mm256_sign_epi8(signs, signs);
            const int low = x->low_scales[g / 2] >> (4 * (g % 2)) & 15, high = x->high_scales >> (2 * g) & 3;
            const __m256i scale = _mm256_set1_epi16((int16_t)((low | high << 4) - 32));
            UNROLL for (int j = 0; j < n; j++) {
                const __m256i column = _mm256_sign_epi8(load_256(y[j].values + GROUP * g), signs);
                const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(size, column), scale);
                sums[j] = _mm256_add_epi32(sums[j], fours);
            }
        }
        UNROLL for (int j = 0; j < n; j++) {
            const __m256 both = _mm256_set1_ps(_cvtsh_ss(x->scale) * y[j].scale);
            floats[j] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(sums[j]), floats[j]);
        }
    }
    UNROLL for (int j = 0; j < n; j++) c[j * t->ldc] = sum_of_eight(floats[j]);
}

typedef void (*row_kernel)(const struct k_product *t, const struct aligned_column *columns, const char *row, float *c);

#define ROW(type, n, asks)                                                                                           \
    AVX2 static void row_##asks##_##type##_##n(const struct k_product *t, const struct aligned_column *columns,     \
                                               const char *row, float *c) {                                          \
        type == IQ4_XS ? row_xs(n, asks, t, columns, row, c) : row_256(type, n, asks, t, columns, row, c);           \
    }
#define ASKING(type, n) ROW(type, n, 0) ROW(type, n, 1)
#define ROWS(type)                                                                                  \
    ASKING(type, 1) ASKING(type, 2) ASKING(type, 3) ASKING(type, 4) ASKING(type, 5) ASKING(type, 6) \
    ASKING(type, 7) ASKING(type, 8)
#define EACH(name) {name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8}
ROWS(Q4_K) ROWS(Q5_K) ROWS(Q6_K) ROWS(IQ4_XS)
/* Those that ask memory for what comes next are the second of each. */
static const row_kernel rows_256[4][2][COLUMNS] = {{EACH(row_0_Q4_K_), EACH(row_1_Q4_K_)},
                                                   {EACH(row_0_Q5_K_), EACH(row_1_Q5_K_)},
                                                   {EACH(row_0_Q6_K_), EACH(row_1_Q6_K_)},
                                                   {EACH(row_0_IQ4_XS_), EACH(row_1_IQ4_XS_)}};

/* ---- AVX-512 with VNNI: columns as `prepare` leaves them. ---- */

/* One block of up to COLUMNS columns. Pair p is of columns 2 p and 2 p + 1, one in each half of a register. */
struct __attribute__((aligned(64))) columns {
    int8_t values[PAIRS][8][64]; /* of one group each */
    float scales[PAIRS][16];
    int16_t sums[PAIRS][32];       /* of 16 values each (Q6_K) */
    int16_t group_sums[2][32];     /* of 32 values each, of four columns (Q4_K, Q5_K) */
    float minus_scales[2][16];
};

/* One block of one column. */
struct __attribute__((aligned(64))) column {
    int8_t values[4][64]; /* of two groups each */
    int16_t sums[16];
    int16_t group_sums[8];
    float scale;
};

AVX512 INLINE __m512i twice(__m256i x) { return _mm512_broadcast_i64x4(x); }
AVX512 INLINE __m512i load_512(const void *from) { return _mm512_loadu_si512(from); }
AVX512 INLINE __m512i halves(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

AVX512 static void prepare_columns(const struct q8_k *b, int64_t ldb, int n, int64_t k, struct columns *out) {
    for (int64_t l = 0; l < k; l++) {
        for (int j = 0; j < COLUMNS && j < (n + 3) / 4 * 4; j++) {
            const struct q8_k *y = b + (j < n ? j : n - 1) * ldb + l; /* what is not there is as its neighbour */
            struct columns *o = out + l;
            const int p = j / 2, half = j % 2;
            for (int g = 0; g < 8; g++) memcpy(o->values[p][g] + GROUP * half, y->values + GROUP * g, GROUP);
            _mm256_store_ps(o->scales[p] + 8 * half, _mm256_set1_ps(y->scale));
            memcpy(o->sums[p] + 16 * half, y->sums, sizeof y->sums);
            _mm_store_si128((__m128i *)(void *)(o->group_sums[j / 4] + 8 * (j % 4)), sums_of_groups(y->sums));
            _mm_store_ps(o->minus_scales[j / 4] + 4 * (j % 4), _mm_set1_ps(-y->scale));
        }
    }
}

AVX512 static void prepare_column(const struct q8_k *y, const int type, int64_t k, struct column *out) {
    const int second = type == Q6_K ? 2 : 1, third = type == Q6_K ? 1 : 2; /* of four groups, as `fours_512` has them */
    for (int64_t l = 0; l < k; l++, y++, out++) {
        for (int i = 0; i < 2; i++) {
            const int8_t *from = y->values + 128 * i;
            _mm512_store_si512(out->values[2 * i], halves(load_256(from), load_256(from + GROUP * third)));
            _mm512_store_si512(out->values[2 * i + 1], halves(load_256(from + GROUP * second), load_256(from + GROUP * 3)));
        }
        memcpy(out->sums, y->sums, sizeof y->sums);
        _mm_store_si128((__m128i *)(void *)out->group_sums, sums_of_groups(y->sums));
        out->scale = y->scale;
    }
}

struct two {
    __m512i even, odd;
};

/* Groups 2 i and 2 i + 1 of a block, each twice. */
AVX512 INLINE struct two pair_512(const int type, const char *block, const int i) {
    const __m512i nibble = _mm512_set1_epi8(15);
    struct two groups;
    if (type == Q6_K) {
        const struct q6_k *x = (const void *)block;
        const __m512i two_bits = _mm512_set1_epi8(0x30);
        __m512i even = twice(load_256(x->values + 64 * (i / 2))), odd = twice(load_256(x->values + 64 * (i / 2) + 32));
        const __m512i high = twice(load_256(x->high + 32 * (i / 2)));
        if (i % 2) {
            even = _mm512_srli_epi16(even, 4);
            odd = _mm512_srli_epi16(odd, 4);
        }
        const __m512i even_high = i % 2 ? high : _mm512_slli_epi16(high, 4);
        const __m512i odd_high = i % 2 ? _mm512_srli_epi16(high, 2) : _mm512_slli_epi16(high, 2);
        groups.even = _mm512_or_si512(_mm512_and_si512(even, nibble), _mm512_and_si512(even_high, two_bits));
        groups.odd = _mm512_or_si512(_mm512_and_si512(odd, nibble), _mm512_and_si512(odd_high, two_bits));
        return groups;
    }
    const uint8_t *values = type == Q4_K ? ((const struct q4_k *)(const void *)block)->values
                                         : ((const struct q5_k *)(const void *)block)->values;
    const __m512i bits = twice(load_256(values + 32 * i));
    groups.even = _mm512_and_si512(bits, nibble);
    groups.odd = _mm512_and_si512(_mm512_srli_epi16(bits, 4), nibble);
    if (type == Q5_K) {
        const __m512i high = twice(load_256(((const struct q5_k *)(const void *)block)->high));
        const __m512i bit = _mm512_set1_epi8(0x10);
        const __m512i even = i < 2 ? _mm512_slli_epi16(high, 4 - 2 * i) : _mm512_srli_epi16(high, 2 * i - 4);
        const __m512i odd = i < 2 ? _mm512_slli_epi16(high, 3 - 2 * i) : _mm512_srli_epi16(high, 2 * i - 3);
        groups.even = _mm512_or_si512(groups.even, _mm512_and_si512(even, bit));
        groups.odd = _mm512_or_si512(groups.odd, _mm512_and_si512(odd, bit));
    }
    return groups;
}

/* Groups 4 i to 4 i + 3: the first two in the low halves (Q6_K: the first and third), the others in the high halves. */
AVX512 INLINE struct two fours_512(const int type, const char *block, const int i) {
    const __m512i nibble = _mm512_set1_epi8(15);
    struct two groups;
    if (type == Q6_K) {
        const struct q6_k *x = (const void *)block;
        const __m512i two_bits = _mm512_set1_epi8(0x30);
        const __m512i bits = load_512(x->values + 64 * i), high = twice(load_256(x->high + 32 * i));
        const __m512i even = _mm512_rolv_epi32(high, halves(_mm256_set1_epi32(4), _mm256_set1_epi32(2)));
        const __m512i odd = _mm512_rolv_epi32(high, halves(_mm256_set1_epi32(0), _mm256_set1_epi32(30)));
        groups.even = _mm512_or_si512(_mm512_and_si512(bits, nibble), _mm512_and_si512(even, two_bits));
        groups.odd = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(bits, 4), nibble), _mm512_and_si512(odd, two_bits));
        return groups;
    }
    const uint8_t *values = type == Q4_K ? ((const struct q4_k *)(const void *)block)->values
                                         : ((const struct q5_k *)(const void *)block)->values;
    const __m512i bits = load_512(values + 64 * i);
    groups.even = _mm512_and_si512(bits, nibble);
    groups.odd = _mm512_and_si512(_mm512_srli_epi16(bits, 4), nibble);
    if (type == Q5_K) {
        const __m512i high = twice(load_256(((const struct q5_k *)(const void *)block)->high));
        const __m512i bit = _mm512_set1_epi8(0x10);
        const int first = i ? 0 : 4; /* bit 4 i comes to bit 4 */
        const __m512i even = _mm512_rolv_epi32(high, halves(_mm256_set1_epi32(first), _mm256_set1_epi32((first + 30) % 32)));
        const __m512i odd =
            _mm512_rolv_epi32(high, halves(_mm256_set1_epi32((first + 31) % 32), _mm256_set1_epi32((first + 29) % 32)));
        groups.even = _mm512_or_si512(groups.even, _mm512_and_si512(even, bit));
        groups.odd = _mm512_or_si512(groups.odd, _mm512_and_si512(odd, bit));
    }
    return groups;
}

/* Where the scales of a group are, for each of its words. */
AVX512 INLINE __m512i group_scales(const int type, const int g) {
    return type == Q6_K ? twice(_mm256_set_m128i(_mm_set1_epi16((short)(2 * g + 1)), _mm_set1_epi16((short)(2 * g))))
                        : _mm512_set1_epi16((short)g);
}

/* Up to 2 `n_pairs` columns times one block of `n_rows` rows; four columns' sums at the end. */
AVX512 INLINE void rows_512(const int type, const int n_rows, const int n_pairs, int64_t k, const char *rows,
                            int64_t row_bytes, int64_t ahead, const struct columns *y, int n, float *c, int64_t ldc) {
    const int64_t n_bytes = type == Q4_K ? sizeof(struct q4_k) : type == Q5_K ? sizeof(struct q5_k) : sizeof(struct q6_k);
    const int n_fours = (n_pairs + 1) / 2;
    const __m512i zero = _mm512_setzero_si512();
    __m512 floats[2][PAIRS], minima[2][2];
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int p = 0; p < n_pairs; p++) floats[r][p] = _mm512_setzero_ps();
        UNROLL for (int q = 0; q < n_fours; q++) minima[r][q] = _mm512_setzero_ps();
    }
    for (int64_t l = 0; l < k; l++, y++) {
        UNROLL for (int r = 0; r < n_rows; r++) {
            const char *block = rows + r * row_bytes + l * n_bytes;
            __m512i sums[PAIRS], scales;
            __m512 scale;
            if (n_rows > 1) {
                UNROLL for (int at = 0; at < n_bytes; at += LINE) _mm_prefetch(block + ahead + at, _MM_HINT_T0);
            }
            if (type == Q6_K) {
                const struct q6_k *x = (const void *)block;
                const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)x->scales);
                const __m512i words = twice(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 5));
                const __m512i minus = _mm512_sub_epi16(zero, words);
                scales = _mm512_castsi256_si512(_mm256_cvtepi8_epi16(bytes));
                scale = _mm512_set1_ps(_cvtsh_ss(x->scale));
                UNROLL for (int p = 0; p < n_pairs; p++) {
                    sums[p] = _mm512_dpwssd_epi32(zero, load_512(y->sums[p]), minus);
                }
            } else {
                const struct q4_k *x = (const void *)block;
                uint64_t low, high;
                six_bit_scales(x->scales, &low, &high);
                scales = _mm512_castsi128_si512(_mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)low)));
                const __m512i words = _mm512_broadcast_i32x4(_mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)high)));
                const __m512 minimum = _mm512_set1_ps(_cvtsh_ss(x->minimum));
                scale = _mm512_set1_ps(_cvtsh_ss(x->scale));
                UNROLL for (int q = 0; q < n_fours; q++) {
                    __m512i four = _mm512_madd_epi16(words, load_512(y->group_sums[q]));
                    if (type == Q5_K) {
                        four = _mm512_add_epi32(four, _mm512_shuffle_epi32(four, 0x4e));
                        four = _mm512_add_epi32(four, _mm512_shuffle_epi32(four, 0xb1));
                    }
                    const __m512 both = _mm512_mul_ps(minimum, _mm512_load_ps(y->minus_scales[q]));
                    minima[r][q] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(four), minima[r][q]);
                }
                UNROLL for (int p = 0; p < n_pairs; p++) sums[p] = zero;
            }
            UNROLL for (int i = 0; i < 4; i++) {
                const struct two groups = pair_512(type, block, i);
                const __m512i even = _mm512_permutexvar_epi16(group_scales(type, 2 * i), scales);
                const __m512i odd = _mm512_permutexvar_epi16(group_scales(type, 2 * i + 1), scales);
                /* Two ways to the same sums. With many columns, units for products and for words share the work. */
                if (n_pairs > 2 && i < 2) {
                    const __m512i both = _mm512_mask_blend_epi16(ODD_WORDS, even, odd);
                    UNROLL for (int p = 0; p < n_pairs; p++) {
                        const __m512i a = _mm512_dpbusd_epi32(zero, groups.even, load_512(y->values[p][2 * i]));
                        const __m512i b = _mm512_dpbusd_epi32(zero, groups.odd, load_512(y->values[p][2 * i + 1]));
                        const __m512i words = _mm512_mask_blend_epi16(ODD_WORDS, a, _mm512_slli_epi32(b, 16));
                        sums[p] = _mm512_dpwssd_epi32(sums[p], words, both);
                    }
                } else {
                    UNROLL for (int p = 0; p < n_pairs; p++) {
                        const __m512i a = _mm512_maddubs_epi16(groups.even, load_512(y->values[p][2 * i]));
                        const __m512i b = _mm512_maddubs_epi16(groups.odd, load_512(y->values[p][2 * i + 1]));
                        sums[p] = _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(sums[p], a, even), b, odd);
                    }
                }
            }
            UNROLL for (int p = 0; p < n_pairs; p++) {
                const __m512 both = _mm512_mul_ps(scale, _mm512_load_ps(y->scales[p]));
                floats[r][p] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(sums[p]), floats[r][p]);
            }
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int q = 0; q < n_fours; q++) {
            const __m512 a = floats[r][2 * q], b = 2 * q + 1 < n_pairs ? floats[r][2 * q + 1] : a;
            __m512 sum = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0xdd), _mm512_shuffle_f32x4(a, b, 0x88));
            sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
            sum = _mm512_add_ps(sum, _mm512_movehdup_ps(sum));
            if (type == Q5_K) {
                sum = _mm512_add_ps(sum, minima[r][q]);
            } else if (type == Q4_K) {
                __m512 low = _mm512_add_ps(minima[r][q], _mm512_permute_ps(minima[r][q], 0x4e));
                low = _mm512_add_ps(low, _mm512_movehdup_ps(low));
                sum = _mm512_add_ps(sum, low);
            }
            float *to = c + 4 * q * ldc + r;
            to[0] = _mm512_cvtss_f32(sum);
            if (4 * q + 1 < n) to[ldc] = _mm_cvtss_f32(_mm512_extractf32x4_ps(sum, 1));
            if (4 * q + 2 < n) to[2 * ldc] = _mm_cvtss_f32(_mm512_extractf32x4_ps(sum, 2));
            if (4 * q + 3 < n) to[3 * ldc] = _mm_cvtss_f32(_mm512_extractf32x4_ps(sum, 3));
        }
    }
}

AVX512 INLINE float single_512(const int type, const bool asks, int64_t k, const char *row, int64_t ahead,
                               const struct column *y) {
    const int64_t n_bytes = type == Q4_K ? sizeof(struct q4_k) : type == Q5_K ? sizeof(struct q5_k) : sizeof(struct q6_k);
    const __m512i zero = _mm512_setzero_si512();
    __m256 floats = _mm256_setzero_ps();
    __m128 minima = _mm_setzero_ps();
    for (int64_t l = 0; l < k; l++, y++) {
        const char *block = row + l * n_bytes;
        __m512i sums, scales;
        float scale;
        if (asks) {
            UNROLL for (int at = 0; at < n_bytes; at += LINE) _mm_prefetch(block + ahead + at, _MM_HINT_T0);
        }
        if (type == Q6_K) {
            const struct q6_k *x = (const void *)block;
            const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)x->scales);
            const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 5);
            scales = _mm512_castsi256_si512(_mm256_cvtepi8_epi16(bytes));
            scale = _cvtsh_ss(x->scale);
            sums = _mm512_zextsi256_si512(
                _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_madd_epi16(words, load_256(y->sums))));
        } else {
            const struct q4_k *x = (const void *)block;
            uint64_t low, high;
            six_bit_scales(x->scales, &low, &high);
            scales = _mm512_castsi128_si512(_mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)low)));
            const __m128i words = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)high));
            const __m128i four = _mm_madd_epi16(words, _mm_load_si128((const __m128i *)(const void *)y->group_sums));
            const __m128 fours = _mm_cvtepi32_ps(type == Q5_K ? sum_in_all(four) : four);
            minima = _mm_fmadd_ps(_mm_set1_ps(-y->scale * _cvtsh_ss(x->minimum)), fours, minima);
            scale = _cvtsh_ss(x->scale);
            sums = zero;
        }
        UNROLL for (int i = 0; i < 2; i++) {
            const struct two groups = fours_512(type, block, i);
            const int step = type == Q6_K ? 1 : 2, other = 3 - step; /* as `fours_512` has them */
            const __m512i a = _mm512_maddubs_epi16(groups.even, load_512(y->values[2 * i]));
            const __m512i b = _mm512_maddubs_epi16(groups.odd, load_512(y->values[2 * i + 1]));
            const __m512i even = halves(_mm512_castsi512_si256(group_scales(type, 4 * i)),
                                        _mm512_castsi512_si256(group_scales(type, 4 * i + step)));
            const __m512i odd = halves(_mm512_castsi512_si256(group_scales(type, 4 * i + other)),
                                       _mm512_castsi512_si256(group_scales(type, 4 * i + 3)));
            sums = _mm512_dpwssd_epi32(sums, a, _mm512_permutexvar_epi16(even, scales));
            sums = _mm512_dpwssd_epi32(sums, b, _mm512_permutexvar_epi16(odd, scales));
        }
        const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
        floats = _mm256_fmadd_ps(_mm256_set1_ps(y->scale * scale), _mm256_cvtepi32_ps(eight), floats);
    }
    return with_minima(type, sum_of_eight(floats), minima);
}

typedef void (*single_kernel)(const struct k_product *t, int64_t first, int64_t end, const struct column *y);
typedef void (*share_kernel)(const struct k_product *t, int64_t first, int64_t end, const struct columns *y, int n, float *c);

/* How far from what is computed lies what is asked for, `rows_bytes` of which are computed together. */
static int64_t ahead_of(int64_t rows_bytes) {
    return rows_bytes * (rows_bytes > FAR_ENOUGH ? 1 : rows_bytes > CLOSE ? 2 : 4);
}

#define SHARE_OF(type, pairs)                                                                                          \
    AVX512 static void share_##type##_##pairs(const struct k_product *t, int64_t first, int64_t end,                   \
                                              const struct columns *y, int n, float *c) {                              \
        const int64_t row_bytes = t->lda * block_bytes(type), ahead = ahead_of(2 * row_bytes);                         \
        const char *a = t->a;                                                                                          \
        int64_t i = first;                                                                                             \
        if (t->way == K_AHEAD) {                                                                                       \
            for (; i + 2 <= end; i += 2)                                                                               \
                rows_512(type, 2, pairs, t->k, a + i * row_bytes, row_bytes, ahead, y, n, c + i, t->ldc);              \
        }                                                                                                              \
        for (; i < end; i++)                                                                                           \
            rows_512(type, 1, pairs, t->k, a + i * row_bytes, row_bytes, 0, y, n, c + i, t->ldc);                      \
    }
#define SINGLE(type, asks)                                                                                             \
    AVX512 static void single_##type##_##asks(const struct k_product *t, int64_t first, int64_t end,                   \
                                              const struct column *y) {                                                \
        const int64_t row_bytes = t->lda * block_bytes(type), ahead = ahead_of(row_bytes);                             \
        for (int64_t i = first; i < end; i++)                                                                          \
            t->c[i] = single_512(type, asks, t->k, (const char *)t->a + i * row_bytes, ahead, y);                      \
    }
#define SHARES(type) \
    SHARE_OF(type, 1) SHARE_OF(type, 2) SHARE_OF(type, 3) SHARE_OF(type, 4) SINGLE(type, 0) SINGLE(type, 1)
SHARES(Q4_K) SHARES(Q5_K) SHARES(Q6_K)
#define UP_TO_FOUR(name) name##1, name##2, name##3, name##4
static const single_kernel singles[3][2] = {
    {single_Q4_K_0, single_Q4_K_1}, {single_Q5_K_0, single_Q5_K_1}, {single_Q6_K_0, single_Q6_K_1}};
static const share_kernel shares[3][PAIRS] = {
    {UP_TO_FOUR(share_Q4_K_)}, {UP_TO_FOUR(share_Q5_K_)}, {UP_TO_FOUR(share_Q6_K_)}};

AVX512 __attribute__((noinline)) static void one_column(const struct k_product *t, int64_t first, int64_t end) {
    struct column y[BLOCKS_MAX];
    prepare_column(t->b, t->type, t->k, y);
    singles[t->type - Q4_K][t->way == K_AHEAD](t, first, end, y);
}

AVX512 __attribute__((noinline)) static void some_columns(const struct k_product *t, int64_t j, int64_t first, int64_t end) {
    struct columns y[BLOCKS_MAX];
    const int n = (int)(t->n - j < COLUMNS ? t->n - j : COLUMNS);
    prepare_columns((const struct q8_k *)t->b + j * t->ldb, t->ldb, n, t->k, y);
    shares[t->type - Q4_K][(n + 1) / 2 - 1](t, first, end, y, n, t->c + j * t->ldc);
}

static int kind_of(int type) { return type >= Q4_K && type <= Q6_K ? type - Q4_K : type == IQ4_XS ? 3 : -1; }

__attribute__((noinline)) static void aligned_columns(const struct k_product *t, int64_t j, int64_t first, int64_t end) {
    struct aligned_column columns[BLOCKS_MAX * COLUMNS];
    const int64_t row_bytes = t->lda * block_bytes(t->type);
    const int n = (int)(t->n - j < COLUMNS ? t->n - j : COLUMNS);
    struct k_product part = *t;
    part.b = (const struct q8_k *)t->b + j * t->ldb;
    align_columns(&part, n, columns);
    const row_kernel kernel = rows_256[kind_of(t->type)][t->way != K_AVX2][n - 1];
    for (int64_t i = first; i < end; i++) {
        kernel(&part, columns, (const char *)t->a + i * row_bytes, t->c + j * t->ldc + i);
    }
}

int64_t swarmllm_k_block_bytes(int type) { return kind_of(type) < 0 ? 0 : block_bytes(type); }

bool swarmllm_k_product(const struct k_product *t) {
    const int kind = kind_of(t->type);
    if (kind < 0 || t->k > BLOCKS_MAX) {
        return false;
    }
    const bool is_512 = t->way > K_STREAMED && t->type != IQ4_XS;
    const int64_t groups = (t->m + SHARE - 1) / SHARE;
    const int64_t first = groups * t->thread / t->n_threads * SHARE;
    const int64_t next = groups * (t->thread + 1) / t->n_threads * SHARE, end = next < t->m ? next : t->m;
    if (is_512 && t->n == 1) {
        one_column(t, first, end);
        return true;
    }
    const int64_t row_bytes = t->lda * block_bytes(t->type);
    const int64_t n_rows = t->n <= COLUMNS || row_bytes > NEAR / SHARE ? t->m : NEAR / row_bytes;
    for (int64_t i = first; i < end; i += n_rows) { /* rows stay in the cache until all columns had them */
        for (int64_t j = 0; j < t->n; j += COLUMNS) {
            (is_512 ? some_columns : aligned_columns)(t, j, i, end - i < n_rows ? end : i + n_rows);
        }
    }
    return true;
}
#elif !defined(__aarch64__)
int64_t swarmllm_k_block_bytes(int type) {
    (void)type;
    return 0;
}

bool swarmllm_k_product(const struct k_product *product) {
    (void)product;
    return false;
}
#endif
