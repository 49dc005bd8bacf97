/* Keeps ggml from the processor's matrix unit (AMX).
 *
 * Where ggml was compiled for AMX it asks this function for the kind of memory in which it rearranges matrices for that
 * unit. NULL means that it is not to be had, which is what ggml itself answers where the kernel does not permit it.
 * See kernels/amx.py for why.
 */
#include <stddef.h>

__attribute__((visibility("default"))) void *_Z28ggml_backend_amx_buffer_typev(void);

void *_Z28ggml_backend_amx_buffer_typev(void) {
    return NULL;
}
