/* What sampling needs of every logit, in one pass and without an array in between: the weights exp(logit - largest) of
 * blocks of 128, and the largest logit of each. What candidates.py does with numpy where this file was not built. It
 * includes no header of Python and links to nothing.
 */
#include "weights.h"

#include <string.h>

enum { LINE = 16, AHEAD = 2048 }; /* numbers in a line of the cache; that many further on memory is asked for */

typedef float four_floats __attribute__((vector_size(16)));
typedef int32_t four_ints __attribute__((vector_size(16)));
typedef double four_doubles __attribute__((vector_size(32)));

/* exp(x) for x <= 0, with an error of two units in the last place; 0 where it would be below 2^-125. A macro and
 * no function: a function without the target of its caller would be compiled for the least processor. */
#define EXP(x, result)                                                                                              \
    do {                                                                                                            \
        const floats shifted = (x) * 1.44269504f + 12582912.0f; /* the nearest whole number is in its low bits */   \
        const floats whole = shifted - 12582912.0f;                                                                 \
        const floats r = ((x)-whole * 0.693359375f) - whole * -2.12194440e-4f;                                      \
        floats sum = r * 1.9875691500e-4f + 1.3981999507e-3f;                                                       \
        sum = sum * r + 8.3334519073e-3f;                                                                           \
        sum = sum * r + 4.1665795894e-2f;                                                                           \
        sum = sum * r + 1.6666665459e-1f;                                                                           \
        sum = sum * r + 5.0000001201e-1f;                                                                           \
        sum = sum * r * r + r + 1.0f;                                                                               \
        const ints bits = (ints)sum + ((ints)shifted << 23);                                                        \
        (result) = (floats)(bits & ((x) > -86.0f));                                                                 \
    } while (0)

#if defined(__x86_64__) && defined(__GNUC__)
#define TARGET __attribute__((target("avx512f")))
#define LANES 16
#define NAMED(name) name##_512
#include "weights_body.h"

#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define NAMED(name) name##_256
#include "weights_body.h"
#endif

#define TARGET
#define LANES 4
#define NAMED(name) name##_128
#include "weights_body.h"

/* Bits of the registers that are computed with. */
__attribute__((visibility("default"))) int64_t swarmllm_weights_width(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx512f")) {
        return 512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return 256;
    }
#endif
    return 128;
}

__attribute__((visibility("default"))) void swarmllm_weigh(const float *logits, size_t n, float largest,
                                                           float temperature, double *sums, float *weights) {
    switch (swarmllm_weights_width()) {
#if defined(__x86_64__) && defined(__GNUC__)
    case 512:
        weigh_512(logits, n, largest, temperature, sums, weights);
        return;
    case 256:
        weigh_256(logits, n, largest, temperature, sums, weights);
        return;
#endif
    default:
        weigh_128(logits, n, largest, temperature, sums, weights);
    }
}

__attribute__((visibility("default"))) void swarmllm_block_maxima(const float *logits, size_t n, float *maxima) {
    switch (swarmllm_weights_width()) {
#if defined(__x86_64__) && defined(__GNUC__)
    case 512:
        block_maxima_512(logits, n, maxima);
        return;
    case 256:
        block_maxima_256(logits, n, maxima);
        return;
#endif
    default:
        block_maxima_128(logits, n, maxima);
    }
}
