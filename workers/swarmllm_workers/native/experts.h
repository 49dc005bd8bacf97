/* Products of the matrix of one expert with the columns that chose it: experts.c has them, small_batches.c asks. */
#ifndef SWARMLLM_EXPERTS_H
#define SWARMLLM_EXPERTS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct expert_product {
    int type; /* of the matrix: a K-quant */
    int way;
    int64_t m;           /* rows of the expert's matrix */
    int64_t n;           /* columns that chose it */
    int64_t k;           /* blocks of a row */
    const char *a;       /* the expert's matrix */
    int64_t row_bytes;   /* from one of its rows to the next */
    const char *columns; /* of Q8_K, all that there are: [batch rows][n_slots] */
    int64_t column_bytes;
    int64_t n_slots;       /* columns of a batch row: one for all of its experts, or one for each */
    const int32_t *chosen; /* [n][2]: the number of the expert among those of the batch row, and the batch row */
    char *result;          /* f32 [batch rows][experts of a batch row][m], */
    size_t slot_bytes, batch_bytes; /* from one to the next */
    int thread;            /* which share of the matrix's rows is computed, */
    int n_threads;
};

/* False, and nothing was computed: the type or the length of the rows is not one of those. */
bool swarmllm_expert_product(const struct expert_product *product);
#endif
