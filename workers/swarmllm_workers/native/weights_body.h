/* The functions of weights.c for one kind of processor: TARGET, with LANES numbers in a register, and names that end as
 * NAMED says. Registers are as wide as the processor's: the compiler splits wider ones into single numbers. */
typedef float NAMED(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAMED(ints) __attribute__((vector_size(4 * LANES)));
#define floats NAMED(floats)
#define ints NAMED(ints)
#define QUARTERS (LANES / 4) /* registers of four numbers in one of these */

/* `sums`: of the weights exp(logit / temperature - largest / temperature) of each block of 128 of the `n` logits, the
 * last of which may be shorter. `weights`, where not NULL, gets each of them. */
TARGET static void NAMED(weigh)(const float *logits, size_t n, float largest, float temperature, double *sums,
                                float *weights) {
    const float limit = largest / temperature;
    for (size_t first = 0; first < n; first += BLOCK) {
        const size_t end = n - first < BLOCK ? n : first + BLOCK;
        floats total = {0};
        size_t i = first;
        for (; weights == NULL && i + LANES <= end; i += LANES) { /* nothing by way of memory */
            floats x, weight;
            memcpy(&x, logits + i, sizeof x);
            if (temperature != 1.0f) {
                x /= temperature;
            }
            x -= limit;
            EXP(x, weight);
            total += weight;
        }
        for (; i < end; i += LANES) {
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
        four_floats parts[QUARTERS];
        memcpy(parts, &total, sizeof total);
        four_doubles sum = __builtin_convertvector(parts[0], four_doubles);
        for (size_t part = 1; part < QUARTERS; part++) {
            sum += __builtin_convertvector(parts[part], four_doubles);
        }
        *sums++ = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
}

/* The largest of each block of 128 of the `n` logits, the last of which may be shorter; NaN where one of the block is. */
TARGET static void NAMED(block_maxima)(const float *logits, size_t n, float *maxima) {
    for (size_t first = 0; first < n; first += BLOCK) {
        const size_t end = n - first < BLOCK ? n : first + BLOCK;
        floats best = (floats){0} - __builtin_inff();
        ints is_nan = {0};
        size_t i = first;
        for (size_t line = 0; line < BLOCK; line += LINE) { /* beyond a page the processor does not see by itself */
            __builtin_prefetch(logits + first + AHEAD + line);
        }
        for (; i + LANES <= end; i += LANES) {
            floats x;
            memcpy(&x, logits + i, sizeof x);
            const ints greater = x > best;
            best = (floats)(((ints)x & greater) | ((ints)best & ~greater));
            is_nan |= x != x;
        }
        four_floats of_lanes[QUARTERS];
        four_ints are_nan[QUARTERS];
        memcpy(of_lanes, &best, sizeof best);
        memcpy(are_nan, &is_nan, sizeof is_nan);
        for (size_t part = 1; part < QUARTERS; part++) {
            const four_ints greater = of_lanes[part] > of_lanes[0];
            of_lanes[0] = (four_floats)(((four_ints)of_lanes[part] & greater) | ((four_ints)of_lanes[0] & ~greater));
            are_nan[0] |= are_nan[part];
        }
        float largest = of_lanes[0][0];
        for (size_t lane = 1; lane < 4; lane++) {
            largest = of_lanes[0][lane] > largest ? of_lanes[0][lane] : largest;
        }
        int32_t has_nan = (are_nan[0][0] | are_nan[0][1]) | (are_nan[0][2] | are_nan[0][3]);
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

#undef QUARTERS
#undef floats
#undef ints
#undef LANES
#undef TARGET
#undef NAMED
