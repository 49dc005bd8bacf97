/* Products of Q4_0 with a few columns, with the sums of panels_32.c: sixteen rows of the matrix side by side.
 *
 * Each block of sixteen rows is transposed in registers, so that a register has four weights of every row, and is
 * multiplied by up to eight columns from there. Weights are taken as they are stored, 8 too large. What that adds to the sum
 * of a block is the same for all rows, so the sum begins with as much less.
 *
 * Scales are copied some blocks ahead, two bytes at a time: a processor does not wait for such a copy when it reads
 * sixteen of them at once. While a panel is multiplied, memory is asked for the next one.
 */
#include "panels.h"

#include "blocks_32.h"

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#include "panels_body.h"

enum { BLOCK = 32, FOURS = BLOCK / 4, BLOCKS_MAX = 1024, LINE = 64, AHEAD = 8, NEAR = 3 << 17, SMALL = 3 << 13 };

/* Up to COLUMNS columns of a batch, block by block. */
struct few_columns {
    int8_t values[BLOCKS_MAX * COLUMNS][BLOCK];
    int32_t starts[BLOCKS_MAX * COLUMNS]; /* what the sum of a block begins with */
    float scales[BLOCKS_MAX * COLUMNS];
} __attribute__((aligned(LINE)));

struct few {
    const char *a; /* the first of ROWS rows */
    int64_t row_bytes;
    int64_t k;
    const char *next; /* what memory is asked for, */
    int64_t next_bytes; /* with every block */
    float *c;
    int64_t ldc;
    __mmask16 wanted; /* rows */
};

struct half {
    uint16_t bits;
} __attribute__((packed));

AVX512 INLINE __m512i four_rows(const char *first, int64_t apart) {
    const __m128i *rows[4];
    for (int i = 0; i < 4; i++) rows[i] = (const __m128i *)(const void *)(first + i * apart);
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128(rows[0]));
    x = _mm512_inserti32x4(x, _mm_loadu_si128(rows[1]), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128(rows[2]), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128(rows[3]), 3);
}

/* In each quarter of the registers, four numbers of four rows: number i of all to register i. */
AVX512 INLINE void transpose(__m512i x[4]) {
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm512_unpacklo_epi64(a, c);
    x[1] = _mm512_unpackhi_epi64(a, c);
    x[2] = _mm512_unpacklo_epi64(b, d);
    x[3] = _mm512_unpackhi_epi64(b, d);
}

/* Register i: weights [4 i, 4 i + 4) of each row, 8 too large. `at`: a block of the first row, behind its scale. */
AVX512 INLINE void weights_of(const char *at, int64_t row_bytes, __m512i x[FOURS]) {
    const __m512i nibbles = _mm512_set1_epi8(15);
    __m512i both[4];
    UNROLL for (int i = 0; i < 4; i++) both[i] = four_rows(at + i * row_bytes, 4 * row_bytes);
    transpose(both);
    UNROLL for (int i = 0; i < 4; i++) {
        x[i] = _mm512_and_si512(both[i], nibbles);
        x[i + 4] = _mm512_and_si512(_mm512_srli_epi16(both[i], 4), nibbles);
    }
}

AVX512 INLINE void copy_scales(const char *at, int64_t row_bytes, uint16_t to[ROWS]) {
    UNROLL for (int r = 0; r < ROWS; r++) {
        const uint32_t half = ((const struct half *)(const void *)(at + r * row_bytes))->bits;
        /* One by one: GCC would collect them in a register first, with the unit that transposes. */
        __asm__("movw %w1, %0" : "=m"(to[r]) : "r"(half));
    }
}

AVX512 INLINE void multiply_few(const int n, const struct few *t, const struct few_columns *columns) {
    const int64_t bytes = sizeof(struct q4_0);
    uint16_t scales[2 * AHEAD][ROWS] __attribute__((aligned(LINE)));
    const bool is_small = t->row_bytes * ROWS <= SMALL;
    const char *at = t->a, *next = t->next;
    __m512 sums[COLUMNS];
    for (int64_t l = 0; l < AHEAD && l < t->k; l++) copy_scales(at + l * bytes, t->row_bytes, scales[l]);
    UNROLL for (int j = 0; j < n; j++) sums[j] = _mm512_setzero_ps();
    for (int64_t l = 0; l < t->k; l++, at += bytes) {
        for (int64_t line = 0; line < t->next_bytes; line += LINE) {
            if (is_small) {
                _mm_prefetch(next + line, _MM_HINT_T0);
            } else {
                _mm_prefetch(next + line, _MM_HINT_T1);
            }
        }
        next += t->next_bytes;
        if (l + AHEAD < t->k) copy_scales(at + AHEAD * bytes, t->row_bytes, scales[(l + AHEAD) % (2 * AHEAD)]);
        const __m512 of_rows = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(const void *)scales[l % (2 * AHEAD)]));
        __m512i x[FOURS], products[COLUMNS];
        weights_of(at + 2, t->row_bytes, x);
        UNROLL for (int j = 0; j < n; j++) products[j] = _mm512_set1_epi32(columns->starts[l * n + j]);
        UNROLL for (int i = 0; i < FOURS; i++) {
            UNROLL for (int j = 0; j < n; j++) {
                int32_t four;
                memcpy(&four, columns->values[l * n + j] + 4 * i, sizeof four);
                products[j] = _mm512_dpbusd_epi32(products[j], x[i], _mm512_set1_epi32(four));
            }
        }
        UNROLL for (int j = 0; j < n; j++) {
            const __m512 both = _mm512_mul_ps(of_rows, _mm512_set1_ps(columns->scales[l * n + j]));
            sums[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[j]), both, sums[j]);
        }
    }
    UNROLL for (int j = 0; j < n; j++) _mm512_mask_storeu_ps(t->c + j * t->ldc, t->wanted, sums[j]);
}

#define OF(n) \
    AVX512 static void few_##n(const struct few *t, const struct few_columns *columns) { multiply_few(n, t, columns); }
OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8)
static void (*const kernels[COLUMNS])(const struct few *, const struct few_columns *) = {few_1, few_2, few_3, few_4,
                                                                                       few_5, few_6, few_7, few_8};

AVX512 static void lay_out(int64_t k, const struct q8_0 *b, int64_t ldb, int n, struct few_columns *out) {
    const __m256i ones = _mm256_set1_epi8(1);
    for (int64_t l = 0; l < k; l++) {
        for (int j = 0; j < n; j++) {
            const struct q8_0 *y = b + j * ldb + l;
            const __m256i values = _mm256_loadu_si256((const __m256i *)(const void *)y->values);
            const __m256i eight = _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, values);
            const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
            const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
            const int sum = _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
            _mm256_store_si256((__m256i *)(void *)out->values[l * n + j], values);
            out->starts[l * n + j] = -8 * sum;
            out->scales[l * n + j] = _cvtsh_ss(y->scale);
        }
    }
    __asm__ volatile("" ::: "memory"); /* or GCC 12 takes the whole call for one that does nothing */
}

bool swarmllm_panels_few(const struct panel_product *t) {
    if (t->type != Q4_0 || t->k > BLOCKS_MAX || t->m < ROWS) {
        return false;
    }
    const int64_t row_bytes = t->lda * (int64_t)sizeof(struct q4_0), panel_bytes = row_bytes * ROWS;
    const int64_t panels = (t->m + ROWS - 1) / ROWS;
    const int64_t first = panels * t->thread / t->n_threads, end = panels * (t->thread + 1) / t->n_threads;
    /* Rows stay in the cache until all columns had them. */
    const int64_t n_near = t->n <= COLUMNS || panel_bytes > NEAR ? panels : NEAR / panel_bytes;
    struct few_columns columns;
    for (int64_t from = first; from < end; from += n_near) {
        const int64_t to = end - from < n_near ? end : from + n_near;
        for (int64_t j = 0; j < t->n; j += COLUMNS) {
            const int n = (int)(t->n - j < COLUMNS ? t->n - j : COLUMNS);
            lay_out(t->k, (const struct q8_0 *)t->b + j * t->ldb, t->ldb, n, &columns);
            for (int64_t i = from; i < to; i++) {
                /* The last panel begins earlier, where it would have less than ROWS rows, and stores what is new. */
                const int64_t row = i * ROWS + ROWS <= t->m ? i * ROWS : t->m - ROWS;
                kernels[n - 1](&(struct few){
                    .a = (const char *)t->a + row * row_bytes,
                    .row_bytes = row_bytes,
                    .k = t->k,
                    .next = (const char *)t->a + (i + 1) * panel_bytes,
                    .next_bytes = j > 0 ? 0 : (int64_t)sizeof(struct q4_0) * ROWS,
                    .c = t->c + j * t->ldc + row,
                    .ldc = t->ldc,
                    .wanted = (__mmask16)(0xffff << (i * ROWS - row)),
                }, &columns);
            }
        }
    }
    return true;
}
#else
bool swarmllm_panels_few(const struct panel_product *product) {
    (void)product;
    return false;
}
#endif
