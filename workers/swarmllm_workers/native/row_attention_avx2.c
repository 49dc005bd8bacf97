/* Rows of fused attention with the bits that ggml gives a single row on AVX2, or AVX-512, faster.
 *
 * ggml takes one head of one row after the other through the cells, and converts a cell's key and value from f16 for each.
 * Here the queries of a batch that read the same head of keys go together through TILE cells at a time, whose keys and
 * values are converted once. Each sum is made of the same operations in the same order as ggml makes it:
 *
 * - a product of query and key: both in f16; number i is added by a fused multiply-add to one of 32 sums, i modulo 32.
 * - the largest product so far is what exponents are relative to. A larger one has all that was summed up scaled.
 * - values are added to sums that are rounded to f16 each time.
 * - exponents are those of the same C library.
 *
 * Cells whose mask is -inf are not there for a row.
 */
#include "row_attention_avx2.h"

#include "blocks.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#include <math.h>

enum { TILE = 32, QUERIES = 32, LANES = 8, LINE = 64, MINUS_INFINITY = 0xfc00 };

#define UNROLL _Pragma("GCC unroll 8")
#define AVX2 __attribute__((target("avx2,fma,f16c")))

#include "row_attention_avx512.h"

/* Queries that are under way, of one head of keys. */
struct block {
    int n;
    int64_t row[QUERIES];   /* of the batch */
    float largest[QUERIES]; /* product so far */
    float sum[QUERIES];
    uint32_t live[QUERIES];   /* cells of the tile that are there for this one's row: bits */
    uint32_t added[QUERIES];  /* those whose mask is a number to be added */
    uint32_t larger[QUERIES]; /* cells whose product is the largest so far */
    bool has_tile; /* keys and values of the tile are converted; else there are too few queries for that */
    float *queries; /* [QUERIES][key] */
    float *sums;    /* [QUERIES][value] */
    float *weights; /* [QUERIES][TILE]: products, then exponents */
    float *scales;  /* [QUERIES][TILE], where one is larger */
    float *keys;    /* [TILE][key] */
    float *values;  /* [TILE][value] */
};

AVX2 INLINE __m256 load_f16(const void *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

AVX2 INLINE __m256 load(const bool is_f16, const void *from, int64_t at) {
    return is_f16 ? load_f16((const uint16_t *)from + at) : _mm256_load_ps((const float *)from + at);
}

AVX2 INLINE __m256 rounded(__m256 x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, 0)); }

static float *laid(float *memory, size_t n, float **at) {
    *at = memory;
    return memory + n;
}

/* ---- Products of queries and keys. ---- */

/* The sums of eight numbers each, in the order of ggml. */
AVX2 INLINE __m256 sums_of_eight(const __m256 x[LANES]) {
    __m256 fours[4];
    UNROLL for (int i = 0; i < 4; i++) { /* of x[i] and x[i + 4] */
        fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20), _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
    return _mm256_hadd_ps(_mm256_hadd_ps(fours[0], fours[1]), _mm256_hadd_ps(fours[2], fours[3]));
}

/* `n_queries` products with each of eight cells. */
AVX2 INLINE void multiply(const int n_queries, const bool is_f16, const float *queries, const void *const keys[LANES],
                          int64_t n, __m256 scale, float *out) {
    __m256 parts[3][LANES];
    for (int cell = 0; cell < LANES; cell++) {
        __m256 sums[3][4];
        UNROLL for (int query = 0; query < n_queries; query++) {
            UNROLL for (int i = 0; i < 4; i++) { sums[query][i] = _mm256_setzero_ps(); }
        }
        for (int64_t at = 0; at < n; at += STEP) {
            UNROLL for (int i = 0; i < 4; i++) {
                const __m256 key = load(is_f16, keys[cell], at + LANES * i);
                UNROLL for (int query = 0; query < n_queries; query++) {
                    sums[query][i] =
                        _mm256_fmadd_ps(key, _mm256_load_ps(queries + query * n + at + LANES * i), sums[query][i]);
                }
            }
        }
        UNROLL for (int query = 0; query < n_queries; query++) {
            __m256 *x = sums[query];
            parts[query][cell] = _mm256_add_ps(_mm256_add_ps(x[0], x[2]), _mm256_add_ps(x[1], x[3]));
        }
    }
    UNROLL for (int query = 0; query < n_queries; query++) {
        _mm256_store_ps(out + query * TILE, _mm256_mul_ps(sums_of_eight(parts[query]), scale));
    }
}

#define MULTIPLY(n_queries)                                                                      \
    (is_f16 ? multiply(n_queries, true, queries, keys, t->key, scale, out)                       \
            : multiply(n_queries, false, queries, keys, t->key, scale, out))

#define WIDE_OF(n)                                                                                                       \
    AVX512 static void multiply_wide_##n(const float *queries, const void *const keys[LANES], const struct attention *t, \
                                         bool is_f16, float *out) {                                                      \
        if (is_f16) {                                                                                                    \
            multiply_wide(n, true, queries, keys, t->key, t->scale, TILE, out);                                          \
        } else {                                                                                                         \
            multiply_wide(n, false, queries, keys, t->key, t->scale, TILE, out);                                         \
        }                                                                                                                \
    }
WIDE_OF(1) WIDE_OF(2) WIDE_OF(3)

/* Of queries with the same cells: cell i of theirs is at `cells[i]` of the tile. */
AVX2 static void multiply_all(struct block *b, int first, int last, const uint8_t *cells, int n_cells, const char *halves,
                              const struct attention *t) {
    const __m256 scale = _mm256_set1_ps(t->scale);
    const bool is_f16 = !b->has_tile;
    for (int at = 0; at < n_cells; at += LANES) {
        const void *keys[LANES];
        for (int i = 0; i < LANES; i++) {
            const int64_t cell = cells[at + i < n_cells ? at + i : n_cells - 1];
            keys[i] = is_f16 ? (const void *)(halves + cell * t->key_cell) : b->keys + cell * t->key;
        }
        for (int query = first; query < last; query += 3) {
            const float *queries = b->queries + query * t->key;
            float *out = b->weights + query * TILE + at;
            if (t->order != ORDER_256) {
                (last - query >= 3 ? multiply_wide_3 : last - query == 2 ? multiply_wide_2 : multiply_wide_1)(
                    queries, keys, t, is_f16, out);
                continue;
            }
            if (last - query >= 3) {
                MULTIPLY(3);
            } else if (last - query == 2) {
                MULTIPLY(2);
            } else {
                MULTIPLY(1);
            }
        }
    }
}

/* ---- Exponents. ---- */

AVX2 static bool has_larger(const float *x, int n, float largest) {
    const __m256 limit = _mm256_set1_ps(largest);
    int found = 0;
    for (int at = 0; at < n; at += LANES) {
        const int within = n - at < LANES ? (1 << (n - at)) - 1 : 0xff;
        found |= _mm256_movemask_ps(_mm256_cmp_ps(_mm256_load_ps(x + at), limit, _CMP_GT_OQ)) & within;
    }
    return found != 0;
}

AVX2 static void take_exponents(struct block *b, int query, int n_cells) {
    float *x = b->weights + query * TILE, *scales = b->scales + query * TILE;
    float largest = b->largest[query], sum = b->sum[query];
    uint32_t larger = 0;
    if (!has_larger(x, n_cells, largest)) {
        for (int i = 0; i < n_cells; i++) {
            x[i] = expf(x[i] - largest);
        }
        for (int i = 0; i < n_cells; i++) {
            scales[i] = 1.0f;
            sum += x[i];
        }
    } else {
        for (int i = 0; i < n_cells; i++) {
            if (x[i] > largest) {
                scales[i] = expf(largest - x[i]);
                largest = x[i];
                x[i] = 1.0f;
                larger |= 1u << i;
                sum = __builtin_fmaf(sum, scales[i], 1.0f);
            } else {
                x[i] = expf(x[i] - largest);
                scales[i] = 1.0f;
                sum += x[i];
            }
        }
    }
    b->largest[query] = largest;
    b->sum[query] = sum;
    b->larger[query] = larger;
}

/* ---- Sums of values. ---- */

/* What is summed up for some queries. */
struct addition {
    const void *values; /* f32, or f16 */
    int64_t stride;     /* numbers from one cell's values to the next */
    const uint8_t *cells;
    int n_cells;
    uint32_t larger;
    const float *weights, *scales; /* [queries][TILE] */
    float *sums;                   /* [queries][n] */
    int64_t n;
};

/* STEP numbers of the values of all cells for `n_queries`. */
AVX2 INLINE void add(const int n_queries, const bool is_f16, const struct addition *a, int64_t at) {
    __m256 sums[2][4];
    UNROLL for (int q = 0; q < n_queries; q++) {
        UNROLL for (int i = 0; i < 4; i++) { sums[q][i] = _mm256_load_ps(a->sums + q * a->n + at + LANES * i); }
    }
    for (int cell = 0; cell < a->n_cells; cell++) {
        const int64_t value = a->cells[cell] * a->stride + at;
        if (a->larger >> cell & 1) {
            UNROLL for (int q = 0; q < n_queries; q++) {
                const __m256 scale = _mm256_broadcast_ss(a->scales + q * TILE + cell);
                UNROLL for (int i = 0; i < 4; i++) { sums[q][i] = rounded(_mm256_mul_ps(sums[q][i], scale)); }
            }
        }
        UNROLL for (int i = 0; i < 4; i++) {
            const __m256 x = load(is_f16, a->values, value + LANES * i);
            UNROLL for (int q = 0; q < n_queries; q++) {
                const __m256 weight = _mm256_broadcast_ss(a->weights + q * TILE + cell);
                sums[q][i] = rounded(_mm256_fmadd_ps(x, weight, sums[q][i]));
            }
        }
    }
    UNROLL for (int q = 0; q < n_queries; q++) {
        UNROLL for (int i = 0; i < 4; i++) {
            _mm256_store_ps(a->sums + q * a->n + at + LANES * i, sums[q][i]);
        }
    }
}

/* Sums up for one query or two what ggml sums up in f16: returns how many numbers of each. */
static int64_t summed_in_halves(const struct attention *t, int query, bool is_pair, const struct addition *a, const char *halves,
                            const struct block *b) {
#if __GNUC__ >= 12
    const int64_t end = t->order == ORDER_HALVES ? t->value / HALVES_STEP * HALVES_STEP : 0;
    for (int q = query; end > 0 && q < query + 1 + is_pair; q++) {
        for (int64_t at = 0; at < end; at += HALVES_STEP) {
            add_halves((const uint16_t *)(const void *)halves + at, (int64_t)(t->value_cell / sizeof(uint16_t)), a->cells,
                       a->n_cells, b->larger[q], b->weights + q * TILE, b->scales + q * TILE, b->sums + q * t->value + at);
        }
    }
    return end;
#else
    (void)t, (void)query, (void)is_pair, (void)a, (void)halves, (void)b;
    return 0;
#endif
}

#define ADD(n_queries) (is_f16 ? add(n_queries, true, &a, at) : add(n_queries, false, &a, at))

AVX2 static void add_all(struct block *b, int first, int last, const uint8_t *cells, int n_cells, const char *halves,
                         const struct attention *t) {
    const bool is_f16 = !b->has_tile;
    struct addition a = {.values = is_f16 ? (const void *)halves : b->values,
                         .stride = is_f16 ? (int64_t)(t->value_cell / sizeof(uint16_t)) : t->value,
                         .cells = cells,
                         .n_cells = n_cells,
                         .n = t->value};
    for (int query = first; query < last; query += 2) {
        const bool is_pair = last - query >= 2;
        a.larger = b->larger[query] | (is_pair ? b->larger[query + 1] : 0);
        a.weights = b->weights + query * TILE;
        a.scales = b->scales + query * TILE;
        a.sums = b->sums + query * t->value;
        for (int64_t at = summed_in_halves(t, query, is_pair, &a, halves, b); at < t->value; at += STEP) {
            if (is_pair) {
                ADD(2);
            } else {
                ADD(1);
            }
        }
    }
}

/* ---- Tiles of cells. ---- */

/* Bits of the cells that are there for a row; `n` at most TILE. `added`: of those whose mask is not 0. */
AVX2 static uint32_t live_cells(const uint16_t *mask, int n, uint32_t *added) {
    uint32_t live = 0;
    *added = 0;
    if (n == TILE) {
        const __m256i none = _mm256_set1_epi16((int16_t)MINUS_INFINITY), zero = _mm256_setzero_si256();
        const __m256i low = _mm256_loadu_si256((const __m256i *)mask);
        const __m256i high = _mm256_loadu_si256((const __m256i *)(mask + TILE / 2));
        __m256i found = _mm256_packs_epi16(_mm256_cmpeq_epi16(low, none), _mm256_cmpeq_epi16(high, none));
        live = ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(found, 0xd8));
        found = _mm256_packs_epi16(_mm256_cmpeq_epi16(low, zero), _mm256_cmpeq_epi16(high, zero));
        *added = live & ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(found, 0xd8));
        return live;
    }
    for (int i = 0; i < n; i++) {
        live |= (uint32_t)(mask[i] != MINUS_INFINITY) << i;
        *added |= (uint32_t)(mask[i] != MINUS_INFINITY && mask[i] != 0) << i;
    }
    return live;
}

/* f16 to f32. */
AVX2 static void convert(const char *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += LANES) {
        _mm256_store_ps(to + i, load_f16(from + 2 * i));
    }
}

INLINE void ask_for(const char *from, int64_t n) {
    for (int64_t i = 0; i < 2 * n; i += LINE) {
        _mm_prefetch(from + i, _MM_HINT_T0);
    }
}

AVX2 static void add_masks(struct block *b, int query, const uint16_t *mask, const uint8_t *cells, int n_cells) {
    for (int i = 0; i < n_cells; i++) {
        b->weights[query * TILE + i] += _cvtsh_ss(mask[cells[i]]);
    }
}

AVX2 static void take_tile(struct block *b, const struct attention *t, int64_t kv_head, int64_t from, int n) {
    const char *keys = t->keys + kv_head * t->key_head + from * t->key_cell;
    const char *values = t->values + kv_head * t->value_head + from * t->value_cell;
    const uint16_t *mask = (const uint16_t *)(const void *)t->mask + from;
    const int64_t mask_row = t->mask_row / sizeof *mask;
    uint32_t in_use = 0;
    for (int query = 0; query < b->n; query++) {
        if (query > 0 && b->row[query] == b->row[query - 1]) {
            b->live[query] = b->live[query - 1];
            b->added[query] = b->added[query - 1];
        } else {
            b->live[query] = live_cells(mask + b->row[query] * mask_row, n, &b->added[query]);
        }
        in_use |= b->live[query];
    }
    for (uint32_t left = in_use; left; left &= left - 1) {
        const int cell = __builtin_ctz(left);
        if (from + cell + TILE < t->cells) {
            ask_for(keys + (cell + TILE) * t->key_cell, t->key);
            ask_for(values + (cell + TILE) * t->value_cell, t->value);
        }
        if (b->has_tile) {
            convert(keys + cell * t->key_cell, t->key, b->keys + cell * t->key);
            convert(values + cell * t->value_cell, t->value, b->values + cell * t->value);
        }
    }
    for (int first = 0, last; first < b->n; first = last) {
        for (last = first + 1; last < b->n && b->live[last] == b->live[first]; last++) {
        }
        uint8_t cells[TILE];
        int n_cells = 0;
        for (uint32_t left = b->live[first]; left; left &= left - 1) {
            cells[n_cells++] = (uint8_t)__builtin_ctz(left);
        }
        if (n_cells == 0) {
            continue;
        }
        multiply_all(b, first, last, cells, n_cells, keys, t);
        for (int query = first; query < last; query++) {
            if (b->added[query]) {
                add_masks(b, query, mask + b->row[query] * mask_row, cells, n_cells);
            }
            take_exponents(b, query, n_cells);
        }
        add_all(b, first, last, cells, n_cells, values, t);
    }
}

/* ---- Shares of a thread. ---- */

AVX2 static void attend(const struct attention *t, struct block *b, int64_t kv_head, int64_t first, int n) {
    const int64_t group = t->heads / t->kv_heads;
    b->n = n;
    b->has_tile = n > 2;
    for (int query = 0; query < n; query++) {
        const int64_t row = (first + query) / group, head = kv_head * group + (first + query) % group;
        const float *from = (const float *)(const void *)(t->queries + row * t->query_row + head * t->query_head);
        b->row[query] = row;
        b->largest[query] = -INFINITY;
        b->sum[query] = 0.0f;
        for (int64_t i = 0; i < t->key; i += LANES) {
            _mm256_store_ps(b->queries + query * t->key + i, rounded(_mm256_loadu_ps(from + i)));
        }
    }
    memset(b->sums, 0, sizeof(float) * (size_t)(n * t->value));
    for (int64_t from = 0; from < t->cells; from += TILE) {
        take_tile(b, t, kv_head, from, t->cells - from < TILE ? (int)(t->cells - from) : TILE);
    }
    for (int query = 0; query < n; query++) {
        const int64_t head = kv_head * group + (first + query) % group;
        const __m256 scale = _mm256_set1_ps(b->sum[query] == 0.0f ? 0.0f : 1.0f / b->sum[query]);
        float *to = t->result + (b->row[query] * t->heads + head) * t->value;
        for (int64_t i = 0; i < t->value; i += LANES) {
            _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_load_ps(b->sums + query * t->value + i), scale));
        }
    }
}

__attribute__((visibility("default"))) int64_t swarmllm_last_order(void) {
    enum { AVX512_FP16 = 1 << 23 };
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx512f")) {
        return ORDER_256;
    }
    const bool has_halves = __GNUC__ >= 12 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AVX512_FP16) &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512dq");
    return has_halves ? ORDER_HALVES : ORDER_512;
}

size_t swarmllm_attention_bytes(int64_t key, int64_t value) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) {
        return 0;
    }
    return REGISTER + sizeof(float) * (size_t)((QUERIES + TILE) * (key + value) + 2 * QUERIES * TILE);
}

AVX2 void swarmllm_attend(const struct attention *t) {
    const int64_t of_head = t->rows * (t->heads / t->kv_heads), all = of_head * t->kv_heads;
    const int64_t first = all * t->thread / t->n_threads, last = all * (t->thread + 1) / t->n_threads;
    struct block b;
    float *memory = (float *)(((uintptr_t)t->work + REGISTER - 1) / REGISTER * REGISTER);
    memory = laid(memory, (size_t)(QUERIES * t->key), &b.queries);
    memory = laid(memory, (size_t)(QUERIES * t->value), &b.sums);
    memory = laid(memory, QUERIES * TILE, &b.weights);
    memory = laid(memory, QUERIES * TILE, &b.scales);
    memory = laid(memory, (size_t)(TILE * t->key), &b.keys);
    laid(memory, (size_t)(TILE * t->value), &b.values);
    for (int64_t at = first; at < last;) {
        const int64_t kv_head = at / of_head, end = (kv_head + 1) * of_head < last ? (kv_head + 1) * of_head : last;
        const int n = end - at < QUERIES ? (int)(end - at) : QUERIES;
        attend(t, &b, kv_head, at - kv_head * of_head, n);
        at += n;
    }
}
#else
__attribute__((visibility("default"))) int64_t swarmllm_last_order(void) { return ORDER_256; }

size_t swarmllm_attention_bytes(int64_t key, int64_t value) { return 0 * (size_t)(key + value); }

void swarmllm_attend(const struct attention *attention) { (void)attention; }
#endif
