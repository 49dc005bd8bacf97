/* Products of the matrices of experts, three-dimensional K-quants, in the place where they lie in the file.
 *
 * ggml sorts the columns of a batch by the expert that they chose and asks for one expert's product after the other.
 * Its own ways unpack the expert's weights again for each column (dot products), or keep a rearranged copy of all
 * matrices. The kernels of k_quants.c unpack them once for up to COLUMNS columns, but want these side by side: they
 * are copied together first, which is little beside a matrix. A single column is computed where it lies.
 */
#include "experts.h"

#include "k_quants.h"

#include <string.h>

enum { COLUMNS = 8, BLOCKS_MAX = 128, SHARE = 8, ROWS = 256 };

static const char *column_of(const struct expert_product *t, int64_t j) {
    const int64_t slot = t->chosen[2 * j] % t->n_slots, row = t->chosen[2 * j + 1];
    return t->columns + (slot + row * t->n_slots) * t->column_bytes;
}

static float *result_of(const struct expert_product *t, int64_t j) {
    return (float *)(void *)(t->result + (size_t)t->chosen[2 * j] * t->slot_bytes +
                             (size_t)t->chosen[2 * j + 1] * t->batch_bytes);
}

__attribute__((noinline)) static void some_columns(const struct expert_product *t, struct k_product part, int64_t first,
                                                   int64_t end, int64_t j, int n) {
    char together[COLUMNS * BLOCKS_MAX * Q8_K_BLOCK];
    float made[COLUMNS * ROWS];
    const size_t n_bytes = (size_t)t->k * Q8_K_BLOCK;
    for (int i = 0; i < n; i++) {
        memcpy(together + (size_t)i * n_bytes, column_of(t, j + i), n_bytes);
    }
    part.n = n;
    part.b = together;
    part.ldb = t->k;
    part.c = made;
    part.ldc = ROWS;
    for (int64_t row = first; row < end; row += ROWS) {
        part.a = t->a + row * t->row_bytes;
        part.m = end - row < ROWS ? end - row : ROWS;
        swarmllm_k_product(&part);
        for (int i = 0; i < n; i++) {
            memcpy(result_of(t, j + i) + row, made + i * ROWS, (size_t)part.m * sizeof(float));
        }
    }
}

bool swarmllm_expert_product(const struct expert_product *t) {
    const int64_t block_bytes = swarmllm_k_block_bytes(t->type);
    if (!block_bytes || t->k > BLOCKS_MAX || t->row_bytes % block_bytes || t->n_slots < 1) {
        return false;
    }
    const int64_t groups = (t->m + SHARE - 1) / SHARE;
    const int64_t first = groups * t->thread / t->n_threads * SHARE;
    const int64_t next = groups * (t->thread + 1) / t->n_threads * SHARE, end = next < t->m ? next : t->m;
    struct k_product part = {t->type, t->way, end - first, 1, t->k, t->a + first * t->row_bytes, t->row_bytes / block_bytes,
                             NULL,    t->k,   NULL,        0, 0,    1};
    for (int64_t j = 0; j < t->n && first < end; j += COLUMNS) {
        if (t->n - j == 1) {
            part.m = end - first;
            part.b = column_of(t, j);
            part.c = result_of(t, j) + first;
            swarmllm_k_product(&part);
        } else {
            some_columns(t, part, first, end, j, (int)(t->n - j < COLUMNS ? t->n - j : COLUMNS));
        }
    }
    return true;
}
