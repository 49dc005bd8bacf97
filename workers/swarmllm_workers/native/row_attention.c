/* Stands before ggml's fused attention, computes rows of small batches itself where it is told to, and keeps ggml from
 * cutting a single row's work into one part per thread.
 *
 * libggml-cpu calls `ggml_compute_forward_flash_attn_ext` through its symbol table, so a library that was made global
 * before it was loaded answers instead. Why: row_attention.py. It includes no header of ggml and links to nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ggml_tensor.h"
#include "row_attention_avx2.h"

/* ggml's `struct ggml_compute_params`. */
struct params {
    int thread;
    int n_threads;
    size_t work_size;
    void *work;
    void *pool;
    bool is_reference; /* take each row through all cells in order, without parts and tiles */
};

enum { F32 = 0, F16 = 1, TILED_FROM = 64, SHAPES_MAX = 64 };
enum { ROWS = 2 }; /* the dimension of the result that counts rows of the batch */

/* Attention that ours is taken for: numbers of a key and a value, query heads for each head of keys. */
struct attention_shape {
    int64_t key, value, group;
    int64_t is_ours[2]; /* of a single row; of several */
    int64_t order;      /* of sums */
};

typedef void (*attention)(const struct params *params, struct tensor *result);

int64_t swarmllm_n_attended;            /* that ggml asks here; a count that races, to be compared with 0 */
int64_t swarmllm_n_ours;                /* that ours computed; likewise */
int64_t swarmllm_attention_forced = -1; /* 0: ggml's always, 1 + order: ours where it can be, -1: as the table says */
int64_t swarmllm_n_attention_shapes;    /* of the table, which is written only between two batches */
struct attention_shape swarmllm_attention_shapes[SHAPES_MAX];

static attention ggmls_own; /* a race to set it is one of equals */

/* Of the library that asks: a wheel holds it three times, and another copy than the one in use has empty tables. */
static attention find(const void *asking) {
    Dl_info library;
    void *handle = dladdr(asking, &library) ? dlopen(library.dli_fname, RTLD_NOLOAD | RTLD_NOW) : NULL;
    attention found = handle ? (attention)dlsym(handle, "ggml_compute_forward_flash_attn_ext") : NULL;
    if (found == NULL) {
        abort();
    }
    return found;
}

/* The order of sums; -1: it is ggml's. */
static int chosen_order(int64_t key, int64_t value, int64_t group, int64_t rows) {
    if (swarmllm_attention_forced >= 0) {
        return (int)swarmllm_attention_forced - 1;
    }
    for (int64_t i = 0; i < swarmllm_n_attention_shapes; i++) {
        const struct attention_shape *each = &swarmllm_attention_shapes[i];
        if (each->key == key && each->value == value && each->group == group) {
            return each->is_ours[rows > 1] ? (int)each->order : -1;
        }
    }
    return -1;
}

/* False, and nothing was computed: it is none of ours, or not chosen. All threads of a batch get the same answer. */
static bool attend(const struct params *params, struct tensor *result) {
    if (swarmllm_attention_forced == 0 || (swarmllm_attention_forced < 0 && swarmllm_n_attention_shapes == 0)) {
        return false;
    }
    const struct tensor *query = result->operands[0], *key = result->operands[1], *value = result->operands[2];
    const struct tensor *mask = result->operands[3];
    float settings[3]; /* scale, bias of ALiBi, softcap */
    memcpy(settings, result->settings, sizeof settings);
    if (mask == NULL || result->operands[4] != NULL || settings[1] != 0.0f || settings[2] != 0.0f) {
        return false;
    }
    if (query->type != F32 || key->type != F16 || value->type != F16 || mask->type != F16) {
        return false;
    }
    const int64_t rows = query->shape[1], heads = query->shape[2], kv_heads = key->shape[2];
    const int64_t of_key = key->shape[0], of_value = value->shape[0];
    if (rows >= TILED_FROM || query->shape[3] != 1 || key->shape[3] != 1 || value->shape[3] != 1 || mask->shape[2] != 1 ||
        mask->shape[3] != 1 || value->shape[2] != kv_heads || heads % kv_heads != 0) {
        return false;
    }
    if (of_key % STEP != 0 || of_value % STEP != 0 || of_key > HEAD_MAX || of_value > HEAD_MAX ||
        query->strides[0] != 4 || key->strides[0] != 2 || value->strides[0] != 2 || mask->strides[0] != 2 ||
        result->strides[1] != 4 * (size_t)of_value) {
        return false;
    }
    const size_t needed = swarmllm_attention_bytes(of_key, of_value), each = params->work_size / (size_t)params->n_threads;
    const int order = chosen_order(of_key, of_value, heads / kv_heads, rows);
    if (needed == 0 || each < needed || order < 0 || (order != ORDER_256 && (of_key % 64 != 0 || of_value % 64 != 0))) {
        return false;
    }
    swarmllm_n_ours = 1;
    swarmllm_attend(&(struct attention){
        .rows = rows,
        .heads = heads,
        .kv_heads = kv_heads,
        .cells = key->shape[1],
        .key = of_key,
        .value = of_value,
        .scale = settings[0],
        .order = order,
        .queries = query->data,
        .query_row = query->strides[1],
        .query_head = query->strides[2],
        .keys = key->data,
        .key_cell = key->strides[1],
        .key_head = key->strides[2],
        .values = value->data,
        .value_cell = value->strides[1],
        .value_head = value->strides[2],
        .mask = mask->data,
        .mask_row = mask->strides[1],
        .result = result->data,
        .thread = params->thread,
        .n_threads = params->n_threads,
        .work = (char *)params->work + each * (size_t)params->thread,
    });
    return true;
}

__attribute__((visibility("default"))) void ggml_compute_forward_flash_attn_ext(const struct params *params,
                                                                                struct tensor *result) {
    struct params own = *params;
    swarmllm_n_attended = 1;
    if (attend(params, result)) {
        return;
    }
    if (ggmls_own == NULL) {
        ggmls_own = find(__builtin_return_address(0));
    }
    own.is_reference = params->is_reference || result->shape[ROWS] == 1;
    ggmls_own(&own, result);
}
