/* What sampling needs of every logit, in one pass and without an array in between: the weights exp(logit - largest) of
 * blocks of 128, and the largest logit of each. What candidates.py does with numpy where this file was not built. It
 * includes no header of Python and links to nothing.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK 128

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* Compiled for several kinds of processor, of which the loader takes the best. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* exp(x) for x <= 0, with an error of two units in the last place; 0 where it would be below 2^-125. As macros and not
 * as functions: a function that is no clone itself would be compiled for the least processor. */
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

/* `sums`: of the weights exp(logit / temperature - largest / temperature) of each block of 128 of the `n` logits, the
 * last of which may be shorter. `weights`, where not NULL, gets each of them. */
__attribute__((visibility("default"))) FOR_EACH_PROCESSOR void swarmllm_weigh(const float *logits, size_t n,
                                                                              float largest, float temperature,
                                                                              double *sums, float *weights) {
    const float limit = largest / temperature;
    for (size_t first = 0; first < n; first += BLOCK) {
        const size_t end = n - first < BLOCK ? n : first + BLOCK;
        floats total = {0};
        for (size_t i = first; i < end; i += LANES) {
            const size_t n_here = end - i < LANES ? end - i : LANES;
            floats x, weight;
            if (n_here == LANES) {
                memcpy(&x, logits + i, sizeof x);
            } else {
                x = (floats){0} - __builtin_inff();
                memcpy(&x, logits + i, n_here * sizeof *logits);
            }
            if (temperature != 1.0f) {
                x /= temperature;
            }
            x -= limit;
            EXP(x, weight);
            total += weight;
            if (weights != NULL) {
                memcpy(weights + i, &weight, n_here * sizeof *weights);
            }
        }
        double sum = 0;
        for (size_t lane = 0; lane < LANES; lane++) {
            sum += total[lane];
        }
        *sums++ = sum;
    }
}

/* The largest of each block of 128 of the `n` logits, the last of which may be shorter. None is NaN. */
__attribute__((visibility("default"))) FOR_EACH_PROCESSOR void swarmllm_block_maxima(const float *logits, size_t n,
                                                                                     float *maxima) {
    for (size_t first = 0; first < n; first += BLOCK) {
        const size_t end = n - first < BLOCK ? n : first + BLOCK;
        floats best = (floats){0} - __builtin_inff();
        size_t i = first;
        for (; i + LANES <= end; i += LANES) {
            floats x;
            memcpy(&x, logits + i, sizeof x);
            const ints greater = x > best;
            best = (floats)(((ints)x & greater) | ((ints)best & ~greater));
        }
        float largest = -__builtin_inff();
        for (size_t lane = 0; lane < LANES; lane++) {
            largest = best[lane] > largest ? best[lane] : largest;
        }
        for (; i < end; i++) {
            largest = logits[i] > largest ? logits[i] : largest;
        }
        *maxima++ = largest;
    }
}
