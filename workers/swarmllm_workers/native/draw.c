/* Chooses the next token from the logits in one call, as libllama's samplers top_k, top_p, min_p, temp and dist do
 * one after the other. It reads the logits once or twice and needs little memory in between. A step streams the whole
 * model through the caches, so the code and the arrays of many small calls would come from memory again each time.
 *
 * Sums are not rounded as libllama rounds them. Wherever that might choose another token, and for all that is rare
 * (logits that are equal, flat distributions), the answer is NOT_SURE, and sampling.py decides with libllama's own
 * samplers.
 */
#include "weights.h"

#include <float.h>
#include <stdbool.h>

enum { KEPT_MAX = 256, ROOM = 2048, BINS = 4096, NOT_SURE = -1 };
/* Parts of a whole: a border between two tokens, or between kept and not kept, that is nearer than this might be on the
 * other side of it for libllama. NEAR: of sums over all tokens, FEW: of few in f32, LOGIT: of logits themselves. */
#define NEAR 1e-7
#define FEW 1e-5
#define LOGIT 1e-4f
#define BINS_PER_UNIT 128 /* of logits below the largest one */

struct draw {
    float *logits; /* as they were when the call has returned */
    int64_t n;
    float temperature; /* 0, or so small that no number is left of logits: the largest, the first of equals */
    float top_p;       /* 1 and more: all */
    float least;       /* log(min_p), minus infinity: all */
    int32_t top_k;     /* 0: all */
    uint32_t seed;     /* of libllama's generator */
    float *maxima;     /* room for one number for each block */
    double *sums;      /* likewise */
    const int32_t *changed; /* tokens, ascending, that have other logits in this draw */
    float *values;          /* theirs */
    int64_t n_changed;
    float largest;     /* result: of the logits as they are drawn from */
    float largest_unchanged; /* result: of the logits before any was changed */
};

struct candidate {
    float logit;
    int32_t id;
};

/* The first number in [0, 1) that a Mersenne Twister with this seed gives std::uniform_real_distribution<double>. */
static double uniform(uint32_t seed) {
    enum { FAR = 397, N = FAR + 2 };
    uint32_t state[N], bits[2];
    state[0] = seed;
    for (uint32_t i = 1; i < N; i++) {
        state[i] = 1812433253u * (state[i - 1] ^ (state[i - 1] >> 30)) + i;
    }
    for (int i = 0; i < 2; i++) {
        const uint32_t joined = (state[i] & 0x80000000u) | (state[i + 1] & 0x7fffffffu);
        uint32_t y = state[i + FAR] ^ (joined >> 1) ^ (joined & 1 ? 0x9908b0dfu : 0);
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        bits[i] = y ^ (y >> 18);
    }
    const double number = ((double)bits[0] + (double)bits[1] * 4294967296.0) / 18446744073709551616.0;
    return number < 1.0 ? number : 1.0 - 0x1p-53;
}

/* The k-th largest of n >= k >= 1 numbers, by a heap with the smallest of the k largest on top. */
static float kth_largest(const float *values, int64_t n, int k, float *heap) {
    for (int64_t i = 0; i < n; i++) {
        int at;
        if (i < k) {
            for (at = (int)i; at > 0 && heap[(at - 1) / 2] > values[i]; at = (at - 1) / 2) {
                heap[at] = heap[(at - 1) / 2];
            }
        } else if (values[i] <= heap[0]) {
            continue;
        } else {
            at = 0;
            for (int child; (child = 2 * at + 1) < k; at = child) {
                child += child + 1 < k && heap[child + 1] < heap[child];
                if (heap[child] >= values[i]) {
                    break;
                }
                heap[at] = heap[child];
            }
        }
        heap[at] = values[i];
    }
    return heap[0];
}

/* All tokens whose logits are not below `threshold`, in the order of ids; how many, or NOT_SURE where there is no room. */
static int gather(const struct draw *t, float threshold, struct candidate *out) {
    int found = 0;
    for (int64_t first = 0, block = 0; first < t->n; first += BLOCK, block++) {
        if (!(t->maxima[block] >= threshold)) {
            continue;
        }
        if (found > ROOM - BLOCK) {
            return NOT_SURE;
        }
        const int64_t end = t->n - first < BLOCK ? t->n : first + BLOCK;
        for (int64_t i = first; i < end; i++) {
            out[found].logit = t->logits[i];
            out[found].id = (int32_t)i;
            found += t->logits[i] >= threshold;
        }
    }
    return found;
}

/* Of equals the first one. */
static bool is_before(struct candidate a, struct candidate b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

/* The largest first. */
static void sort(struct candidate *of, int n) {
    static const int gaps[] = {701, 301, 132, 57, 23, 10, 4, 1};
    for (size_t g = 0; g < sizeof gaps / sizeof *gaps; g++) {
        for (int i = gaps[g]; i < n; i++) {
            const struct candidate moved = of[i];
            int at = i;
            for (; at >= gaps[g] && is_before(moved, of[at - gaps[g]]); at -= gaps[g]) {
                of[at] = of[at - gaps[g]];
            }
            of[at] = moved;
        }
    }
}

/* The k largest, the largest first. NOT_SURE where top_k is asked for and equal ones are among them and the next one:
 * their order is libllama's. */
static int largest(const struct draw *t, int k, struct candidate *out) {
    float heap[KEPT_MAX];
    const int64_t n_blocks = (t->n + BLOCK - 1) / BLOCK;
    const bool is_small = t->n <= ROOM;
    if (k > KEPT_MAX || k > (is_small ? t->n : n_blocks)) {
        return NOT_SURE;
    }
    const int found = gather(t, is_small ? -FLT_MAX : kth_largest(t->maxima, n_blocks, k, heap), out);
    if (found < k) {
        return NOT_SURE;
    }
    sort(out, found);
    for (int i = 1; t->top_k > 0 && i < found && i <= k; i++) {
        if (out[i].logit == out[i - 1].logit) {
            return NOT_SURE;
        }
    }
    return k;
}

/* How many of n weights, one after the other, have a sum of `wanted` or more; NOT_SURE if all of them have less, or it
 * is nearer to a border than `near`. */
static int reach(const float *weights, int n, double before, double wanted, double near) {
    double sum = before;
    for (int i = 0; i < n; i++) {
        const double lower = sum;
        sum += weights[i];
        if (sum >= wanted) {
            return sum - wanted < near || (lower > 0 && wanted - lower < near) ? NOT_SURE : i + 1;
        }
    }
    return NOT_SURE;
}

/* Of n weights, one after the other, the index that a number in [0, 1) draws. */
static int drawn(const float *weights, int n, double random) {
    double total = 0;
    for (int i = 0; i < n; i++) {
        total += weights[i];
    }
    const int at = reach(weights, n, 0, random * total, FEW * total);
    return at > 0 ? at - 1 : NOT_SURE;
}

/* exp(logit / temperature) of candidates to that of the largest logit. */
static double weigh(const struct candidate *of, int n, float best, float temperature, float *weights) {
    float logits[ROOM];
    double sums[ROOM / BLOCK], total = 0;
    for (int i = 0; i < n; i++) {
        logits[i] = of[i].logit;
    }
    swarmllm_weigh(logits, n, best, temperature, sums, weights);
    for (int i = 0; i < (n + BLOCK - 1) / BLOCK; i++) {
        total += sums[i];
    }
    return total;
}

/* How many of n candidates, the largest first, top_p and min_p keep. `total`: of the weights of all tokens that top_p
 * counts at temperature 1; NOT_SURE where the candidates are too few to tell. */
static int kept(const struct draw *t, const struct candidate *of, int n, const float *weights, double total) {
    if (t->top_p < 1) {
        n = reach(weights, n, 0, t->top_p * total, FEW * total);
    }
    const float limit = t->largest + t->least;
    int left = 1;
    for (; left < n && of[left].logit >= limit; left++) {
    }
    for (int i = 1; i < n; i++) {
        if (of[i].logit - limit < LOGIT && limit - of[i].logit < LOGIT) {
            return NOT_SURE;
        }
    }
    return n < 0 ? NOT_SURE : left;
}

/* Among all, without a list: the block in which the sum of the weights reaches the random number, then the token. */
static int64_t draw_from_all(const struct draw *t, double random) {
    const int64_t n_blocks = (t->n + BLOCK - 1) / BLOCK;
    double total = 0, before = 0;
    swarmllm_weigh(t->logits, t->n, t->largest, t->temperature, t->sums, NULL);
    for (int64_t i = 0; i < n_blocks; i++) {
        total += t->sums[i];
    }
    for (int64_t i = 0; i < n_blocks; i++) {
        if (before + t->sums[i] >= random * total) {
            const int n_here = (int)(t->n - i * BLOCK < BLOCK ? t->n - i * BLOCK : BLOCK);
            float weights[BLOCK];
            double sum;
            swarmllm_weigh(t->logits + i * BLOCK, n_here, t->largest, t->temperature, &sum, weights);
            const int at = reach(weights, n_here, before, random * total, NEAR * total);
            return at > 0 ? i * BLOCK + at - 1 : NOT_SURE;
        }
        before += t->sums[i];
    }
    return NOT_SURE;
}

/* In which of BINS a logit lies, those of the largest ones first. */
static int bin_of(const struct draw *t, float logit) {
    const float at = (t->largest - logit) * BINS_PER_UNIT;
    return at < BINS - 1 ? (int)at : BINS - 1;
}

/* What a bin holds, the largest first; how many, or NOT_SURE where there is no room. */
static int gather_bin(const struct draw *t, int bin, struct candidate *out) {
    int found = 0;
    for (int64_t first = 0, block = 0; first < t->n; first += BLOCK, block++) {
        if (bin_of(t, t->maxima[block]) > bin) {
            continue;
        }
        if (found > ROOM - BLOCK) {
            return NOT_SURE;
        }
        const int64_t end = t->n - first < BLOCK ? t->n : first + BLOCK;
        for (int64_t i = first; i < end; i++) {
            out[found].logit = t->logits[i];
            out[found].id = (int32_t)i;
            found += bin_of(t, t->logits[i]) == bin;
        }
    }
    sort(out, found);
    return found;
}

/* The sum of the weights of each bin up to `last`. */
static void weigh_bins(const struct draw *t, float temperature, int last, double *bins) {
    for (int i = 0; i <= last; i++) {
        bins[i] = 0;
    }
    for (int64_t first = 0; first < t->n; first += BLOCK) {
        const int n_here = (int)(t->n - first < BLOCK ? t->n - first : BLOCK);
        float weights[BLOCK];
        double sum;
        swarmllm_weigh(t->logits + first, n_here, t->largest, temperature, &sum, weights);
        for (int i = 0; i < n_here; i++) {
            const int bin = bin_of(t, t->logits[first + i]);
            if (bin <= last) {
                bins[bin] += weights[i];
            }
        }
    }
}

/* Among the many that top_p keeps of a flat distribution, the largest first, without sorting more than those that are
 * as likely as the last one, and as the one that is drawn. */
static int64_t draw_from_many(const struct draw *t, double total, double random, struct candidate *room, float *weights) {
    double bins[BINS], before = 0, of_kept = 0;
    weigh_bins(t, 1, BINS - 1, bins);
    int last = 0;
    while (last < BINS - 1 && before + bins[last] < t->top_p * total) {
        before += bins[last++];
    }
    const int found = gather_bin(t, last, room);
    if (found <= 0) {
        return NOT_SURE;
    }
    weigh(room, found, t->largest, 1, weights);
    const int n_kept = reach(weights, found, before, t->top_p * total, NEAR * total);
    if (n_kept <= 0) {
        return NOT_SURE;
    }
    if (t->temperature != 1) {
        weigh_bins(t, t->temperature, last, bins);
        weigh(room, n_kept, t->largest, t->temperature, weights);
    }
    for (int i = 0; i < n_kept; i++) {
        of_kept += weights[i];
    }
    bins[last] = of_kept;
    double sum = 0;
    for (int i = 0; i <= last; i++) {
        sum += bins[i];
    }
    before = 0;
    int bin = 0;
    while (bin < last && before + bins[bin] < random * sum) {
        before += bins[bin++];
    }
    int n = n_kept;
    if (bin < last) {
        n = gather_bin(t, bin, room);
        if (n <= 0) {
            return NOT_SURE;
        }
        weigh(room, n, t->largest, t->temperature, weights);
    }
    const int at = reach(weights, n, before, random * sum, NEAR * sum);
    return at > 0 ? room[at - 1].id : NOT_SURE;
}

/* The logits of the changed tokens and `values` change places. */
static void exchange(const struct draw *t) {
    for (int64_t i = 0; i < t->n_changed; i++) {
        const float value = t->values[i];
        t->values[i] = t->logits[t->changed[i]];
        t->logits[t->changed[i]] = value;
    }
}

/* The block with the largest logit, the first of equals, or NOT_SURE where one is NaN or the largest not finite. */
static int64_t best_block(const float *maxima, int64_t n_blocks) {
    int64_t best = 0;
    bool has_nan = false;
    for (int64_t i = 0; i < n_blocks; i++) {
        has_nan = has_nan || maxima[i] != maxima[i];
        best = maxima[i] > maxima[best] ? i : best;
    }
    return has_nan || maxima[best] - maxima[best] != 0 ? NOT_SURE : best;
}

static int64_t draw(struct draw *t, int64_t best) {
    struct candidate candidates[ROOM];
    float weights[ROOM];
    const int64_t n_blocks = (t->n + BLOCK - 1) / BLOCK;
    const float scaled = t->largest / t->temperature;
    if (scaled - scaled != 0 || t->temperature == 0) { /* infinite, or not a number */
        best *= BLOCK;
        while (t->logits[best] != t->largest) {
            best++;
        }
        return best;
    }
    const double random = uniform(t->seed);
    const bool has_least = t->least > -__builtin_inff();
    int n;
    if (t->top_k > 0) {
        n = largest(t, t->top_k, candidates);
        if (n > 0 && (t->top_p < 1 || has_least)) {
            const double total = t->top_p < 1 ? weigh(candidates, n, t->largest, 1, weights) : 0;
            n = kept(t, candidates, n, weights, total);
        }
    } else if (t->top_p < 1) {
        double total = 0;
        swarmllm_weigh(t->logits, t->n, t->largest, 1, t->sums, NULL);
        for (int64_t i = 0; i < n_blocks; i++) {
            total += t->sums[i];
        }
        n = largest(t, t->n < KEPT_MAX / 2 ? (int)t->n : KEPT_MAX / 2, candidates);
        if (n > 0) {
            weigh(candidates, n, t->largest, 1, weights);
            n = kept(t, candidates, n, weights, total);
        }
        if (n < 0 && !has_least) {
            return draw_from_many(t, total, random, candidates, weights);
        }
    } else if (has_least) {
        const float limit = t->largest + t->least;
        n = gather(t, limit - LOGIT, candidates);
        for (int i = 0; i < n; i++) {
            if (candidates[i].logit - limit < LOGIT) {
                return NOT_SURE;
            }
        }
    } else {
        return draw_from_all(t, random);
    }
    if (n < 1) {
        return NOT_SURE;
    }
    weigh(candidates, n, t->largest, t->temperature, weights);
    const int at = drawn(weights, n, random);
    return at < 0 ? NOT_SURE : candidates[at].id;
}

/* The token, or NOT_SURE, also where a logit is NaN or the largest one is not finite. */
__attribute__((visibility("default"))) int64_t swarmllm_draw(struct draw *t) {
    const int64_t n_blocks = (t->n + BLOCK - 1) / BLOCK;
    swarmllm_block_maxima(t->logits, t->n, t->maxima);
    int64_t best = best_block(t->maxima, n_blocks);
    if (best < 0) {
        return NOT_SURE;
    }
    t->largest = t->largest_unchanged = t->maxima[best];
    if (t->n_changed == 0) {
        return draw(t, best);
    }
    exchange(t);
    for (int64_t i = 0, block = -1; i < t->n_changed; i++) {
        if (t->changed[i] / BLOCK != block) {
            block = t->changed[i] / BLOCK;
            const int64_t first = block * BLOCK;
            swarmllm_block_maxima(t->logits + first, t->n - first < BLOCK ? t->n - first : BLOCK, t->maxima + block);
        }
    }
    best = best_block(t->maxima, n_blocks);
    t->largest = best < 0 ? 0 : t->maxima[best];
    const int64_t token = best < 0 ? NOT_SURE : draw(t, best);
    exchange(t);
    return token;
}
