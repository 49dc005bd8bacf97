/* Rows of fused attention with the bits of ggml's single rows: row_attention_avx2.c has them, row_attention.c asks. */
#ifndef SWARMLLM_ROW_ATTENTION_AVX2_H
#define SWARMLLM_ROW_ATTENTION_AVX2_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { STEP = 32, HEAD_MAX = 256 }; /* numbers of a head: a multiple of STEP, HEAD_MAX at most */
/* The order of sums: as ggml makes them on AVX2, on AVX-512 (multiples of 64 numbers only), or with AVX512-FP16. */
enum { ORDER_256, ORDER_512, ORDER_HALVES };

/* Everything in bytes is the distance from one to the next. */
struct attention {
    int64_t rows;     /* of the batch */
    int64_t heads;    /* of queries */
    int64_t kv_heads; /* a divisor of `heads` */
    int64_t cells;
    int64_t key, value; /* numbers of a key, of a value */
    float scale;
    int order;
    const char *queries; /* f32 */
    size_t query_row, query_head;
    const char *keys; /* f16 */
    size_t key_cell, key_head;
    const char *values; /* f16 */
    size_t value_cell, value_head;
    const char *mask; /* f16 [rows][cells]: -inf, or what is added */
    size_t mask_row;
    float *result; /* [rows][heads][value] */
    int thread;    /* which share of the queries is computed, */
    int n_threads;
    void *work; /* of this thread, with as many bytes as swarmllm_attention_bytes says */
};

/* Work space of each thread; 0: this processor, or this program, has no such kernel. */
size_t swarmllm_attention_bytes(int64_t key, int64_t value);

/* The last order of sums that this processor can make. */
int64_t swarmllm_last_order(void);

/* `key` and `value` are multiples of STEP. */
void swarmllm_attend(const struct attention *attention);
#endif
