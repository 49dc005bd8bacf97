/* Finds the function of ggml's that one of ours stands before. */
#ifndef SWARMLLM_OWN_FUNCTIONS_H
#define SWARMLLM_OWN_FUNCTIONS_H
#include <stddef.h>

#ifdef __linux__
#ifndef _GNU_SOURCE
#error "_GNU_SOURCE has to be defined before the first header"
#endif
#include <dlfcn.h>
#include <link.h>
#include <string.h>

struct own_function {
    const char *library; /* what its file's name contains */
    const char *name;
    void *ours;
    void *found;
};

static int look_for_own(struct dl_phdr_info *info, size_t size, void *wanted) {
    (void)size;
    struct own_function *own = wanted;
    if (info->dlpi_name == NULL || strstr(info->dlpi_name, own->library) == NULL) {
        return 0;
    }
    void *library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) {
        return 0;
    }
    void *found = dlsym(library, own->name);
    dlclose(library);
    if (found == NULL || found == own->ours) {
        return 0;
    }
    own->found = found;
    return 1;
}

/* NULL: no library that is loaded has another than ours. */
static inline void *find_own(const char *library, const char *name, void *ours) {
    struct own_function own = {library, name, ours, NULL};
    dl_iterate_phdr(look_for_own, &own);
    return own.found;
}
#else
static inline void *find_own(const char *library, const char *name, void *ours) {
    (void)library, (void)name, (void)ours;
    return NULL;
}
#endif
#endif
