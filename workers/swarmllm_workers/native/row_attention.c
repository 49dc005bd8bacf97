/* Stands before ggml's fused attention and keeps it from cutting a single row's work into one part per thread.
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

/* ggml's `struct ggml_compute_params`. */
struct params {
    int thread;
    int n_threads;
    size_t work_size;
    void *work;
    void *pool;
    bool is_reference; /* take each row through all cells in order, without parts and tiles */
};

/* The head of ggml's `struct ggml_tensor`. */
struct tensor {
    int type;
    void *buffer;
    int64_t shape[4];
};

enum { ROWS = 2 }; /* the dimension of the result that counts rows of the batch */

typedef void (*attention)(const struct params *params, struct tensor *result);

int64_t swarmllm_n_attended; /* that ggml asks here; a count that races, to be compared with 0 */

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

__attribute__((visibility("default"))) void ggml_compute_forward_flash_attn_ext(const struct params *params,
                                                                                struct tensor *result) {
    struct params own = *params;
    if (ggmls_own == NULL) {
        ggmls_own = find(__builtin_return_address(0));
    }
    swarmllm_n_attended = 1;
    own.is_reference = params->is_reference || result->shape[ROWS] == 1;
    ggmls_own(&own, result);
}
