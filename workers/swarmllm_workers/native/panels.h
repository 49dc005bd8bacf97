/* Products of many columns, with sums of their own: panels.c has them, small_batches.c asks for them. */
#ifndef SWARMLLM_PANELS_H
#define SWARMLLM_PANELS_H
#include <stdbool.h>
#include <stdint.h>

enum { PANEL_COLUMNS_MIN = 16 };
enum { PANELS_NONE, PANELS_AVX2, PANELS_VNNI, PANELS_AMX }; /* what a processor has; it has all before, too */
enum { PANELS_FEW = PANELS_AMX + 1 }; /* with VNNI, any number of columns */

struct panel_product {
    int type; /* of the matrix, as ggml numbers it */
    int unit; /* with which it is computed */
    int64_t m; /* rows of the matrix */
    int64_t n; /* columns; less than PANEL_COLUMNS_MIN with PANELS_FEW only */
    int64_t k; /* blocks of a row */
    const void *a; /* the matrix, `lda` blocks from one row to the next */
    int64_t lda;
    const void *b; /* columns of Q8_K, or of Q8_0, `ldb` blocks from one to the next */
    int64_t ldb;
    float *c; /* [n][ldc] */
    int64_t ldc;
    int thread; /* which share of the rows is computed, */
    int n_threads;
};

/* Of K-quants, in panels of eight rows. */
void swarmllm_panels_avx2(const struct panel_product *product);

/* Of panels [first, end), with blocks of 32. */
void swarmllm_panels_32(const struct panel_product *product, int64_t first, int64_t end);

/* Of Q4_0, with the bits of the former. False, and nothing was computed: not for such a matrix. */
bool swarmllm_panels_few(const struct panel_product *product);

/* False, and nothing was computed: not for this type, or not on this processor. */
bool swarmllm_panel_product(const struct panel_product *product);
#endif
