/* Stands before ggml's tiled matrix product and keeps it for batches that are worth it.
 *
 * libggml-cpu calls `llamafile_sgemm` through its symbol table, so a library that was made global before it was
 * loaded answers instead. "false" means "not mine": ggml then takes the product of each row as it takes that of a
 * single one. Why, and what was measured: small_batches.py. It includes no header of ggml and links to nothing.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef bool (*product)(const void *params, int64_t m, int64_t n, int64_t k, const void *a, int64_t lda, const void *b,
                        int64_t ldb, void *c, int64_t ldc, int a_type, int b_type, int c_type);

product swarmllm_tiled;       /* ggml's own; NULL: there is none to be had */
int64_t swarmllm_rows_max;    /* rows up to which each is computed alone */
int64_t swarmllm_cached_max;  /* bytes of a Q8_0 matrix up to which the tiles are quicker all the same */
int64_t swarmllm_n_asked;     /* that ggml asks here; a count that races, to be compared with 0 */

enum { Q8_0 = 8, Q8_0_BLOCK_BYTES = 34, TILE = 4, STRIP = 8, STRIPS_FROM = 5, STRIPS_TO = 12, CACHE_LINE = 64 };

/* The head of ggml's `struct ggml_compute_params`, which is all that the tiles of Q8_0 look at. */
struct thread {
    int index;
    int count;
};

static void fetch(const char *data, int64_t size) {
    for (int64_t at = 0; at < size; at += CACHE_LINE) {
        __builtin_prefetch(data + at, 0, 2);
    }
}

/* The same tiles over this thread's share of the matrix, eight rows of it at a time, the next eight on their way from
 * memory meanwhile: four rows that are read side by side are more than the processor foresees. */
static void strips(const struct thread *thread, int64_t m, int64_t n, int64_t k, const char *a, int64_t lda, const void *b,
                   int64_t ldb, float *c, int64_t ldc) {
    const struct thread alone = {0, 1};
    const int64_t row = lda * Q8_0_BLOCK_BYTES;
    const int64_t share = ((m + TILE - 1) / TILE + thread->count - 1) / thread->count * TILE;
    const int64_t first = share * thread->index;
    const int64_t end = first + share < m ? first + share : m;
    for (int64_t i = first; i < end; i += STRIP) {
        const int64_t size = end - i < STRIP ? end - i : STRIP;
        const int64_t left = end - i - size;
        fetch(a + (i + size) * row, (left < STRIP ? left : STRIP) * row);
        swarmllm_tiled(&alone, size, n, k, a + i * row, lda, b, ldb, c + i, ldc, Q8_0, Q8_0, 0);
    }
}

__attribute__((visibility("default"))) bool llamafile_sgemm(const void *params, int64_t m, int64_t n, int64_t k,
                                                            const void *a, int64_t lda, const void *b, int64_t ldb,
                                                            void *c, int64_t ldc, int a_type, int b_type, int c_type) {
    const bool is_q8_0 = a_type == Q8_0 && b_type == Q8_0 && c_type == 0;
    const bool is_cached = m * lda * Q8_0_BLOCK_BYTES <= swarmllm_cached_max;
    swarmllm_n_asked = 1;
    if (swarmllm_tiled == NULL) {
        return false;
    }
    if (is_q8_0 && !is_cached && n >= STRIPS_FROM && n <= STRIPS_TO) {
        strips(params, m, n, k, a, lda, b, ldb, c, ldc);
        return true;
    }
    if (n <= swarmllm_rows_max && !(is_q8_0 && is_cached)) {
        return false;
    }
    return swarmllm_tiled(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}
