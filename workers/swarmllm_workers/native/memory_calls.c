/* Stands before two things that libllama asks ggml for: room for a graph, and cells that are zero.
 *
 * The room: ggml's processor backend takes a further buffer to compute a graph, of which nobody speaks. A product keeps
 * its second factor there in the type of the first. Here the largest graphs come by, and ggml is asked.
 * The cells: libllama has them zeroed when a context is made, which was most of what loading took. Pages that the system
 * has just given are zero; they are asked for anew instead, and filled in later (`swarmllm_next_cleared`).
 *
 * libllama calls these functions through its symbol table, so a library that was made global before it was loaded
 * answers instead. Why: memory_calls.py. It includes no header of ggml and links to nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

enum { CLEARED_MAX = 64, WORTH_IT = 1 << 20 };

struct region {
    void *address;
    size_t size;
};

/* ggml's `struct ggml_cplan`, and room for what another version adds. */
struct plan {
    size_t work_size;
    void *rest[14];
};

typedef struct plan (*planning)(const void *graph, int n_threads, void *pool);
typedef bool (*reserving)(void *scheduler, void *graph);
typedef void (*measuring)(void *scheduler, void *graph, size_t *sizes);
typedef void (*clearing)(void *buffer, uint8_t value);
typedef const char *(*naming)(void *buffer);
typedef void *(*placing)(void *buffer);
typedef size_t (*sizing)(void *buffer);

planning swarmllm_graph_plan; /* ggml's own, in a library that libllama need not be linked with; NULL: nobody has told it */

/* In the thread that makes contexts. */
static __thread int n_threads;
static __thread int64_t work_bytes;

static __thread struct region cleared[CLEARED_MAX];
static __thread int n_cleared;

/* From now on, of graphs that so many threads will compute; 0: look at none. */
__attribute__((visibility("default"))) void swarmllm_watch(int n) {
    n_threads = n;
    work_bytes = -1;
}

/* The most that one of them takes; -1: there was none. */
__attribute__((visibility("default"))) int64_t swarmllm_work_bytes(void) {
    return work_bytes;
}

/* Of the libraries that the one which asks was linked with: a wheel holds each three times. */
static void *find(const void *asking, const char *name) {
    Dl_info library;
    void *handle = dladdr(asking, &library) ? dlopen(library.dli_fname, RTLD_NOLOAD | RTLD_NOW) : NULL;
    return handle ? dlsym(handle, name) : NULL;
}

static void *find_own(const void *asking, const char *name) {
    void *own = find(asking, name);
    if (own == NULL) {
        abort();
    }
    return own;
}

static void look(const void *graph) {
    if (n_threads > 0 && swarmllm_graph_plan != NULL) {
        int64_t bytes = (int64_t)swarmllm_graph_plan(graph, n_threads, NULL).work_size;
        if (bytes > work_bytes) {
            work_bytes = bytes;
        }
    }
}

__attribute__((visibility("default"))) bool ggml_backend_sched_reserve(void *scheduler, void *graph) {
    const void *asking = __builtin_return_address(0);
    look(graph);
    return ((reserving)find_own(asking, "ggml_backend_sched_reserve"))(scheduler, graph);
}

__attribute__((visibility("default"))) void ggml_backend_sched_reserve_size(void *scheduler, void *graph,
                                                                            size_t *sizes) {
    const void *asking = __builtin_return_address(0);
    look(graph);
    ((measuring)find_own(asking, "ggml_backend_sched_reserve_size"))(scheduler, graph, sizes);
}

/* Pages that this thread has had cleared and that nobody has used yet, one run after the other; 0: there are no more. */
__attribute__((visibility("default"))) size_t swarmllm_next_cleared(void **address) {
    if (n_cleared == 0) {
        return 0;
    }
    n_cleared--;
    *address = cleared[n_cleared].address;
    return cleared[n_cleared].size;
}

#ifdef __linux__
/* Zeroes a buffer of the machine's own memory by giving its whole pages back. False: that cannot be done. */
static bool give_back(const void *asking, void *buffer) {
    naming name = (naming)find(asking, "ggml_backend_buffer_name");
    placing place = (placing)find(asking, "ggml_backend_buffer_get_base");
    sizing size = (sizing)find(asking, "ggml_backend_buffer_get_size");
    if (name == NULL || place == NULL || size == NULL || strcmp(name(buffer), "CPU") != 0) {
        return false; /* a driver may have fixed the pages of other buffers */
    }
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), base = (uintptr_t)place(buffer), end = base + size(buffer);
    uintptr_t first = (base + page - 1) / page * page, last = end / page * page;
    if (base == 0 || end - base < WORTH_IT || madvise((void *)first, last - first, MADV_DONTNEED) != 0) {
        return false;
    }
    memset((void *)base, 0, first - base);
    memset((void *)last, 0, end - last);
    if (n_cleared < CLEARED_MAX) {
        cleared[n_cleared++] = (struct region){(void *)first, last - first};
    }
    return true;
}
#endif

__attribute__((visibility("default"))) void ggml_backend_buffer_clear(void *buffer, uint8_t value) {
    const void *asking = __builtin_return_address(0);
#ifdef __linux__
    if (value == 0 && give_back(asking, buffer)) {
        return;
    }
#endif
    ((clearing)find_own(asking, "ggml_backend_buffer_clear"))(buffer, value);
}
