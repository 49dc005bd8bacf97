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

enum { Q8_0 = 8, Q8_0_BLOCK_BYTES = 34 };

__attribute__((visibility("default"))) bool llamafile_sgemm(const void *params, int64_t m, int64_t n, int64_t k,
                                                            const void *a, int64_t lda, const void *b, int64_t ldb,
                                                            void *c, int64_t ldc, int a_type, int b_type, int c_type) {
    swarmllm_n_asked = 1;
    if (swarmllm_tiled == NULL) {
        return false;
    }
    if (n <= swarmllm_rows_max && !(a_type == Q8_0 && b_type == Q8_0 && m * lda * Q8_0_BLOCK_BYTES <= swarmllm_cached_max)) {
        return false;
    }
    return swarmllm_tiled(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}
