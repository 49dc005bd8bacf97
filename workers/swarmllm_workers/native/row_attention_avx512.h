/* What attention of few rows does otherwise where ggml was compiled for AVX-512: row_attention_avx2.c has the rest.
 *
 * A product of query and key is 64 sums, number i in sum i modulo 64, which are added up in another order. Where ggml was
 * compiled for arithmetic in f16 (AVX512-FP16), whole 128s of the values' sums are multiplied and added in f16, with weights
 * rounded to f16; the numbers after them as on AVX2.
 */
#ifndef SWARMLLM_ROW_ATTENTION_AVX512_H
#define SWARMLLM_ROW_ATTENTION_AVX512_H
#include "row_attention_avx2.h"

#include <immintrin.h>

enum { WIDE = 16, WIDE_STEP = 64, HALVES = 32, HALVES_STEP = 128 };

#define AVX512 __attribute__((target("avx2,fma,f16c,avx512f")))

AVX512 INLINE __m512 load_wide(const bool is_f16, const void *from, int64_t at) {
    return is_f16 ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)((const uint16_t *)from + at)))
                  : _mm512_loadu_ps((const float *)from + at);
}

/* [s0 + s2, s1 + s3] of the four numbers in each half of two registers. */
AVX512 INLINE __m256 far_pairs(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(1, 0, 1, 0)), _mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 2, 3, 2)));
}

/* The sums of eight numbers each, in the order of ggml's reduction of a register. */
AVX512 INLINE __m256 wide_sums_of_eight(const __m256 x[8]) {
    __m256 fours[4];
    UNROLL for (int i = 0; i < 4; i++) { /* of x[i] and x[i + 4] */
        fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20), _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
    return _mm256_hadd_ps(far_pairs(fours[0], fours[1]), far_pairs(fours[2], fours[3]));
}

/* `n_queries` products with each of eight cells. */
AVX512 INLINE void multiply_wide(const int n_queries, const bool is_f16, const float *queries, const void *const keys[8],
                                 int64_t n, float scale, int64_t out_stride, float *out) {
    __m256 parts[3][8];
    for (int cell = 0; cell < 8; cell++) {
        __m512 sums[3][4];
        UNROLL for (int query = 0; query < n_queries; query++) {
            UNROLL for (int i = 0; i < 4; i++) { sums[query][i] = _mm512_setzero_ps(); }
        }
        for (int64_t at = 0; at < n; at += WIDE_STEP) {
            UNROLL for (int i = 0; i < 4; i++) {
                const __m512 key = load_wide(is_f16, keys[cell], at + WIDE * i);
                UNROLL for (int query = 0; query < n_queries; query++) {
                    sums[query][i] =
                        _mm512_fmadd_ps(key, _mm512_loadu_ps(queries + query * n + at + WIDE * i), sums[query][i]);
                }
            }
        }
        UNROLL for (int query = 0; query < n_queries; query++) {
            __m512 *x = sums[query];
            const __m512 all = _mm512_add_ps(_mm512_add_ps(x[0], x[2]), _mm512_add_ps(x[1], x[3]));
            const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
            parts[query][cell] = _mm256_add_ps(_mm512_castps512_ps256(all), high);
        }
    }
    UNROLL for (int query = 0; query < n_queries; query++) {
        _mm256_storeu_ps(out + query * out_stride, _mm256_mul_ps(wide_sums_of_eight(parts[query]), _mm256_set1_ps(scale)));
    }
}

#if __GNUC__ >= 12
#define FP16 __attribute__((target("avx2,fma,f16c,avx512f,avx512fp16,avx512bw,avx512vl,avx512dq")))

/* HALVES_STEP numbers, which all are f16, of what is summed up for a query: a cell's values times its weight are added,
 * after all so far was scaled where the cell is in `larger`. */
FP16 static void add_halves(const uint16_t *values, int64_t stride, const uint8_t *cells, int n_cells, uint32_t larger,
                            const float *weights, const float *scales, float *sums) {
    __m512h x[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const __m256h low = _mm512_cvtxps_ph(_mm512_loadu_ps(sums + HALVES * i));
        const __m256h high = _mm512_cvtxps_ph(_mm512_loadu_ps(sums + HALVES * i + WIDE));
        x[i] = _mm512_castsi512_ph(
            _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_castph_si256(low)), _mm256_castph_si256(high), 1));
    }
    for (int cell = 0; cell < n_cells; cell++) {
        const uint16_t *value = values + cells[cell] * stride;
        if (larger >> cell & 1) {
            const __m512h scale = _mm512_set1_ph((_Float16)scales[cell]);
            UNROLL for (int i = 0; i < 4; i++) { x[i] = _mm512_mul_ph(x[i], scale); }
        }
        const __m512h weight = _mm512_set1_ph((_Float16)weights[cell]);
        UNROLL for (int i = 0; i < 4; i++) { x[i] = _mm512_fmadd_ph(_mm512_loadu_ph(value + HALVES * i), weight, x[i]); }
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const __m512i both = _mm512_castph_si512(x[i]);
        _mm512_storeu_ps(sums + HALVES * i, _mm512_cvtph_ps(_mm512_castsi512_si256(both)));
        _mm512_storeu_ps(sums + HALVES * i + WIDE, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1)));
    }
}
#endif
#endif
