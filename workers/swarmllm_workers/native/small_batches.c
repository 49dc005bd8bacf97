/* Stands before ggml's tiled matrix products: those of Q8_0, of other types in blocks of 32 and of K-quants it computes
 * itself, of the rest it keeps small batches from the tiles.
 *
 * libggml-cpu calls `llamafile_sgemm` through its symbol table, so a library that was made global before it was
 * loaded answers instead. "false" means "not mine": ggml then takes the product of each row as it takes that of a
 * single one. Why, and what was measured: small_batches.py. It includes no header of ggml and links to nothing.
 *
 * The products of Q8_0 here read the matrix once for all columns. Two of them (BITS_256, BITS_512) take several rows of
 * it at a time and ask memory for the rows after the next ones meanwhile. Two take one row after the other, and ask for
 * what comes next in this order (STREAMED) or leave that to the processor (IN_ORDER). Another way is in pairs_32.c (PAIRS). Each sum is made of the same operations in the same order as
 * `ggml_vec_dot_q8_0_q8_0` makes it on AVX2, so it has the same bits: integer products of a block in eight sums of four,
 * each times the product of both scales, added up by fused multiply-adds, and the eight sums at last.
 *
 * Products of 64 columns and more have sums of their own from panels.c, where that is faster (PANELS and those after it: with
 * AVX2, VNNI or the matrix unit). Those of Q4_0 may have them for any number of columns (panels_few.c).
 *
 * On ARM all products are those of neon_blocks_32.c and neon_k_quants.c (NEON).
 */
#include "blocks.h"
#include "blocks_32.h"
#include "experts.h"
#include "ggml_tensor.h"
#include "k_quants.h"
#include "pairs_32.h"
#include "panels.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef bool (*product)(const void *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b,
                        int64_t ldb, void *c, int64_t ldc, int a_type, int b_type, int c_type);
typedef bool (*k_tiles)(const void *params, const struct tensor *result);
typedef bool (*expert_tiles)(const void *params, struct tensor *result, int64_t expert, int64_t n, const int32_t *chosen,
                             char *scratch);

/* The ways to compute a product: ggml's dot products of each row, ggml's tiles, and ours. All have the same bits, but
 * tiles of K-quants and products from panels, and which is the fastest depends on the processor, so that it is measured
 * (kernel_choice.py). */
enum { DOTS = 0, TILES = 1, BITS_256 = 2, STREAMED = 3, BITS_512 = 4, IN_ORDER = 5, PAIRS = 6, NEON = 7, PANELS = 8 };
#ifdef __aarch64__
enum { HAS_NEON = 1 }; /* and Q8_0 is with the other types in blocks of 32 */
#else
enum { HAS_NEON = 0 };
#endif
enum { F32 = 0, BLOCK = 32, BLOCKS_MAX = 1024, COLUMNS = 8, ROWS_MAX = 8, FAR_ENOUGH = 1 << 14, NEAR = 3 << 17 };
enum { PANEL_BATCH = 64, SHAPES_MAX = 64, CLASSES = 12 };

/* How products with rows of `k` blocks are computed, for each class of numbers of columns (`class_of`). */
struct shape {
    int64_t type; /* of the matrix, as ggml numbers it */
    int64_t k;
    uint8_t ways[16];
};

product swarmllm_tiled;       /* ggml's own; NULL: there is none to be had */
k_tiles swarmllm_k_tiled;     /* ggml's own for K-quants, likewise */
expert_tiles swarmllm_expert_tiled; /* ggml's own for one expert, likewise */
int64_t swarmllm_rows_max;    /* rows up to which each is computed alone */
int64_t swarmllm_n_asked;     /* that ggml asks here; a count that races, to be compared with 0 */
int64_t swarmllm_forced = -1; /* the way of all products; -1: as the table says */
int64_t swarmllm_n_shapes;    /* of the table, which is written only between two batches */
struct shape swarmllm_shapes[SHAPES_MAX];
uint8_t swarmllm_unmeasured[16]; /* the ways of shapes of Q8_0 that are not in the table */
uint8_t swarmllm_unmeasured_k[16]; /* of K-quants */
uint8_t swarmllm_unmeasured_32[16]; /* of the other types in blocks of 32 */

static int class_of(int64_t n) {
    return n <= 8 ? (int)n - 1 : n <= 16 ? 8 : n <= 32 ? 9 : n < PANEL_BATCH ? 10 : CLASSES - 1;
}

static bool is_k_quant(int type) {
    return type == Q4_K || type == Q5_K || type == Q6_K || type == IQ4_XS;
}

static bool is_of_32(int type) {
    return type == Q4_0 || type == Q5_0 || type == IQ4_NL || type == MXFP4 || (HAS_NEON && type == Q8_0);
}

/* As k_quants.h has it: nothing of K-quants is interleaved. */
static int k_way(int way) {
    return (way == PAIRS ? IN_ORDER : way) - BITS_256;
}

static int way_of(int type, int64_t k, int64_t n) {
    if (swarmllm_forced >= 0) {
        return (int)swarmllm_forced;
    }
    for (int64_t i = 0; i < swarmllm_n_shapes; i++) {
        if (swarmllm_shapes[i].k == k && swarmllm_shapes[i].type == type) {
            return swarmllm_shapes[i].ways[class_of(n)];
        }
    }
    return (type == Q8_0         ? swarmllm_unmeasured
            : is_k_quant(type) ? swarmllm_unmeasured_k
                               : swarmllm_unmeasured_32)[class_of(n)];
}

/* From panels, if that is the way; false: nothing was computed. */
static bool is_from_panels(int way, struct panel_product product) {
    product.unit = way - PANELS + PANELS_AVX2;
    return way >= PANELS && swarmllm_panel_product(&product);
}

/* The head of ggml's `struct ggml_compute_params`, which is all that is looked at. */
struct thread {
    int index;
    int count;
    size_t n_bytes;
    const char *columns; /* as ggml has converted them, where they are not of the type of dot products */
};

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

struct __attribute__((packed)) block {
    uint16_t scale;
    int8_t values[BLOCK];
};

/* What one call of a kernel computes: some rows of the matrix times up to COLUMNS columns. */
struct task {
    int64_t k;              /* blocks of a row */
    const struct block *a;  /* rows of the matrix, `lda` blocks from one to the next */
    int64_t lda;
    const struct block *b;  /* columns, each `ldb` blocks from the one before */
    int64_t ldb;
    const float *scales;    /* of the columns: [k][columns] */
    const int8_t *values;   /* of the columns, if there are several: [k][columns][BLOCK], for kernels with AVX2 */
    float *c;               /* [columns][ldc] */
    int64_t ldc;
    int64_t ahead;          /* bytes from here to what is asked of memory */
};

typedef void (*kernel)(const struct task *task);

#define UNROLL _Pragma("GCC unroll 8")
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

AVX2 INLINE float sum_of_eight(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

AVX2 INLINE __m256i values_of(const struct block *block) {
    return _mm256_loadu_si256((const __m256i *)(const void *)block->values);
}

AVX2 INLINE void rows_256(const struct task *t, const int n_rows, const int n_columns) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 sums[4][COLUMNS];
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_columns; j++) sums[r][j] = _mm256_setzero_ps();
    }
    for (int64_t l = 0; l < t->k; l++) {
        UNROLL for (int r = 0; r < n_rows; r++) {
            const struct block *x = t->a + r * t->lda + l;
            _mm_prefetch((const char *)x + t->ahead, _MM_HINT_T0);
            const __m256i signs = values_of(x), size = _mm256_sign_epi8(signs, signs);
            const float scale = _cvtsh_ss(x->scale);
            /* By way of memory: a broadcast from there takes no unit that products need. */
            float both[COLUMNS] __attribute__((aligned(REGISTER)));
            if (n_columns > 1) {
                _mm256_store_ps(both, _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_loadu_ps(t->scales + l * n_columns)));
            } else {
                both[0] = scale * t->scales[l];
            }
            UNROLL for (int j = 0; j < n_columns; j++) {
                const int8_t *column = n_columns > 1 ? t->values + (l * n_columns + j) * BLOCK : t->b[l].values;
                const __m256i y = _mm256_sign_epi8(_mm256_loadu_si256((const __m256i *)(const void *)column), signs);
                const __m256i fours = _mm256_madd_epi16(ones, _mm256_maddubs_epi16(size, y));
                sums[r][j] = _mm256_fmadd_ps(_mm256_broadcast_ss(both + j), _mm256_cvtepi32_ps(fours), sums[r][j]);
            }
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) {
        UNROLL for (int j = 0; j < n_columns; j++) t->c[j * t->ldc + r] = sum_of_eight(sums[r][j]);
    }
}

/* One row of the matrix after the other, as it lies in memory, which is asked for what comes next in this order. */
AVX2 INLINE void rows_streamed(const struct task *t, const int n_rows, const int n_columns) {
    struct task row = *t;
    for (int r = 0; r < n_rows; r++) {
        row.a = t->a + r * t->lda;
        row.c = t->c + r;
        rows_256(&row, 1, n_columns);
    }
}

/* Two rows of the matrix side by side in one register. */
AVX512 INLINE void rows_512(const struct task *t, const int n_pairs, const int n_columns) {
    const __m512i zero = _mm512_setzero_si512();
    __m512 sums[ROWS_MAX / 2][COLUMNS];
    UNROLL for (int p = 0; p < n_pairs; p++) {
        UNROLL for (int j = 0; j < n_columns; j++) sums[p][j] = _mm512_setzero_ps();
    }
    for (int64_t l = 0; l < t->k; l++) {
        UNROLL for (int p = 0; p < n_pairs; p++) {
            const struct block *x = t->a + 2 * p * t->lda + l, *z = x + t->lda;
            _mm_prefetch((const char *)x + t->ahead, _MM_HINT_T0);
            _mm_prefetch((const char *)z + t->ahead, _MM_HINT_T0);
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(values_of(x)), values_of(z), 1);
            const __mmask64 negative = _mm512_movepi8_mask(both);
            const __m512i size = _mm512_abs_epi8(both);
            const __m512 scale = _mm512_cvtph_ps(_mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_set1_epi16((short)x->scale)), _mm_set1_epi16((short)z->scale), 1));
            UNROLL for (int j = 0; j < n_columns; j++) {
                __m512i y = _mm512_broadcast_i64x4(values_of(t->b + j * t->ldb + l));
                y = _mm512_mask_sub_epi8(y, negative, zero, y);
                const __m512 fours = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(zero, size, y));
                const __m512 scales = _mm512_mul_ps(scale, _mm512_set1_ps(t->scales[l * n_columns + j]));
                sums[p][j] = _mm512_fmadd_ps(scales, fours, sums[p][j]);
            }
        }
    }
    UNROLL for (int p = 0; p < n_pairs; p++) {
        UNROLL for (int j = 0; j < n_columns; j++) {
            t->c[j * t->ldc + 2 * p] = sum_of_eight(_mm512_castps512_ps256(sums[p][j]));
            t->c[j * t->ldc + 2 * p + 1] = sum_of_eight(_mm512_extractf32x8_ps(sums[p][j], 1));
        }
    }
}

/* One row of the matrix after the other, as it lies in memory: nothing is asked for ahead, which a processor that sees
 * one stream does better by itself. */
AVX512 INLINE void rows_in_order(const struct task *t, const int n_rows, const int n_columns) {
    const __m256i zero = _mm256_setzero_si256();
    for (int r = 0; r < n_rows; r++) {
        const struct block *row = t->a + r * t->lda;
        __m256 sums[COLUMNS];
        UNROLL for (int j = 0; j < n_columns; j++) sums[j] = _mm256_setzero_ps();
        for (int64_t l = 0; l < t->k; l++) {
            const __m256i signs = values_of(row + l), size = _mm256_abs_epi8(signs);
            const __mmask32 negative = _mm256_movepi8_mask(signs);
            const __m256 scale = _mm256_set1_ps(_cvtsh_ss(row[l].scale));
            UNROLL for (int j = 0; j < n_columns; j++) {
                const __m256i b = values_of(t->b + j * t->ldb + l);
                const __m256i y = _mm256_mask_sub_epi8(b, negative, zero, b);
                const __m256 fours = _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(zero, size, y));
                const __m256 scales = _mm256_mul_ps(scale, _mm256_set1_ps(t->scales[l * n_columns + j]));
                sums[j] = _mm256_fmadd_ps(scales, fours, sums[j]);
            }
        }
        UNROLL for (int j = 0; j < n_columns; j++) t->c[j * t->ldc + r] = sum_of_eight(sums[j]);
    }
}

/* Of each number of columns the kernel for as many rows as leave its sums in registers, and that for the rows that
 * remain. */
#define OF(columns, many)                                                                            \
    AVX2 static void many_256_##columns(const struct task *t) { rows_256(t, columns == 1 ? 4 : many > 4 ? 2 : 1, columns); } \
    AVX2 static void few_256_##columns(const struct task *t) { rows_256(t, 1, columns); }            \
    AVX2 static void streamed_##columns(const struct task *t) { rows_streamed(t, 8, columns); }      \
    AVX512 static void many_512_##columns(const struct task *t) { rows_512(t, many / 2, columns); }  \
    AVX512 static void few_512_##columns(const struct task *t) { rows_512(t, 1, columns); }          \
    AVX512 static void many_order_##columns(const struct task *t) { rows_in_order(t, 8, columns); }    \
    AVX512 static void few_order_##columns(const struct task *t) { rows_in_order(t, 1, columns); }
OF(1, 8) OF(2, 8) OF(3, 8) OF(4, 8) OF(5, 6) OF(6, 6) OF(7, 6) OF(8, 4)
#define EACH(name) name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8

static const struct {
    kernel many[COLUMNS];
    kernel few[COLUMNS];
    int n_many[COLUMNS];
    int n_few;
} kernels[] = {
    {{EACH(many_256_)}, {EACH(few_256_)}, {4, 2, 2, 2, 2, 2, 2, 1}, 1},
    {{EACH(streamed_)}, {EACH(few_256_)}, {8, 8, 8, 8, 8, 8, 8, 8}, 1},
    {{EACH(many_512_)}, {EACH(few_512_)}, {8, 8, 8, 8, 6, 6, 6, 4}, 2},
    {{EACH(many_order_)}, {EACH(few_order_)}, {8, 8, 8, 8, 8, 8, 8, 8}, 1},
};

AVX2 static void scales_of(const struct task *t, int n, float *scales) {
    for (int64_t l = 0; l < t->k; l++) {
        for (int j = 0; j < n; j++) {
            scales[l * n + j] = _cvtsh_ss(t->b[j * t->ldb + l].scale);
        }
    }
}

static void align_columns(const struct task *t, int n, int8_t *values) {
    for (int64_t l = 0; l < t->k; l++) {
        for (int j = 0; j < n; j++, values += BLOCK) memcpy(values, t->b[j * t->ldb + l].values, BLOCK);
    }
}

/* `n` columns, at most COLUMNS, times rows [first, end) of the matrix. */
static void product_of_rows(struct task task, int which, int n, int64_t first, int64_t end) {
    float scales[(BLOCKS_MAX + 1) * COLUMNS]; /* registers of eight are read */
    int8_t values[BLOCKS_MAX * COLUMNS * BLOCK] __attribute__((aligned(REGISTER)));
    const int n_few = kernels[which].n_few;
    const int64_t n_many = kernels[which].n_many[n - 1];
    const int64_t group = n_many * task.lda * (int64_t)sizeof(struct block);
    struct task here = task;
    here.ahead = which == STREAMED - BITS_256 ? STREAM_AHEAD : group < FAR_ENOUGH ? 2 * group : group;
    here.scales = scales;
    scales_of(&task, n, scales);
    if (n > 1 && which <= STREAMED - BITS_256) {
        align_columns(&task, n, values);
        here.values = values;
    }
    int64_t i = first;
    for (; i + n_many <= end; i += n_many) {
        here.a = task.a + i * task.lda;
        here.c = task.c + i;
        kernels[which].many[n - 1](&here);
    }
    for (; i + n_few <= end; i += n_few) {
        here.a = task.a + i * task.lda;
        here.c = task.c + i;
        kernels[which].few[n - 1](&here);
    }
    if (i < end) { /* the last of an odd number: as its own neighbour */
        float both[COLUMNS * 2];
        here.a = task.a + i * task.lda;
        here.lda = 0;
        here.c = both;
        here.ldc = 2;
        kernels[which].few[n - 1](&here);
        for (int j = 0; j < n; j++) {
            task.c[j * task.ldc + i] = both[2 * j];
        }
    }
}

static bool compute(const struct thread *thread, int way, int64_t m, int64_t n, struct task task) {
    if (task.k > BLOCKS_MAX) {
        return false;
    }
    const int64_t groups = (m + ROWS_MAX - 1) / ROWS_MAX;
    const int64_t first = groups * thread->index / thread->count * ROWS_MAX;
    const int64_t next = groups * (thread->index + 1) / thread->count * ROWS_MAX;
    if (n == 1 && way == BITS_512) { /* the same column twice, to the same place: with only one, a fifth slower (measured on Zen 5) */
        task.ldb = task.ldc = 0;
        n = 2;
    }
    const int64_t row_bytes = task.lda * (int64_t)sizeof(struct block), end = next < m ? next : m;
    const int64_t n_rows = n <= COLUMNS || row_bytes > NEAR / ROWS_MAX ? m : NEAR / row_bytes / ROWS_MAX * ROWS_MAX;
    for (int64_t from = first; from < end; from += n_rows) { /* rows stay in the cache until all columns had them */
        for (int64_t j = 0; j < n; j += COLUMNS) {
            struct task part = task;
            part.b += j * task.ldb;
            part.c += j * task.ldc;
            product_of_rows(part, way - BITS_256, (int)(n - j < COLUMNS ? n - j : COLUMNS), from,
                            end - from < n_rows ? end : from + n_rows);
        }
    }
    return true;
}

/* The last way that this processor can go: all before it can be gone, too. (NEON: those of ggml before it.) */
__attribute__((visibility("default"))) int64_t swarmllm_last_way(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) {
        return TILES;
    }
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")
               ? PAIRS
               : STREAMED;
}
#else
struct task {
    int64_t k;
    const void *a;
    int64_t lda;
    const void *b;
    int64_t ldb;
    const float *scales;
    const int8_t *values;
    float *c;
    int64_t ldc;
    int64_t ahead;
};

static bool compute(const struct thread *thread, int way, int64_t m, int64_t n, struct task task) {
    (void)thread, (void)way, (void)m, (void)n, (void)task;
    return false;
}

__attribute__((visibility("default"))) int64_t swarmllm_last_way(void) {
    return HAS_NEON ? NEON : TILES; /* none between TILES and NEON */
}
#endif

__attribute__((visibility("default"))) bool llamafile_sgemm(const void *params, int64_t m, int64_t n, int64_t k,
                                                            const void *a, int64_t lda, const void *b, int64_t ldb,
                                                            void *c, int64_t ldc, int a_type, int b_type, int c_type) {
    swarmllm_n_asked = 1;
    const struct thread *thread = params;
    const struct panel_product panels = {a_type, PANELS_NONE, m, n, k, a, lda, b, ldb, c, ldc, thread->index, thread->count};
    if (!HAS_NEON && a_type == Q8_0 && b_type == Q8_0 && c_type == F32) {
        int way = way_of(Q8_0, k, n);
        if (is_from_panels(way, panels)) {
            return true;
        }
        way = way < PANELS ? way : TILES;
        if (way == DOTS) {
            return false;
        }
        if (way == TILES) {
            return swarmllm_tiled != NULL &&
                   swarmllm_tiled(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
        }
        if (way == PAIRS) {
            return swarmllm_product_pairs_32(&(struct product_32){Q8_0, true, m, n, k, a, lda, b, ldb, c, ldc, thread->index, thread->count});
        }
        if (compute(params, way, m, n, (struct task){k, a, lda, b, ldb, NULL, NULL, c, ldc, 0})) {
            return true;
        }
    }
    if (is_of_32(a_type) && b_type == Q8_0 && c_type == F32) {
        int way = way_of(a_type, k, n);
        if (is_from_panels(way, panels)) {
            return true;
        }
        way = way < PANELS ? way : TILES;
        const struct product_32 product = {a_type, way == STREAMED, m, n, k, a, lda, b, ldb, c, ldc, thread->index, thread->count};
        if (way > TILES && (way == PAIRS ? swarmllm_product_pairs_32 : swarmllm_product_32)(&product)) {
            return true;
        }
        return way == TILES && swarmllm_tiled != NULL &&
               swarmllm_tiled(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
    }
    if (is_k_quant(a_type) && b_type == Q8_K && c_type == F32) {
        const int way = way_of(a_type, k, n);
        if (is_from_panels(way, panels)) {
            return true;
        }
        return way > TILES && way < PANELS && swarmllm_k_product(&(struct k_product){a_type, k_way(way), m, n, k, a, lda, b, ldb, c, ldc,
                                                                     thread->index, thread->count});
    }
    return n > swarmllm_rows_max && swarmllm_tiled != NULL &&
           swarmllm_tiled(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}

/* ggml asks here before it asks `llamafile_sgemm`; false: then it does, with columns of Q8_K. */
__attribute__((visibility("default"))) bool ggml_compute_forward_mul_mat_tiled(const void *params,
                                                                               const struct tensor *result) {
    const struct tensor *matrix = result->operands[0], *columns = result->operands[1];
    if (is_k_quant(matrix->type) && way_of(matrix->type, matrix->shape[0] / 256, columns->shape[1]) != TILES) {
        return false;
    }
    return swarmllm_k_tiled != NULL && swarmllm_k_tiled(params, result);
}

/* ggml asks here for each expert that `n` columns of a batch chose, in every thread; false: then it takes dot products. */
__attribute__((visibility("default"))) bool ggml_compute_forward_mul_mat_id_tiled(const void *params, struct tensor *result,
                                                                                  int64_t expert, int64_t n,
                                                                                  const int32_t *chosen, char *scratch) {
    const struct tensor *matrix = result->operands[0], *columns = result->operands[1];
    const int64_t k = matrix->shape[0] / 256;
    int way = is_k_quant(matrix->type) ? way_of(matrix->type, k, n) : TILES;
    if (way >= PANELS) { /* not for experts: as in a smaller batch */
        way = swarmllm_forced < 0 ? way_of(matrix->type, k, PANEL_BATCH - 1) : DOTS;
    }
    if (way == TILES) {
        return swarmllm_expert_tiled != NULL && swarmllm_expert_tiled(params, result, expert, n, chosen, scratch);
    }
    const struct thread *thread = params;
    const struct expert_product product = {
        .type = matrix->type,
        .way = k_way(way),
        .m = matrix->shape[1],
        .n = n,
        .k = k,
        .a = (const char *)matrix->data + (size_t)expert * matrix->strides[2],
        .row_bytes = (int64_t)matrix->strides[1],
        .columns = thread->columns,
        .column_bytes = k * Q8_K_BLOCK,
        .n_slots = columns->shape[1],
        .chosen = chosen,
        .result = result->data,
        .slot_bytes = result->strides[1],
        .batch_bytes = result->strides[2],
        .thread = thread->index,
        .n_threads = thread->count,
    };
    return way != DOTS && columns->type == F32 && swarmllm_expert_product(&product);
}
