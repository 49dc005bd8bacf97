/* What products with NEON share: neon_blocks_32.c and neon_k_quants.c include it.
 *
 * Each row kernel is compiled twice: for every 64-bit ARM processor, and for those with dot products of bytes
 * (`has_dot`, Armv8.2). Both make four sums of 32 products, but of other products: `vdotq_s32` adds up four neighbours,
 * ggml's substitute for it (`ggml_vdotq_s32`) two neighbours and the two that are eight further. Where these sums become
 * floats one by one, both have other bits.
 */
#ifndef SWARMLLM_NEON_H
#define SWARMLLM_NEON_H
#if defined(__aarch64__) && defined(__GNUC__)
#include "blocks.h"

#include <arm_neon.h>
#include <stdbool.h>

#define UNROLL _Pragma("GCC unroll 8")
#ifdef __clang__
#define DOT __attribute__((target("dotprod")))
#else
#define DOT __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

/* Whether the processor has dot products of bytes. */
bool swarmllm_has_dot(void);

/* 32 weights, or 32 values of a column. */
struct bytes_32 {
    int8x16_t low, high;
};

INLINE struct bytes_32 load_32(const int8_t *from) { return (struct bytes_32){vld1q_s8(from), vld1q_s8(from + 16)}; }

/* Half of the products, two of each of the eight sums; no weight and value of a column make more than 2^14. */
INLINE int16x8_t eight_sums(int8x16_t x, int8x16_t y) {
    return vmlal_high_s8(vmull_s8(vget_low_s8(x), vget_low_s8(y)), x, y);
}

/* Four sums of eight products each. */
INLINE int32x4_t four_sums(struct bytes_32 x, struct bytes_32 y) {
    return vpadalq_s16(vpaddlq_s16(eight_sums(x.low, y.low)), eight_sums(x.high, y.high));
}

INLINE int32x4_t four_sums_of_16(int8x16_t x, int8x16_t y) { return vpaddlq_s16(eight_sums(x, y)); }

DOT INLINE int32x4_t four_dots(struct bytes_32 x, struct bytes_32 y) {
    return vdotq_s32(vdotq_s32(vdupq_n_s32(0), x.low, y.low), x.high, y.high);
}

DOT INLINE int32x4_t four_dots_of_16(int8x16_t x, int8x16_t y) { return vdotq_s32(vdupq_n_s32(0), x, y); }

/* The sum of each of four columns. */
INLINE int32x4_t sums_of_columns(const int32x4_t *fours) {
    return vpaddq_s32(vpaddq_s32(fours[0], fours[1]), vpaddq_s32(fours[2], fours[3]));
}

INLINE float float_of_half(uint16_t bits) {
    __fp16 half;
    memcpy(&half, &bits, sizeof half);
    return (float)half;
}
#endif
#endif
