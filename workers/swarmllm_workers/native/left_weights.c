/* Keeps libllama from filling the tensors of a part of a file, which has no weights yet (shared_weights.py).
 *
 * libllama gives each tensor that is to be rearranged what lies in the part's file: zeros, which ggml arranges, into
 * memory that was never used before. shared_weights.py tells the tensor afterwards where its weights are, so those
 * zeros, their time and their memory are saved. libllama calls `ggml_backend_tensor_set` through its symbol table.
 */
#define _GNU_SOURCE
#include <stddef.h>

#include "own_functions.h"

typedef void (*setter)(void *tensor, const void *data, size_t offset, size_t size);

setter swarmllm_tensor_set; /* ggml's own; NULL: nobody has told it yet */

static __thread const char *left_from, *left_to;

/* In this thread, leave tensors as they are whose data lie in [from, to). */
__attribute__((visibility("default"))) void swarmllm_leave(const char *from, const char *to) {
    left_from = from;
    left_to = to;
}

__attribute__((visibility("default"))) void ggml_backend_tensor_set(void *tensor, const void *data, size_t offset,
                                                                     size_t size);

void ggml_backend_tensor_set(void *tensor, const void *data, size_t offset, size_t size) {
    const char *first = data;
    if (left_from <= first && first < left_to) {
        return;
    }
    if (swarmllm_tensor_set == NULL) { /* libllama is in a program that knows nothing of this file */
        swarmllm_tensor_set = (setter)find_own("libggml-base", "ggml_backend_tensor_set", (void *)ggml_backend_tensor_set);
    }
    if (swarmllm_tensor_set != NULL) {
        swarmllm_tensor_set(tensor, data, offset, size);
    }
}
