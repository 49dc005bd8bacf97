/* Products of Q8_0, Q4_0, Q5_0, IQ4_NL and MXFP4 with a few columns, with NEON: a block of weights is unpacked once for
 * all columns.
 *
 * Each sum has the bits of `ggml_vec_dot_q8_0_q8_0` and its like on ARM without SVE, for one column at a time. Of Q8_0,
 * Q4_0 and Q5_0 the products of a block make four sums, exact in integers, each of which is converted, multiplied with
 * the product of both scales and added by a fused multiply-add; even and odd blocks have four floats each. Of IQ4_NL and
 * MXFP4 the products of a block make one sum, and those of two blocks are added up before they are added to the rest. The
 * last one of an odd number of blocks is added to the sum at the end.
 *
 * What a compiler makes of a product and a sum decides the bits, too: `vmlaq_n_f32` is one operation with some and two
 * with others, so it stands here as ggml has it, and of two products that are added up GCC 12 fuses the first of IQ4_NL
 * and the second of MXFP4. Where libllama was compiled otherwise, kernel_tuning.py finds it and leaves these products to
 * ggml. Where ggml multiplies two columns at once (i8mm), it has other bits than with one, and these are those of one.
 */
#include "neon_blocks_32.h"

#include "blocks_32.h"
#include "neon.h"

#if defined(__aarch64__) && defined(__GNUC__)

enum { COLUMNS = 8, BLOCKS_MAX = 1024, SHARE = 8, NEAR = 3 << 17 };

int64_t swarmllm_ggml_has_dot, swarmllm_ggml_has_sve;

INLINE struct bytes_32 nibbles(const uint8_t *packed) {
    const uint8x16_t bytes = vld1q_u8(packed);
    return (struct bytes_32){vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4))};
}

INLINE struct bytes_32 looked_up(const int8_t *table, struct bytes_32 at) {
    const int8x16_t values = vld1q_s8(table);
    return (struct bytes_32){vqtbl1q_s8(values, vreinterpretq_u8_s8(at.low)), vqtbl1q_s8(values, vreinterpretq_u8_s8(at.high))};
}

/* 16 weights of five bits, less 16: from the lower four and, in two bytes, the highest of each. */
INLINE int8x16_t five_bits(int8x16_t low, uint32_t high) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    const uint8x16_t bytes = vcombine_u8(vdup_n_u8((uint8_t)high), vdup_n_u8((uint8_t)(high >> 8)));
    const uint8x16_t minus = vbicq_u8(vdupq_n_u8(0xf0), vtstq_u8(bytes, bit));
    return vorrq_s8(low, vreinterpretq_s8_u8(minus));
}

/* The 32 weights of a block, without its scale. */
INLINE struct bytes_32 weights(const int type, const char *block) {
    if (type == Q8_0) {
        return load_32(((const struct q8_0 *)(const void *)block)->values);
    }
    if (type == Q5_0) {
        const struct q5_0 *x = (const void *)block;
        const struct bytes_32 four = nibbles(x->values);
        return (struct bytes_32){five_bits(four.low, x->high), five_bits(four.high, x->high >> 16)};
    }
    if (type == MXFP4) {
        return looked_up(fp4, nibbles(((const struct mxfp4 *)(const void *)block)->values));
    }
    const struct bytes_32 four = nibbles(((const struct q4_0 *)(const void *)block)->values);
    const int8x16_t eight = vdupq_n_s8(8);
    return type == IQ4_NL ? looked_up(iq4_weights, four)
                          : (struct bytes_32){vsubq_s8(four.low, eight), vsubq_s8(four.high, eight)};
}

INLINE float scale_of(const int type, const char *block) {
    if (type == MXFP4) { /* half of two to the power of exponent - 127 */
        const uint32_t exponent = ((const struct mxfp4 *)(const void *)block)->exponent;
        const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        return scale;
    }
    uint16_t scale;
    memcpy(&scale, block, sizeof scale);
    return float_of_half(scale);
}

typedef void (*row_kernel)(const struct product_32 *t, const char *blocks, const float *scales, float *c);

/* The row kernels, once for each way to multiply bytes. */
#define TARGET
#define FOUR four_sums
#define NAME(name) name##_by_sums
#include "neon_blocks_32_rows.h"
#undef TARGET
#undef FOUR
#undef NAME

#define TARGET DOT
#define FOUR four_dots
#define NAME(name) name##_by_dots
#include "neon_blocks_32_rows.h"

/* Whether `vmlaq_n_f32` was compiled to one operation: 1 + 2^-12 squared is a little more than what a float holds. */
__attribute__((visibility("default"))) int64_t swarmllm_joins_products(void) {
    const volatile float x = 1 + 0x1p-12f;
    return vgetq_lane_f32(vmlaq_n_f32(vdupq_n_f32(-(1 + 0x1p-11f)), vdupq_n_f32(x), x), 0) != 0;
}

/* [k][COLUMNS]; 0 for columns that are not there. */
static void scales_of(const struct product_32 *t, int n, float *scales) {
    for (int64_t l = 0; l < t->k; l++) {
        for (int j = 0; j < COLUMNS; j++) {
            scales[l * COLUMNS + j] = j < n ? float_of_half(((const struct q8_0 *)t->b)[j * t->ldb + l].scale) : 0;
        }
    }
}

static int kind_of(int type) {
    return type == Q8_0 ? 0 : type == Q4_0 ? 1 : type == Q5_0 ? 2 : type == IQ4_NL ? 3 : type == MXFP4 ? 4 : -1;
}

bool swarmllm_product_32(const struct product_32 *t) {
    const int kind = kind_of(t->type);
    if (kind < 0 || t->k > BLOCKS_MAX || (swarmllm_ggml_has_sve && (t->type == Q8_0 || t->type == Q4_0))) {
        return false;
    }
    const row_kernel *kernels = swarmllm_ggml_has_dot && swarmllm_has_dot() ? rows_by_dots[kind] : rows_by_sums[kind];
    float scales[BLOCKS_MAX * COLUMNS];
    const int64_t row_bytes = t->lda * block_bytes_32(t->type);
    const int64_t groups = (t->m + SHARE - 1) / SHARE;
    const int64_t first = groups * t->thread / t->n_threads * SHARE;
    const int64_t next = groups * (t->thread + 1) / t->n_threads * SHARE, end = next < t->m ? next : t->m;
    /* Rows stay in the cache until all columns had them. */
    const int64_t n_rows = t->n <= COLUMNS || row_bytes > NEAR / SHARE ? t->m : NEAR / row_bytes;
    for (int64_t from = first; from < end; from += n_rows) {
        const int64_t to = end - from < n_rows ? end : from + n_rows;
        for (int64_t j = 0; j < t->n; j += COLUMNS) {
            struct product_32 part = *t;
            const int n = (int)(t->n - j < COLUMNS ? t->n - j : COLUMNS);
            part.b = (const struct q8_0 *)t->b + j * t->ldb;
            scales_of(&part, n, scales);
            for (int64_t i = from; i < to; i++) {
                kernels[n - 1](&part, (const char *)t->a + i * row_bytes, scales, t->c + j * t->ldc + i);
            }
        }
    }
    return true;
}
#else
typedef int swarmllm_no_neon_blocks_32;
#endif
