/* Products of K-quants with many columns, from panels, without AVX-512: eight rows of the matrix, unpacked once.
 *
 * AVX2 multiplies bytes to pairs in 16 bits. Eight pairs of Q4_K, four of Q5_K and two of Q6_K are added up there before a
 * scale turns them into 32 bits, so a column costs one product and one sum for each four weights and little more. The sums
 * are the whole numbers that panels.c gets, and what follows is done in the same order: the bits are the same.
 */
#include "panels.h"

#include "blocks.h"
#include "k_quants.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <stddef.h>

enum { ROWS = 8, COLUMNS = 6, CHUNK = 4, FOURS = VALUES / 4, PAIRS = 8, GROUPS_MAX = 16 };

#define UNROLL _Pragma("GCC unroll 8")
#define AVX2 __attribute__((target("avx2,fma,f16c")))

/* Blocks of ROWS rows, one after the other along the rows. In a register of 32 bytes, row r has bytes [4 r, 4 r + 4). */
struct panel {
    uint8_t weights[CHUNK][FOURS][ROWS * 4];
    int16_t scales[CHUNK][GROUPS_MAX][ROWS * 2]; /* of each group, twice */
    int16_t minima[CHUNK][PAIRS][ROWS * 2];      /* of two groups each; of Q6_K the scales, times 32 what is too much */
    float factors[CHUNK][ROWS];
    float minimum_factors[CHUNK][ROWS];
} __attribute__((aligned(32)));

/* Where the rows of a panel lie. */
struct rows {
    const char *first;
    __m256i offsets; /* of each row from the first, in bytes; rows that are not there lie where the last one does */
};

/* Four bytes of each row. */
AVX2 INLINE __m256i four_of_each(const struct rows *rows, int64_t at) {
    return _mm256_i32gather_epi32((const int *)(const void *)(rows->first + at), rows->offsets, 1);
}

/* A byte of each row, as a number. */
AVX2 INLINE __m256i byte_of_each(__m256i fours, int which) {
    return _mm256_and_si256(_mm256_srli_epi32(fours, 8 * which), _mm256_set1_epi32(255));
}

/* The first two bytes of four of each, as f16. */
AVX2 INLINE __m256 half_of_each(__m256i fours) {
    const __m256i low = _mm256_and_si256(fours, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

AVX2 INLINE __m256i pair_of(__m256i first, __m256i second) {
    return _mm256_or_si256(_mm256_and_si256(first, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(second, 16));
}

INLINE __m256i *at_register(void *from) { return (__m256i *)from; }

/* ---- Unpacking. ---- */

/* Scales and minima of Q4_K and Q5_K, which begin alike. See six_bit_scales. */
AVX2 static void take_scales(struct panel *p, int block, const struct rows *rows) {
    const __m256i both = four_of_each(rows, 0), a = four_of_each(rows, 4), b = four_of_each(rows, 8), c = four_of_each(rows, 12);
    const __m256i six = _mm256_set1_epi32(0x3f3f3f3f), four = _mm256_set1_epi32(0x0f0f0f0f), two = _mm256_set1_epi32(0x30303030);
    const __m256i scales[2] = {
        _mm256_and_si256(a, six),
        _mm256_or_si256(_mm256_and_si256(c, four), _mm256_and_si256(_mm256_srli_epi32(a, 2), two)),
    };
    const __m256i minima[2] = {
        _mm256_and_si256(b, six),
        _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(c, 4), four), _mm256_and_si256(_mm256_srli_epi32(b, 2), two)),
    };
    for (int group = 0; group < 8; group++) {
        const __m256i scale = byte_of_each(scales[group / 4], group % 4);
        _mm256_store_si256(at_register(p->scales[block][group]), pair_of(scale, scale));
    }
    for (int pair = 0; pair < 4; pair++) {
        const __m256i first = byte_of_each(minima[pair / 2], pair % 2 * 2), second = byte_of_each(minima[pair / 2], pair % 2 * 2 + 1);
        _mm256_store_si256(at_register(p->minima[block][pair]), pair_of(first, second));
    }
    _mm256_store_ps(p->factors[block], half_of_each(both));
    _mm256_store_ps(p->minimum_factors[block], half_of_each(_mm256_srli_epi32(both, 16)));
}

AVX2 INLINE void put(struct panel *p, int block, int fours, __m256i weights) {
    _mm256_store_si256(at_register(p->weights[block][fours]), weights);
}

AVX2 static void unpack_q4_k(struct panel *p, int block, const struct rows *rows) {
    const __m256i nibbles = _mm256_set1_epi8(15);
    take_scales(p, block, rows);
    for (int at = 0; at < 32; at++) {
        const int fours = at / 8 * 16 + at % 8;
        const __m256i x = four_of_each(rows, 16 + 4 * at);
        put(p, block, fours, _mm256_and_si256(x, nibbles));
        put(p, block, fours + 8, _mm256_and_si256(_mm256_srli_epi16(x, 4), nibbles));
    }
}

AVX2 static void unpack_q5_k(struct panel *p, int block, const struct rows *rows) {
    const __m256i nibbles = _mm256_set1_epi8(15), fifth = _mm256_set1_epi8(16);
    take_scales(p, block, rows);
    for (int column = 0; column < 8; column++) {
        const __m256i high = four_of_each(rows, 16 + 4 * column);
        for (int pair = 0; pair < 4; pair++) {
            const __m256i x = four_of_each(rows, 48 + 32 * pair + 4 * column);
            const __m256i one = _mm256_and_si256(_mm256_slli_epi16(_mm256_srli_epi16(high, 2 * pair), 4), fifth);
            const __m256i two = _mm256_and_si256(_mm256_slli_epi16(_mm256_srli_epi16(high, 2 * pair + 1), 4), fifth);
            put(p, block, pair * 16 + column, _mm256_or_si256(_mm256_and_si256(x, nibbles), one));
            put(p, block, pair * 16 + column + 8, _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(x, 4), nibbles), two));
        }
    }
}

AVX2 static void unpack_q6_k(struct panel *p, int block, const struct rows *rows) {
    const __m256i nibbles = _mm256_set1_epi8(15), top = _mm256_set1_epi8(0x30);
    __m256i scales[GROUPS_MAX];
    for (int group = 0; group < GROUPS_MAX; group++) { /* the byte to the highest, for its sign */
        scales[group] = _mm256_srai_epi32(
            _mm256_slli_epi32(four_of_each(rows, 192 + group / 4 * 4), 24 - 8 * (group % 4)), 24);
        _mm256_store_si256(at_register(p->scales[block][group]), pair_of(scales[group], scales[group]));
    }
    for (int pair = 0; pair < PAIRS; pair++) {
        _mm256_store_si256(at_register(p->minima[block][pair]), pair_of(scales[2 * pair], scales[2 * pair + 1]));
    }
    _mm256_store_ps(p->factors[block], half_of_each(_mm256_srli_epi32(four_of_each(rows, 206), 16)));
    for (int half = 0; half < 2; half++) {
        for (int column = 0; column < 8; column++) {
            const __m256i high = four_of_each(rows, 128 + 32 * half + 4 * column);
            const __m256i first = four_of_each(rows, 64 * half + 4 * column);
            const __m256i second = four_of_each(rows, 64 * half + 32 + 4 * column);
            const int fours = half * 32 + column;
            put(p, block, fours,
                _mm256_or_si256(_mm256_and_si256(first, nibbles), _mm256_and_si256(_mm256_slli_epi16(high, 4), top)));
            put(p, block, fours + 8,
                _mm256_or_si256(_mm256_and_si256(second, nibbles), _mm256_and_si256(_mm256_slli_epi16(high, 2), top)));
            put(p, block, fours + 16,
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(first, 4), nibbles), _mm256_and_si256(high, top)));
            put(p, block, fours + 24,
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(second, 4), nibbles),
                                _mm256_and_si256(_mm256_srli_epi16(high, 2), top)));
        }
    }
}

/* ---- Multiplying. ---- */

/* Some columns, and where what is computed goes. */
struct part {
    const struct panel *panel;
    int n_blocks;
    bool is_first; /* of the chunks along the rows */
    const struct q8_k *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    __m256i present; /* rows that are there */
};

AVX2 INLINE __m256i four_values(const struct q8_k *column, int fours) {
    int32_t four;
    memcpy(&four, column->values + 4 * fours, sizeof four);
    return _mm256_set1_epi32(four);
}

/* Sums of the weights' products with a column, group by group, each times the scale of its group. */
AVX2 INLINE void multiply_block(const int type, const int n_columns, const struct part *t, int block, __m256i sums[COLUMNS]) {
    const int n_added = type == Q4_K ? 8 : type == Q5_K ? 4 : 2; /* as many as 16 bits hold */
    const int of_group = type == Q6_K ? 4 : 8;
    UNROLL for (int j = 0; j < n_columns; j++) sums[j] = _mm256_setzero_si256();
    for (int from = 0; from < FOURS; from += n_added) {
        __m256i pairs[COLUMNS];
        UNROLL for (int i = 0; i < n_added; i++) {
            const __m256i x = _mm256_load_si256((const __m256i *)(const void *)t->panel->weights[block][from + i]);
            UNROLL for (int j = 0; j < n_columns; j++) {
                const __m256i products = _mm256_maddubs_epi16(x, four_values(t->b + j * t->ldb + block, from + i));
                pairs[j] = i == 0 ? products : _mm256_add_epi16(pairs[j], products);
            }
        }
        const __m256i scale = _mm256_load_si256((const __m256i *)(const void *)t->panel->scales[block][from / of_group]);
        UNROLL for (int j = 0; j < n_columns; j++) {
            sums[j] = _mm256_add_epi32(sums[j], _mm256_madd_epi16(pairs[j], scale));
        }
    }
}

/* What minima take away from a column's sums. */
AVX2 INLINE __m256i minimum_of(const int type, const struct part *t, int block, const struct q8_k *column) {
    __m256i minimum = _mm256_setzero_si256();
    for (int pair = 0; pair < (type == Q6_K ? PAIRS : PAIRS / 2); pair++) {
        int16_t both[2];
        if (type == Q6_K) {
            memcpy(both, column->sums + 2 * pair, sizeof both);
        } else {
            both[0] = (int16_t)(column->sums[4 * pair] + column->sums[4 * pair + 1]);
            both[1] = (int16_t)(column->sums[4 * pair + 2] + column->sums[4 * pair + 3]);
        }
        int32_t as_one;
        memcpy(&as_one, both, sizeof as_one);
        const __m256i minima = _mm256_load_si256((const __m256i *)(const void *)t->panel->minima[block][pair]);
        minimum = _mm256_add_epi32(minimum, _mm256_madd_epi16(minima, _mm256_set1_epi32(as_one)));
    }
    return minimum;
}

AVX2 INLINE void multiply(const int type, const int n_columns, const struct part *t) {
    for (int block = 0; block < t->n_blocks; block++) {
        __m256i sums[COLUMNS];
        multiply_block(type, n_columns, t, block, sums);
        UNROLL for (int j = 0; j < n_columns; j++) {
            const struct q8_k *column = t->b + j * t->ldb + block;
            float *to = t->c + j * t->ldc;
            __m256 sum = t->is_first && block == 0 ? _mm256_setzero_ps() : _mm256_maskload_ps(to, t->present);
            const __m256 scale = _mm256_set1_ps(column->scale);
            const __m256i minimum = minimum_of(type, t, block, column);
            __m256i total = sums[j];
            if (type == Q6_K) {
                total = _mm256_sub_epi32(total, _mm256_slli_epi32(minimum, 5));
            }
            const __m256 factor = _mm256_mul_ps(_mm256_load_ps(t->panel->factors[block]), scale);
            sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), factor, sum);
            if (type != Q6_K) {
                const __m256 of_minimum = _mm256_mul_ps(_mm256_load_ps(t->panel->minimum_factors[block]), scale);
                sum = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(minimum), of_minimum, sum);
            }
            _mm256_maskstore_ps(to, t->present, sum);
        }
    }
}

#define OF(n)                                                                            \
    AVX2 static void q4_k_##n(const struct part *t) { multiply(Q4_K, n, t); }            \
    AVX2 static void q5_k_##n(const struct part *t) { multiply(Q5_K, n, t); }            \
    AVX2 static void q6_k_##n(const struct part *t) { multiply(Q6_K, n, t); }
OF(1) OF(2) OF(3) OF(4) OF(5) OF(6)
#define EACH(name) name##1, name##2, name##3, name##4, name##5, name##6
static void (*const of_type[3][COLUMNS])(const struct part *) = {{EACH(q4_k_)}, {EACH(q5_k_)}, {EACH(q6_k_)}};

AVX2 void swarmllm_panels_avx2(const struct panel_product *t) {
    const int64_t block_bytes = swarmllm_k_block_bytes(t->type), panels = (t->m + ROWS - 1) / ROWS;
    const int64_t first = panels * t->thread / t->n_threads, end = panels * (t->thread + 1) / t->n_threads;
    struct panel panel;
    for (int64_t from = 0; from < t->k; from += CHUNK) { /* the columns of a chunk stay in the cache for all rows */
        const int n_blocks = t->k - from < CHUNK ? (int)(t->k - from) : CHUNK;
        for (int64_t at = first; at < end; at++) {
            const int n_rows = t->m - at * ROWS < ROWS ? (int)(t->m - at * ROWS) : ROWS;
            int32_t offsets[ROWS], present[ROWS];
            for (int row = 0; row < ROWS; row++) {
                offsets[row] = (int32_t)((row < n_rows ? row : n_rows - 1) * t->lda * block_bytes);
                present[row] = -(row < n_rows);
            }
            struct rows rows = {NULL, _mm256_loadu_si256(at_register(offsets))};
            for (int block = 0; block < n_blocks; block++) {
                rows.first = (const char *)t->a + (at * ROWS * t->lda + from + block) * block_bytes;
                (t->type == Q4_K ? unpack_q4_k : t->type == Q5_K ? unpack_q5_k : unpack_q6_k)(&panel, block, &rows);
            }
            struct part part = {
                .panel = &panel,
                .n_blocks = n_blocks,
                .is_first = from == 0,
                .ldb = t->ldb,
                .ldc = t->ldc,
                .present = _mm256_loadu_si256(at_register(present)),
            };
            for (int64_t j = 0; j < t->n; j += COLUMNS) {
                const int n = t->n - j < COLUMNS ? (int)(t->n - j) : COLUMNS;
                part.b = (const struct q8_k *)t->b + j * t->ldb + from;
                part.c = t->c + j * t->ldc + at * ROWS;
                of_type[t->type - Q4_K][n - 1](&part);
            }
        }
    }
}
#endif
