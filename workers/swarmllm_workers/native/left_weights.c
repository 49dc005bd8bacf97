/* Keeps libllama from filling the tensors of a part of a file, which has no weights yet (shared_weights.py).
 *
 * libllama gives each tensor that is to be rearranged what lies in the part's file: zeros, which ggml arranges, into
 * memory that was never used before. shared_weights.py tells the tensor afterwards where its weights are, so those
 * zeros, their time and their memory are saved. libllama calls `ggml_backend_tensor_set` through its symbol table.
 */
#define _GNU_SOURCE
#include <stddef.h>

#ifdef __linux__
#include <dlfcn.h>
#include <link.h>
#include <string.h>
#endif

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

#ifdef __linux__
/* libllama may be loaded by a program that knows nothing of this file, and has it fill tensors all the same. */
static int find_own(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    if (info->dlpi_name == NULL || strstr(info->dlpi_name, "libggml-base") == NULL) {
        return 0;
    }
    void *library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) {
        return 0;
    }
    void *own = dlsym(library, "ggml_backend_tensor_set");
    dlclose(library);
    if (own == NULL || own == (void *)ggml_backend_tensor_set) {
        return 0;
    }
    *(void **)found = own;
    return 1;
}
#endif

void ggml_backend_tensor_set(void *tensor, const void *data, size_t offset, size_t size) {
    const char *first = data;
    if (left_from <= first && first < left_to) {
        return;
    }
#ifdef __linux__
    if (swarmllm_tensor_set == NULL) {
        void *own = NULL;
        dl_iterate_phdr(find_own, &own);
        swarmllm_tensor_set = (setter)own;
    }
#endif
    if (swarmllm_tensor_set != NULL) {
        swarmllm_tensor_set(tensor, data, offset, size);
    }
}
