/* The functions of weights.c for one kind of processor: TARGET, with LANES numbers in a register, and names that end as
 * NAMED says. Registers are as wide as the processor's: the compiler splits wider ones into single numbers. */
typedef float NAMED(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAMED(ints) __attribute__((vector_size(4 * LANES)));
#define floats NAMED(floats)
#define ints NAMED(ints)

/* `sums`: of the weights exp(logit / temperature - largest / temperature) of each block of 128 of the `n` logits, the
 * last of which may be shorter. `weights`, where not NULL, gets each of them. */
TARGET static void NAMED(weigh)(const float *logits, size_t n, float largest, float temperature, double *sums,
                                float *weights) {
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

/* The largest of each block of 128 of the `n` logits, the last of which may be shorter; NaN where one of the block is. */
TARGET static void NAMED(block_maxima)(const float *logits, size_t n, float *maxima) {
    for (size_t first = 0; first < n; first += BLOCK) {
        const size_t end = n - first < BLOCK ? n : first + BLOCK;
        floats best = (floats){0} - __builtin_inff();
        ints is_nan = {0};
        size_t i = first;
        for (; i + LANES <= end; i += LANES) {
            floats x;
            memcpy(&x, logits + i, sizeof x);
            const ints greater = x > best;
            best = (floats)(((ints)x & greater) | ((ints)best & ~greater));
            is_nan |= x != x;
        }
        float largest = -__builtin_inff();
        int32_t has_nan = 0;
        for (size_t lane = 0; lane < LANES; lane++) {
            largest = best[lane] > largest ? best[lane] : largest;
            has_nan |= is_nan[lane];
        }
        for (; i < end; i++) {
            largest = logits[i] > largest ? logits[i] : largest;
            has_nan |= logits[i] != logits[i];
        }
        if (has_nan) {
            largest = __builtin_nanf("");
        }
        *maxima++ = largest;
    }
}

#undef floats
#undef ints
#undef LANES
#undef TARGET
#undef NAMED
