/* Products of Q4_0, Q5_0, Q8_0, IQ4_NL and MXFP4 with a few columns, with AVX-512: two rows of the matrix in a register.
 *
 * Four weights of one row lie beside four of the other, then the next four of each, so that a load of two scales from
 * memory fills a register for both, and nothing but a product, a conversion and an addition is left for each column. Each
 * sum has the bits of ggml's dot products on AVX2 (blocks_32.c says which these are): columns are moved by 128 to be
 * positive, and what that adds to a sum of four, 128 times the sum of the weights, is taken off first, in integers.
 *
 * A strip of 16 rows is computed by a few pairs at a time. The scales of all of its blocks are read first, which brings
 * it into the cache; while it is multiplied, memory is asked for the next one.
 */
#include "pairs_32.h"

#include "blocks.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

enum { STRIP = 16, PAIRS = STRIP / 2, COLUMNS = 8, BLOCKS_MAX = 1024, NEAR = 3 << 17, LINE = 64, VALUES_32 = 32 };

#define UNROLL _Pragma("GCC unroll 8")
#define AVX512 __attribute__((target("avx2,bmi2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

/* Up to COLUMNS columns of a batch, as the kernels read them. */
struct __attribute__((aligned(LINE))) columns {
    float scales[BLOCKS_MAX][2 * COLUMNS];           /* each twice */
    uint8_t values[BLOCKS_MAX * COLUMNS][2 * VALUES_32]; /* each four twice, moved by 128; a block of each column, block by block */
};

/* Of 16 rows: the scales of every block. */
struct __attribute__((aligned(LINE))) strip {
    const char *rows[STRIP];
    float scales[BLOCKS_MAX][STRIP];
    const char *next; /* what memory is asked for */
    int64_t next_bytes; /* in each step of a kernel */
};

/* Fours of `first` and of `second` in turn. */
AVX512 INLINE __m512i in_turn(__m256i first, __m256i second) {
    const __m512i order = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutex2var_epi32(_mm512_castsi256_si512(first), order, _mm512_castsi256_si512(second));
}

AVX512 INLINE __m512i nibbles(const uint8_t *first, const uint8_t *second) {
    const __m256i order = _mm256_set_epi32(11, 3, 10, 2, 9, 1, 8, 0);
    const __m128i a = _mm_loadu_si128((const __m128i *)(const void *)first);
    const __m128i b = _mm_loadu_si128((const __m128i *)(const void *)second);
    const __m256i both = _mm256_permutex2var_epi32(_mm256_castsi128_si256(a), order, _mm256_castsi128_si256(b));
    const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
    return _mm512_and_si512(all, _mm512_set1_epi8(15));
}

/* The weights of a block of each of two rows, without their scales. */
AVX512 INLINE __m512i weights(const int type, const char *first, const char *second) {
    if (type == Q8_0) {
        const struct q8_0 *x = (const void *)first, *z = (const void *)second;
        return in_turn(_mm256_loadu_si256((const __m256i *)(const void *)x->values),
                       _mm256_loadu_si256((const __m256i *)(const void *)z->values));
    }
    if (type == Q5_0) {
        const struct q5_0 *x = (const void *)first, *z = (const void *)second;
        const __mmask64 high = _pdep_u64(x->high, 0x0f0f0f0f0f0f0f0f) | _pdep_u64(z->high, 0xf0f0f0f0f0f0f0f0);
        const __m512i low = nibbles(x->values, z->values);
        return _mm512_mask_sub_epi8(low, ~high, low, _mm512_set1_epi8(16));
    }
    if (type == MXFP4) {
        const struct mxfp4 *x = (const void *)first, *z = (const void *)second;
        const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)fp4);
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles(x->values, z->values));
    }
    const struct q4_0 *x = (const void *)first, *z = (const void *)second;
    const __m512i four = nibbles(x->values, z->values);
    if (type == IQ4_NL) {
        const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)iq4_weights);
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), four);
    }
    return _mm512_sub_epi8(four, _mm512_set1_epi8(8));
}

/* The scales of one block of 16 rows, whose heads are at these addresses. */
AVX512 INLINE __m512 scales_of(const int type, __m512i low, __m512i high, int64_t at) {
    const __m256i a = _mm512_i64gather_epi32(low, (const void *)at, 1);
    const __m256i b = _mm512_i64gather_epi32(high, (const void *)at, 1);
    const __m512i heads = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    if (type == MXFP4) { /* half of two to the power of exponent - 127 */
        const __m512i exponent = _mm512_and_si512(heads, _mm512_set1_epi32(255)), one = _mm512_set1_epi32(1);
        const __m512i large = _mm512_slli_epi32(_mm512_sub_epi32(exponent, one), 23);
        const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), exponent);
        const __mmask16 is_small = _mm512_cmplt_epu32_mask(exponent, _mm512_set1_epi32(2));
        return _mm512_castsi512_ps(_mm512_mask_mov_epi32(large, is_small, small));
    }
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(heads));
}

AVX512 INLINE void read_scales(const int type, int64_t k, struct strip *strip) {
    const __m512i low = _mm512_loadu_si512(strip->rows), high = _mm512_loadu_si512(strip->rows + STRIP / 2);
    for (int64_t l = 0; l < k; l++) {
        _mm512_store_ps(strip->scales[l], scales_of(type, low, high, l * block_bytes_32(type)));
    }
}

/* Eight sums of each of two rows, in turn: both totals, added up as ggml does. */
AVX512 INLINE void store_totals(__m512 sums, float *to) {
    const __m256 four = _mm256_add_ps(_mm512_extractf32x8_ps(sums, 1), _mm512_castps512_ps256(sums));
    const __m128 two = _mm_add_ps(_mm256_extractf128_ps(four, 1), _mm256_castps256_ps128(four));
    _mm_storel_pi((__m64 *)(void *)to, _mm_add_ps(two, _mm_movehl_ps(two, two)));
}

/* Blocks `l` of the rows 2 * `first` and after of a strip, `n_pairs` pairs, times those of `n` columns. */
AVX512 INLINE void add_blocks(const int type, const int n_pairs, const int n, int64_t l, const struct strip *strip,
                              int first, const struct columns *columns, __m512 (*sums)[COLUMNS]) {
    const __m512i middle = _mm512_set1_epi8((char)128), zero = _mm512_setzero_si512();
    const uint8_t(*y)[2 * VALUES_32] = columns->values + l * n;
    __m512i x[PAIRS], less[PAIRS];
    /* By way of memory: from there two scales fill a register without a unit that products need. */
    double both[PAIRS][COLUMNS] __attribute__((aligned(LINE)));
    UNROLL for (int p = 0; p < n_pairs; p++) {
        const char *const *rows = strip->rows + 2 * (first + p);
        x[p] = weights(type, rows[0] + l * block_bytes_32(type), rows[1] + l * block_bytes_32(type));
        less[p] = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, middle, x[p]));
        double scales;
        memcpy(&scales, strip->scales[l] + 2 * (first + p), sizeof scales);
        const __m512 of_rows = _mm512_castpd_ps(_mm512_set1_pd(scales));
        _mm512_store_ps((float *)both[p], _mm512_mul_ps(of_rows, _mm512_load_ps(columns->scales[l])));
    }
    __asm__("" : "+m"(both)); /* or the compiler takes them from the register, by shuffles */
    UNROLL for (int j = 0; j < n; j++) {
        const __m512i column = _mm512_load_si512(y[j]);
        UNROLL for (int p = 0; p < n_pairs; p++) {
            const __m512 fours = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(less[p], column, x[p]));
            sums[p][j] = _mm512_fmadd_ps(_mm512_castpd_ps(_mm512_set1_pd(both[p][j])), fours, sums[p][j]);
        }
    }
}

AVX512 INLINE void pairs(const int type, const int n_pairs, const int n, int64_t k, struct strip *strip, int first,
                         const struct columns *columns, float (*totals)[STRIP]) {
    const bool has_two = type == IQ4_NL || type == MXFP4; /* even and odd blocks have sums of their own */
    __m512 sums[PAIRS][COLUMNS], odd[PAIRS][COLUMNS];
    UNROLL for (int p = 0; p < n_pairs; p++) {
        UNROLL for (int j = 0; j < n; j++) sums[p][j] = odd[p][j] = _mm512_setzero_ps();
    }
    for (int64_t l = 0; l < k; l += has_two ? 2 : 1) {
        for (int64_t at = 0; at < strip->next_bytes; at += LINE) _mm_prefetch(strip->next + at, _MM_HINT_T1);
        strip->next += strip->next_bytes;
        add_blocks(type, n_pairs, n, l, strip, first, columns, sums);
    }
    for (int64_t l = 1; has_two && l < k; l += 2) add_blocks(type, n_pairs, n, l, strip, first, columns, odd);
    UNROLL for (int p = 0; p < n_pairs; p++) {
        UNROLL for (int j = 0; j < n; j++) {
            store_totals(has_two ? _mm512_add_ps(sums[p][j], odd[p][j]) : sums[p][j], totals[j] + 2 * (first + p));
        }
    }
}

typedef void (*strip_kernel)(int64_t k, struct strip *strip, const struct columns *columns, float (*totals)[STRIP]);

#define STRIP_OF(type, n, n_pairs)                                                                                       \
    AVX512 static void strip_##type##_##n(int64_t k, struct strip *strip, const struct columns *columns, float (*totals)[STRIP]) { \
        read_scales(type, k, strip);                                                                                  \
        for (int first = 0; first < PAIRS; first += n_pairs) pairs(type, n_pairs, n, k, strip, first, columns, totals); \
    }
#define STRIPS(type)                                                                                   \
    STRIP_OF(type, 1, 8) STRIP_OF(type, 2, 8) STRIP_OF(type, 3, 4) STRIP_OF(type, 4, 4) STRIP_OF(type, 5, 2) \
    STRIP_OF(type, 6, 2) STRIP_OF(type, 7, 2) STRIP_OF(type, 8, 2)
#define EACH(name) {name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8}
STRIPS(Q4_0) STRIPS(Q5_0) STRIPS(Q8_0) STRIPS(IQ4_NL) STRIPS(MXFP4)
static const strip_kernel kernels[][COLUMNS] = {EACH(strip_Q4_0_), EACH(strip_Q5_0_), EACH(strip_Q8_0_),
                                                EACH(strip_IQ4_NL_), EACH(strip_MXFP4_)};
static const int passes[COLUMNS] = {1, 1, 2, 2, 4, 4, 4, 4}; /* through a strip */

AVX512 static void lay_out(const struct product_32 *t, int n, struct columns *out) {
    const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    for (int64_t l = 0; l < t->k; l++) {
        for (int j = 0; j < COLUMNS; j++) {
            const struct q8_0 *y = (const struct q8_0 *)t->b + j * t->ldb + l;
            out->scales[l][2 * j] = out->scales[l][2 * j + 1] = j < n ? _cvtsh_ss(y->scale) : 0;
            if (j < n) {
                const __m256i values = _mm256_loadu_si256((const __m256i *)(const void *)y->values);
                const __m256i moved = _mm256_xor_si256(values, _mm256_set1_epi8((char)128));
                _mm512_store_si512(out->values[l * n + j], _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(moved)));
            }
        }
    }
}

bool swarmllm_product_pairs_32(const struct product_32 *t) {
    const int which = t->type == Q4_0 ? 0 : t->type == Q5_0 ? 1 : t->type == Q8_0 ? 2 : t->type == IQ4_NL ? 3 : t->type == MXFP4 ? 4 : -1;
    if (which < 0 || t->k > BLOCKS_MAX || (which > 2 && t->k % 2 != 0)) {
        return false;
    }
    struct columns columns;
    struct strip strip;
    const int64_t row_bytes = t->lda * block_bytes_32(t->type), strip_bytes = row_bytes * STRIP;
    const int64_t strips = (t->m + STRIP - 1) / STRIP;
    const int64_t first = strips * t->thread / t->n_threads, end = strips * (t->thread + 1) / t->n_threads;
    /* Rows stay in the cache until all columns had them. */
    const int64_t n_near = t->n <= COLUMNS || strip_bytes > NEAR ? strips : NEAR / strip_bytes;
    for (int64_t from = first; from < end; from += n_near) {
        const int64_t to = end - from < n_near ? end : from + n_near;
        for (int64_t j = 0; j < t->n; j += COLUMNS) {
            struct product_32 part = *t;
            const int n = (int)(t->n - j < COLUMNS ? t->n - j : COLUMNS);
            part.b = (const struct q8_0 *)t->b + j * t->ldb;
            lay_out(&part, n, &columns);
            for (int64_t i = from; i < to; i++) {
                const int n_rows = (int)(t->m - i * STRIP < STRIP ? t->m - i * STRIP : STRIP);
                float totals[COLUMNS][STRIP];
                for (int r = 0; r < STRIP; r++) { /* the last row stands in for those that are not there */
                    strip.rows[r] = (const char *)t->a + (i * STRIP + (r < n_rows ? r : n_rows - 1)) * row_bytes;
                }
                strip.next = (const char *)t->a + (i + 1) * strip_bytes;
                strip.next_bytes = j > 0 ? 0 : strip_bytes / (t->k * passes[n - 1]);
                kernels[which][n - 1](t->k, &strip, &columns, totals);
                for (int column = 0; column < n; column++) {
                    memcpy(t->c + (j + column) * t->ldc + i * STRIP, totals[column], n_rows * sizeof(float));
                }
            }
        }
    }
    return true;
}
#else
bool swarmllm_product_pairs_32(const struct product_32 *product) {
    (void)product;
    return false;
}
#endif
