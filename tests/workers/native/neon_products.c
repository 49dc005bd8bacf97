/* Compares products of small_batches.c with ggml's dot products, bit by bit, of random blocks; test_neon.py builds it for
 * ARM, with ggml's arch/arm/quants.c, and runs it.
 *
 * Each line that it writes is the name of a type, of the values of the blocks, and how many products were compared. It
 * returns 1, and writes which sum is another one, where one is.
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "experts.h"
#include "k_quants.h"

enum { F32 = 0, Q4_0 = 2, Q5_0 = 6, Q8_0 = 8, IQ4_NL = 20, MXFP4 = 39, TILES = 1 };
enum { ROWS = 11, COLUMNS = 17, BLOCKS = 6, BLOCK_BYTES = 292, GARBAGE = 0x7fc0dead };

extern int64_t swarmllm_forced, swarmllm_ggml_has_dot, swarmllm_ggml_has_sve;
int64_t swarmllm_last_way(void);
bool swarmllm_has_dot(void);
bool llamafile_sgemm(const void *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b,
                     int64_t ldb, void *c, int64_t ldc, int a_type, int b_type, int c_type);

typedef void vec_dot(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc);
vec_dot ggml_vec_dot_q8_0_q8_0, ggml_vec_dot_q4_0_q8_0, ggml_vec_dot_q5_0_q8_0, ggml_vec_dot_iq4_nl_q8_0,
    ggml_vec_dot_mxfp4_q8_0, ggml_vec_dot_q4_K_q8_K, ggml_vec_dot_q5_K_q8_K, ggml_vec_dot_q6_K_q8_K,
    ggml_vec_dot_iq4_xs_q8_K;

/* What quants.c takes from files that are not needed here. */
int ggml_cpu_get_sve_cnt(void) { return 16; }
float ggml_table_f32_ue4m3[256];

static const struct type {
    const char *name;
    int number, of_columns;
    size_t block_bytes;
    vec_dot *dot;
} types[] = {
    {"Q8_0", Q8_0, Q8_0, sizeof(struct q8_0), ggml_vec_dot_q8_0_q8_0},
    {"Q4_0", Q4_0, Q8_0, sizeof(struct q4_0), ggml_vec_dot_q4_0_q8_0},
    {"Q5_0", Q5_0, Q8_0, sizeof(struct q5_0), ggml_vec_dot_q5_0_q8_0},
    {"IQ4_NL", IQ4_NL, Q8_0, sizeof(struct q4_0), ggml_vec_dot_iq4_nl_q8_0},
    {"MXFP4", MXFP4, Q8_0, sizeof(struct mxfp4), ggml_vec_dot_mxfp4_q8_0},
    {"Q4_K", Q4_K, Q8_K, sizeof(struct q4_k), ggml_vec_dot_q4_K_q8_K},
    {"Q5_K", Q5_K, Q8_K, sizeof(struct q5_k), ggml_vec_dot_q5_K_q8_K},
    {"Q6_K", Q6_K, Q8_K, sizeof(struct q6_k), ggml_vec_dot_q6_K_q8_K},
    {"IQ4_XS", IQ4_XS, Q8_K, sizeof(struct iq4_xs), ggml_vec_dot_iq4_xs_q8_K},
};
static const char *const values[] = {"random", "all-bits-set", "no-bit-set", "largest", "tiny", "huge"};
enum { RANDOM, ALL_SET, NONE_SET, LARGEST, TINY, HUGE };

static uint64_t state = 1;

static uint32_t random_bits(void) { /* splitmix64 */
    uint64_t x = state += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return (uint32_t)(x >> 32);
}

static uint16_t half_of(double value) {
    const __fp16 half = (__fp16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

static uint16_t scale(int kind) {
    const double size = kind == TINY ? 1e-7 : kind == HUGE ? 60000 : 0.01;
    return half_of(size * ((double)random_bits() / 2147483648.0 - 1));
}

static void fill_matrix(const struct type *type, int kind, char *a, int n_blocks) {
    for (int i = 0; i < n_blocks; i++, a += type->block_bytes) {
        for (size_t at = 0; at < type->block_bytes; at++) {
            a[at] = (char)(kind == ALL_SET ? 255 : kind == NONE_SET ? 0 : random_bits());
        }
        const uint16_t both[2] = {scale(kind), scale(kind)};
        if (type->number == MXFP4) { /* the exponent of two */
            a[0] = (char)(kind == TINY ? random_bits() % 4 : kind == HUGE ? 200 + random_bits() % 50 : 100 + random_bits() % 40);
        } else if (type->number == Q6_K) {
            memcpy(a + offsetof(struct q6_k, scale), both, 2);
        } else {
            memcpy(a, both, type->number == Q4_K || type->number == Q5_K ? 4 : 2);
        }
    }
}

static int8_t value(int kind) { return (int8_t)(kind == LARGEST ? 127 : (int)(random_bits() % 255) - 127); }

static void fill_columns(const struct type *type, int kind, char *b, int n_blocks) {
    for (int i = 0; i < n_blocks; i++) {
        const double size = ((double)random_bits() / 2147483648.0 - 1) * (kind == HUGE ? 1e4 : 0.1);
        if (type->of_columns == Q8_0) {
            struct q8_0 *y = (struct q8_0 *)(void *)b + i;
            y->scale = half_of(size);
            for (int at = 0; at < 32; at++) y->values[at] = value(kind);
        } else {
            struct q8_k *y = (struct q8_k *)(void *)b + i;
            y->scale = (float)size;
            memset(y->sums, 0, sizeof y->sums);
            for (int at = 0; at < VALUES; at++) {
                y->values[at] = value(kind);
                y->sums[at / 16] = (int16_t)(y->sums[at / 16] + y->values[at]);
            }
        }
    }
}

static bool is_same(float x, float y) { return memcmp(&x, &y, sizeof x) == 0 || (isnan(x) && isnan(y)); }

static float expected(const struct type *type, int k, const char *row, const char *column) {
    float sum;
    type->dot(k * (type->of_columns == Q8_K ? 256 : 32), &sum, 0, row, 0, column, 0, 1);
    return sum;
}

static size_t column_bytes(const struct type *type) { return type->of_columns == Q8_K ? sizeof(struct q8_k) : sizeof(struct q8_0); }

static bool is_left_to_ggml(const struct type *type) {
    return swarmllm_ggml_has_sve && (type->number == Q8_0 || type->number == Q4_0);
}

static int compare(const struct type *type, int kind, int k, int m, int n, int n_threads) {
    static char a[ROWS * BLOCKS * BLOCK_BYTES] __attribute__((aligned(64))), b[COLUMNS * BLOCKS * BLOCK_BYTES] __attribute__((aligned(64)));
    static float c[COLUMNS * ROWS];
    fill_matrix(type, kind, a, m * k);
    fill_columns(type, kind, b, n * k);
    for (int i = 0; i < n * m; i++) memcpy(c + i, &(uint32_t){GARBAGE}, sizeof *c);
    for (int thread = 0; thread < n_threads; thread++) {
        const int params[2] = {thread, n_threads};
        if (!llamafile_sgemm(params, m, n, k, a, k, b, k, c, m, type->number, type->of_columns, F32)) {
            if (!is_left_to_ggml(type)) {
                printf("%s: a product of %d x %d blocks with %d columns was not computed\n", type->name, m, k, n);
            }
            return !is_left_to_ggml(type);
        }
    }
    if (is_left_to_ggml(type)) {
        return 1;
    }
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < m; i++) {
            const float dot = expected(type, k, a + (size_t)i * k * type->block_bytes, b + (size_t)j * k * column_bytes(type));
            if (!is_same(c[j * m + i], dot)) {
                printf("%s, %s: %d blocks, column %d of %d, row %d: %a, ggml has %a\n", type->name, values[kind], k, j, n, i,
                       c[j * m + i], dot);
                return 1;
            }
        }
    }
    return 0;
}

/* One matrix of an expert with five columns of seven, which two batch rows chose. */
static int compare_experts(const struct type *type) {
    enum { M = 9, K = 3, SLOTS = 2, BATCH = 4, N = 5 };
    static const int32_t chosen[N][2] = {{0, 0}, {1, 0}, {1, 2}, {0, 3}, {1, 3}};
    static char a[M * K * BLOCK_BYTES] __attribute__((aligned(64))), b[BATCH * SLOTS * K * BLOCK_BYTES] __attribute__((aligned(64)));
    static float c[BATCH * SLOTS][M];
    fill_matrix(type, RANDOM, a, M * K);
    fill_columns(type, RANDOM, b, BATCH * SLOTS * K);
    const struct expert_product product = {
        .type = type->number, .m = M, .n = N, .k = K, .a = a, .row_bytes = (int64_t)(K * type->block_bytes), .columns = b,
        .column_bytes = K * Q8_K_BLOCK, .n_slots = SLOTS, .chosen = &chosen[0][0], .result = (char *)c,
        .slot_bytes = sizeof c[0], .batch_bytes = SLOTS * sizeof c[0], .n_threads = 1};
    if (!swarmllm_expert_product(&product)) {
        return 1;
    }
    for (int j = 0; j < N; j++) {
        const int at = chosen[j][1] * SLOTS + chosen[j][0];
        for (int i = 0; i < M; i++) {
            if (!is_same(c[at][i], expected(type, K, a + (size_t)i * K * type->block_bytes, b + (size_t)at * K * Q8_K_BLOCK))) {
                printf("%s: an expert's sum is another one\n", type->name);
                return 1;
            }
        }
    }
    return 0;
}

/* Its arguments, 0 or 1: whether quants.c was compiled for dot products of bytes, and for SVE. */
int main(int n_arguments, char **arguments) {
    swarmllm_ggml_has_dot = n_arguments > 1 && atoi(arguments[1]);
    swarmllm_ggml_has_sve = n_arguments > 2 && atoi(arguments[2]);
    swarmllm_forced = swarmllm_last_way();
    if (swarmllm_forced <= TILES) {
        return 2;
    }
    printf("processor has dot products: %d\n", swarmllm_has_dot());
    int failed = 0;
    for (size_t of = 0; of < sizeof types / sizeof *types; of++) {
        for (int kind = RANDOM; kind <= HUGE; kind++) {
            int n_compared = 0, is_bad = 0;
            for (int n = 1; n <= COLUMNS && !is_bad; n += n < 9 ? 1 : 8) {
                for (int k = 1; k <= BLOCKS && !is_bad; k++) {
                    is_bad = compare(types + of, kind, k, ROWS, n, 1 + n % 3);
                    n_compared += ROWS * n;
                }
            }
            failed |= is_bad;
            printf("%s %s %s %d\n", is_bad ? "unequal" : is_left_to_ggml(types + of) ? "left" : "equal", types[of].name,
                   values[kind], n_compared);
        }
        if (types[of].of_columns == Q8_K) {
            const int is_bad = compare_experts(types + of);
            failed |= is_bad;
            printf("%s %s experts\n", is_bad ? "unequal" : "equal", types[of].name);
        }
    }
    return failed;
}
