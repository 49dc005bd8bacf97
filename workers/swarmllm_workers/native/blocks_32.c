/* Products of Q4_0, Q5_0, IQ4_NL and MXFP4 with a few columns: a block of weights is unpacked once for all columns.
 *
 * ggml unpacks it again for each column. Each sum here has the bits of `ggml_vec_dot_q4_0_q8_0` and its like on AVX2:
 * the products of a block make eight sums of four, exact in integers, each of which is converted, multiplied with the
 * product of both scales and added by a fused multiply-add, block after block; the eight are added up at the end. Of
 * IQ4_NL and MXFP4, even and odd blocks have eight floats each, and a row of an odd number of blocks, whose last one
 * ggml takes number by number, is left to ggml.
 *
 * Memory is asked for what comes next in a row, and behind it, or not (`asks`). Processors with AVX-512 run the same
 * kernels.
 */
#include "blocks_32.h"

#include "blocks.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <string.h>

enum { COLUMNS = 8, BLOCKS_MAX = 1024, SHARE = 8, NEAR = 3 << 17 };

#define UNROLL _Pragma("GCC unroll 8")
#define AVX2 __attribute__((target("avx2,fma,f16c")))

AVX2 INLINE __m256i nibbles(const uint8_t *packed) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)packed);
    const __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

AVX2 INLINE __m256i looked_up(const int8_t *table, __m256i at) {
    const __m128i values = _mm_loadu_si128((const __m128i *)(const void *)table);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), at);
}

/* The 32 weights of a block, without its scale. */
AVX2 INLINE __m256i weights(const int type, const char *block) {
    if (type == Q5_0) {
        const struct q5_0 *x = (const void *)block;
        const __m256i spread = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
        const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)x->high), spread);
        const __m256i others = _mm256_or_si256(bytes, _mm256_set1_epi64x(0x7fbfdfeff7fbfdfe)); /* all bits but the one */
        const __m256i is_high = _mm256_cmpeq_epi8(others, _mm256_set1_epi64x(-1));
        return _mm256_or_si256(nibbles(x->values), _mm256_andnot_si256(is_high, _mm256_set1_epi8((char)0xf0)));
    }
    if (type == MXFP4) {
        return looked_up(fp4, nibbles(((const struct mxfp4 *)(const void *)block)->values));
    }
    const __m256i four = nibbles(((const struct q4_0 *)(const void *)block)->values);
    return type == IQ4_NL ? looked_up(iq4_weights, four) : _mm256_sub_epi8(four, _mm256_set1_epi8(8));
}

AVX2 INLINE float scale_of(const int type, const char *block) {
    if (type == MXFP4) { /* half of two to the power of exponent - 127 */
        const uint32_t exponent = ((const struct mxfp4 *)(const void *)block)->exponent;
        const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        return scale;
    }
    uint16_t scale;
    memcpy(&scale, block, sizeof scale);
    return _cvtsh_ss(scale);
}

AVX2 INLINE float sum_of_eight(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* Up to COLUMNS columns of a batch, as the kernels read them. */
struct __attribute__((aligned(REGISTER))) columns {
    float scales[BLOCKS_MAX][COLUMNS];             /* 0 for columns that are not there */
    int8_t values[BLOCKS_MAX * COLUMNS][REGISTER]; /* a block of each column, block by block */
};

/* One block of a row times a block of each of `n` columns, added to their sums. */
AVX2 INLINE void add_block(const int type, const int n, const char *block, int64_t l,
                           const struct columns *columns, __m256 *sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int8_t(*y)[REGISTER] = columns->values + l * n;
    const __m256i signs = weights(type, block), size = _mm256_sign_epi8(signs, signs);
    /* By way of memory: a broadcast from there takes no unit that products need. */
    float both[COLUMNS] __attribute__((aligned(32)));
    _mm256_store_ps(both, _mm256_mul_ps(_mm256_set1_ps(scale_of(type, block)), _mm256_load_ps(columns->scales[l])));
    UNROLL for (int j = 0; j < n; j++) {
        const __m256i column = _mm256_load_si256((const __m256i *)(const void *)y[j]);
        const __m256i twos = _mm256_maddubs_epi16(size, _mm256_sign_epi8(column, signs));
        const __m256 fours = _mm256_cvtepi32_ps(_mm256_madd_epi16(ones, twos));
        sums[j] = _mm256_fmadd_ps(_mm256_broadcast_ss(both + j), fours, sums[j]);
    }
}

AVX2 INLINE void row(const int type, const int n, const bool asks, const struct product_32 *t, const char *blocks,
                     const struct columns *columns, float *c) {
    const bool has_two = type == IQ4_NL || type == MXFP4;
    __m256 even[COLUMNS], odd[COLUMNS];
    UNROLL for (int j = 0; j < n; j++) even[j] = odd[j] = _mm256_setzero_ps();
    for (int64_t l = 0; l < t->k; l++) {
        if (asks) {
            _mm_prefetch(blocks + l * block_bytes_32(type) + STREAM_AHEAD, _MM_HINT_T0);
        }
        add_block(type, n, blocks + l * block_bytes_32(type), l, columns, even);
        if (has_two) {
            l++;
            add_block(type, n, blocks + l * block_bytes_32(type), l, columns, odd);
        }
    }
    UNROLL for (int j = 0; j < n; j++) {
        c[j * t->ldc] = sum_of_eight(has_two ? _mm256_add_ps(even[j], odd[j]) : even[j]);
    }
}

typedef void (*row_kernel)(const struct product_32 *t, const char *blocks, const struct columns *columns, float *c);

#define ROW(type, n, asks)                                                                                            \
    AVX2 static void row_##asks##_##type##_##n(const struct product_32 *t, const char *blocks,                        \
                                               const struct columns *columns, float *c) {                             \
        row(type, n, asks, t, blocks, columns, c);                                                                    \
    }
#define ASKING(type, n) ROW(type, n, 0) ROW(type, n, 1)
#define ROWS(type)                                                                                  \
    ASKING(type, 1) ASKING(type, 2) ASKING(type, 3) ASKING(type, 4) ASKING(type, 5) ASKING(type, 6) \
    ASKING(type, 7) ASKING(type, 8)
#define EACH(name) {name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8}
ROWS(Q4_0) ROWS(Q5_0) ROWS(IQ4_NL) ROWS(MXFP4)
/* Those that ask memory for what comes next are the second of each. */
static const row_kernel rows[4][2][COLUMNS] = {{EACH(row_0_Q4_0_), EACH(row_1_Q4_0_)},
                                               {EACH(row_0_Q5_0_), EACH(row_1_Q5_0_)},
                                               {EACH(row_0_IQ4_NL_), EACH(row_1_IQ4_NL_)},
                                               {EACH(row_0_MXFP4_), EACH(row_1_MXFP4_)}};

AVX2 static void align_columns(const struct product_32 *t, int n, struct columns *out) {
    for (int64_t l = 0; l < t->k; l++) {
        for (int j = 0; j < COLUMNS; j++) {
            const struct q8_0 *y = (const struct q8_0 *)t->b + j * t->ldb + l;
            out->scales[l][j] = j < n ? _cvtsh_ss(y->scale) : 0;
            if (j < n) {
                memcpy(out->values[l * n + j], y->values, REGISTER);
            }
        }
    }
}

bool swarmllm_product_32(const struct product_32 *t) {
    const int which = t->type == Q4_0 ? 0 : t->type == Q5_0 ? 1 : t->type == IQ4_NL ? 2 : t->type == MXFP4 ? 3 : -1;
    if (which < 0 || t->k > BLOCKS_MAX || (which > 1 && t->k % 2 != 0)) {
        return false;
    }
    struct columns columns;
    const int64_t row_bytes = t->lda * block_bytes_32(t->type);
    const int64_t groups = (t->m + SHARE - 1) / SHARE;
    const int64_t first = groups * t->thread / t->n_threads * SHARE;
    const int64_t next = groups * (t->thread + 1) / t->n_threads * SHARE, end = next < t->m ? next : t->m;
    /* Rows stay in the cache until all columns had them. */
    const int64_t n_rows = t->n <= COLUMNS || row_bytes > NEAR / SHARE ? t->m : NEAR / row_bytes;
    for (int64_t from = first; from < end; from += n_rows) {
        const int64_t to = end - from < n_rows ? end : from + n_rows;
        for (int64_t j = 0; j < t->n; j += COLUMNS) {
            struct product_32 part = *t;
            const int n = (int)(t->n - j < COLUMNS ? t->n - j : COLUMNS);
            part.b = (const struct q8_0 *)t->b + j * t->ldb;
            align_columns(&part, n, &columns);
            for (int64_t i = from; i < to; i++) {
                rows[which][t->asks][n - 1](&part, (const char *)t->a + i * row_bytes, &columns, t->c + j * t->ldc + i);
            }
        }
    }
    return true;
}
#elif !defined(__aarch64__)
bool swarmllm_product_32(const struct product_32 *product) {
    (void)product;
    return false;
}
#endif
