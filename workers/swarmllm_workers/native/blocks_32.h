/* Products of types in blocks of 32 numbers, but Q8_0's on x86, with the bits of ggml's dot products: blocks_32.c and
 * neon_blocks_32.c have them, small_batches.c asks for them. */
#ifndef SWARMLLM_BLOCKS_32_H
#define SWARMLLM_BLOCKS_32_H
#include "blocks.h"

#include <stdbool.h>
#include <stdint.h>

enum { Q4_0 = 2, Q5_0 = 6, Q8_0 = 8, IQ4_NL = 20, MXFP4 = 39 }; /* as ggml numbers them; Q8_0 with NEON only */

INLINE int64_t block_bytes_32(const int type) {
    return type == Q8_0    ? sizeof(struct q8_0)
           : type == Q5_0  ? sizeof(struct q5_0)
           : type == MXFP4 ? sizeof(struct mxfp4)
                           : sizeof(struct q4_0);
}

struct product_32 {
    int type;      /* of the matrix */
    bool asks;     /* memory for what comes next */
    int64_t m;     /* rows of the matrix */
    int64_t n;     /* columns */
    int64_t k;     /* blocks of a row */
    const void *a; /* the matrix, `lda` blocks from one row to the next */
    int64_t lda;
    const void *b; /* columns of Q8_0, `ldb` blocks from one to the next */
    int64_t ldb;
    float *c; /* [n][ldc] */
    int64_t ldc;
    int thread; /* which share of the rows is computed, */
    int n_threads;
};

/* False, and nothing was computed: the type or the length of the rows is not one of those. */
bool swarmllm_product_32(const struct product_32 *product);
#endif
