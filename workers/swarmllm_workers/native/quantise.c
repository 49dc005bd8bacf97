/* Rounds columns to Q8_K with ggml's bits, a register at a time: ggml does so one number after the other.
 *
 * Each block of 256 numbers is multiplied by -127 / (the number that is farthest from zero, the first of several) and
 * rounded to whole numbers: 1.5 * 2^23 is added, and the last bits of what comes are the number. ggml's compiler may make
 * one operation of the product and that sum where it is told to use all of a processor, which moves numbers in the middle
 * between two. So ggml's own is called until bits have been compared (small_batches.py).
 */
#define _GNU_SOURCE
#include "own_functions.h"

#include "blocks.h"

#include <stdbool.h>

typedef void (*quantiser)(const float *numbers, void *blocks, int64_t n);

int64_t swarmllm_quantises; /* 1: ours has ggml's bits */

__attribute__((visibility("default"))) void quantize_row_q8_K_ref(const float *numbers, void *blocks, int64_t n);

static quantiser ggmls;

static void by_ggml(const float *numbers, void *blocks, int64_t n) {
    if (ggmls == NULL) {
        ggmls = (quantiser)find_own("libggml-base", "quantize_row_q8_K_ref", (void *)quantize_row_q8_K_ref);
    }
    if (ggmls != NULL) {
        ggmls(numbers, blocks, n);
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

enum { LANES = 8 };

#define AVX2 __attribute__((target("avx2")))

AVX2 INLINE __m256i rounded(__m256 x, __m256 factor) {
    const __m256 moved = _mm256_add_ps(_mm256_mul_ps(factor, x), _mm256_set1_ps(12582912.0f));
    const __m256i low = _mm256_and_si256(_mm256_castps_si256(moved), _mm256_set1_epi32(0x007fffff));
    const __m256i whole = _mm256_min_epi32(_mm256_sub_epi32(low, _mm256_set1_epi32(0x00400000)), _mm256_set1_epi32(127));
    return _mm256_and_si256(whole, _mm256_set1_epi32(255)); /* the last byte, also of what is too small for one */
}

/* The number that is farthest from zero; 0 where all are 0 or none. */
AVX2 INLINE float farthest(const float *x) {
    const __m256 sizes = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 most = _mm256_setzero_ps();
    for (int i = 0; i < VALUES; i += LANES) { /* what is no number is not larger */
        most = _mm256_max_ps(_mm256_and_ps(_mm256_loadu_ps(x + i), sizes), most);
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    const float size = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    for (int i = 0; i < VALUES; i += LANES) {
        const __m256 here = _mm256_cmp_ps(_mm256_and_ps(_mm256_loadu_ps(x + i), sizes), _mm256_set1_ps(size), _CMP_EQ_OQ);
        const int found = _mm256_movemask_ps(here);
        if (found != 0) {
            return x[i + __builtin_ctz((unsigned)found)];
        }
    }
    return 0.0f;
}

AVX2 static void by_registers(const float *x, struct q8_k *y, int64_t n) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), ones = _mm256_set1_epi8(1);
    for (int64_t block = 0; block < n / VALUES; block++, x += VALUES) {
        const float most = farthest(x);
        if (most == 0.0f) { /* ggml leaves the sums as they are */
            y[block].scale = 0.0f;
            memset(y[block].values, 0, VALUES);
            continue;
        }
        const float factor = -127.0f / most;
        const __m256 factors = _mm256_set1_ps(factor);
        for (int i = 0; i < VALUES; i += 4 * LANES) {
            __m256i w[4];
            for (int j = 0; j < 4; j++) w[j] = rounded(_mm256_loadu_ps(x + i + LANES * j), factors);
            const __m256i both = _mm256_packus_epi16(_mm256_packus_epi32(w[0], w[1]), _mm256_packus_epi32(w[2], w[3]));
            const __m256i bytes = _mm256_permutevar8x32_epi32(both, order);
            _mm256_storeu_si256((__m256i *)(void *)(y[block].values + i), bytes);
            /* Sums of two, of four, and of sixteen. */
            const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(ones, bytes), _mm256_set1_epi16(1));
            const __m256i eights = _mm256_hadd_epi32(fours, fours), all = _mm256_hadd_epi32(eights, eights);
            y[block].sums[i / 16] = (int16_t)_mm256_extract_epi32(all, 0);
            y[block].sums[i / 16 + 1] = (int16_t)_mm256_extract_epi32(all, 4);
        }
        y[block].scale = 1 / factor;
    }
}

static bool is_possible(void) { return __builtin_cpu_supports("avx2"); }
#else
static void by_registers(const float *x, struct q8_k *y, int64_t n) { by_ggml(x, y, n); }

static bool is_possible(void) { return false; }
#endif

void quantize_row_q8_K_ref(const float *numbers, void *blocks, int64_t n) {
    if (swarmllm_quantises) {
        by_registers(numbers, blocks, n);
    } else {
        by_ggml(numbers, blocks, n);
    }
}

/* Whether this processor can do it, and ours makes the same blocks of these numbers: then it does from now on. Once
 * ggml is loaded. */
__attribute__((visibility("default"))) int64_t swarmllm_try_to_quantise(const float *numbers, void *ours, void *theirs,
                                                                        int64_t n) {
    swarmllm_quantises = 0;
    by_ggml(numbers, theirs, n);
    if (ggmls == NULL || !is_possible()) {
        return 0;
    }
    by_registers(numbers, ours, n);
    swarmllm_quantises = memcmp(ours, theirs, sizeof(struct q8_k) * (size_t)(n / VALUES)) == 0;
    return swarmllm_quantises;
}
