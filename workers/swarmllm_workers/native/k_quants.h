/* Products of K-quants and IQ4_XS with the bits of ggml's dot products: k_quants.c has them, small_batches.c asks for them. */
#ifndef SWARMLLM_K_QUANTS_H
#define SWARMLLM_K_QUANTS_H
#include <stdbool.h>
#include <stdint.h>

enum { Q4_K = 12, Q5_K = 13, Q6_K = 14, Q8_K = 15, IQ4_XS = 23 }; /* as ggml numbers them */
enum { Q8_K_BLOCK = 292 };                           /* bytes */

enum { K_AVX2, K_STREAMED, K_AHEAD, K_IN_ORDER }; /* the last two with AVX-512 and VNNI */

struct k_product {
    int type;      /* of the matrix */
    int way;
    int64_t m;     /* rows of the matrix */
    int64_t n;     /* columns */
    int64_t k;     /* blocks of a row */
    const void *a; /* the matrix, `lda` blocks from one row to the next */
    int64_t lda;
    const void *b; /* columns of Q8_K, `ldb` blocks from one to the next */
    int64_t ldb;
    float *c; /* [n][ldc] */
    int64_t ldc;
    int thread; /* which share of the rows is computed, */
    int n_threads;
};

/* False, and nothing was computed: the type or the length of the rows is not one of those. */
bool swarmllm_k_product(const struct k_product *product);

/* Of a type; 0: there are no products of it here. */
int64_t swarmllm_k_block_bytes(int type);
#endif
