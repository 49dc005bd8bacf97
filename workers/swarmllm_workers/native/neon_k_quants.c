/* Products of Q4_K, Q5_K, Q6_K and IQ4_XS with a few columns, with NEON: the weights of a block are unpacked once for all
 * columns.
 *
 * Each sum has the bits of `ggml_vec_dot_q4_K_q8_K` and its like on ARM, for one column at a time: what a block makes is
 * one integer, exact in any order, and another one for the minima of Q4_K and Q5_K. It is converted, multiplied with the
 * product of both scales and added by a fused multiply-add, block after block. So the bits are the same with dot products
 * of bytes and without, and the processor alone decides which are taken. Four columns share a register of floats.
 */
#include "k_quants.h"
#include "neon.h"

#if defined(__aarch64__) && defined(__GNUC__)

enum { COLUMNS = 8, FOURS = COLUMNS / 4, BLOCKS_MAX = 128, SHARE = 8, NEAR = 3 << 17 };

INLINE int64_t block_bytes(const int type) {
    return type == Q4_K   ? sizeof(struct q4_k)
           : type == Q5_K ? sizeof(struct q5_k)
           : type == Q6_K ? sizeof(struct q6_k)
                          : sizeof(struct iq4_xs);
}

INLINE int8x16_t of_bits(uint8x16_t bits) { return vreinterpretq_s8_u8(bits); }

/* The lower or the higher four of each byte. */
INLINE uint8x16_t nibble(uint8x16_t bytes, const bool is_high) {
    return is_high ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
}

/* 16 weights of group `g` of Q6_K, 0 to 63. */
INLINE int8x16_t six_bits(const struct q6_k *x, const int g, const int at) {
    const int half = g / 4, quarter = g % 4;
    const uint8x16_t low = nibble(vld1q_u8(x->values + 64 * half + 32 * (quarter % 2) + at), quarter > 1);
    const uint8x16_t high = vld1q_u8(x->high + 32 * half + at);
    const uint8x16_t at_four = quarter == 0   ? vshlq_n_u8(high, 4)
                               : quarter == 1 ? vshlq_n_u8(high, 2)
                               : quarter == 2 ? high
                                              : vshrq_n_u8(high, 2);
    return of_bits(vorrq_u8(low, vandq_u8(at_four, vdupq_n_u8(0x30))));
}

/* Of Q4_K and Q5_K. */
INLINE int8x16_t four_or_five_bits(const int type, const char *block, const int g, const int at) {
    const uint8_t *values = type == Q4_K ? ((const struct q4_k *)(const void *)block)->values
                                         : ((const struct q5_k *)(const void *)block)->values;
    const uint8x16_t low = nibble(vld1q_u8(values + 32 * (g / 2) + at), g % 2);
    if (type == Q4_K) {
        return of_bits(low);
    }
    const uint8x16_t high = vld1q_u8(((const struct q5_k *)(const void *)block)->high + at);
    const uint8x16_t at_four = vshlq_u8(high, vdupq_n_s8((int8_t)(4 - g)));
    return of_bits(vorrq_u8(low, vandq_u8(at_four, vdupq_n_u8(0x10))));
}

/* The 32 weights of group `g`, without their scales. */
INLINE struct bytes_32 group(const int type, const char *block, const int g) {
    if (type == IQ4_XS) {
        const uint8x16_t bytes = vld1q_u8(((const struct iq4_xs *)(const void *)block)->values + 16 * g);
        const int8x16_t table = vld1q_s8(iq4_weights);
        return (struct bytes_32){vqtbl1q_s8(table, nibble(bytes, false)), vqtbl1q_s8(table, nibble(bytes, true))};
    }
    if (type == Q6_K) {
        const struct q6_k *x = (const void *)block;
        return (struct bytes_32){six_bits(x, g, 0), six_bits(x, g, 16)};
    }
    return (struct bytes_32){four_or_five_bits(type, block, g, 0), four_or_five_bits(type, block, g, 16)};
}

/* What all columns have in common: of Q6_K a scale for each half of a group. */
struct scales {
    float block, minimum;
    int16x8_t words[2]; /* Q6_K: those of halves; else: of minima */
    int16_t each[16];
};

INLINE struct scales scales_of(const int type, const char *block) {
    struct scales s;
    s.minimum = 0;
    if (type == Q6_K) {
        const struct q6_k *x = (const void *)block;
        s.block = float_of_half(x->scale);
        s.words[0] = vmovl_s8(vld1_s8(x->scales));
        s.words[1] = vmovl_s8(vld1_s8(x->scales + 8));
        vst1q_s16(s.each, s.words[0]);
        vst1q_s16(s.each + 8, s.words[1]);
    } else if (type == IQ4_XS) {
        const struct iq4_xs *x = (const void *)block;
        s.block = float_of_half(x->scale);
        UNROLL for (int g = 0; g < 8; g++) {
            const int low = x->low_scales[g / 2] >> (4 * (g % 2)) & 15, high = x->high_scales >> (2 * g) & 3;
            s.each[g] = (int16_t)((low | high << 4) - 32);
        }
    } else {
        const struct q4_k *x = (const void *)block; /* Q5_K begins like it */
        uint64_t low, high;
        six_bit_scales(x->scales, &low, &high);
        s.block = float_of_half(x->scale);
        s.minimum = float_of_half(x->minimum);
        s.words[0] = vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(high)));
        vst1q_s16(s.each, vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(low))));
    }
    return s;
}

INLINE int32x4_t add_products(int32x4_t sums, int16x8_t x, int16x8_t y) {
    return vmlal_high_s16(vmlal_s16(sums, vget_low_s16(x), vget_low_s16(y)), x, y);
}

/* Of Q6_K, whose weights are less by 32 than what `group` says: that much of the sums of 16 values. */
INLINE int32x4_t less_32(const struct scales *s, const struct q8_k *y) {
    const int32x4_t sums = add_products(add_products(vdupq_n_s32(0), vld1q_s16(y->sums), s->words[0]),
                                        vld1q_s16(y->sums + 8), s->words[1]);
    return vnegq_s32(vshlq_n_s32(sums, 5));
}

/* Of Q4_K and Q5_K: the minima of groups times the sums of groups. */
INLINE int32x4_t times_minima(const struct scales *s, const struct q8_k *y) {
    const int16x8_t sums = vpaddq_s16(vld1q_s16(y->sums), vld1q_s16(y->sums + 8));
    return add_products(vdupq_n_s32(0), sums, s->words[0]);
}

typedef void (*row_kernel)(const struct k_product *t, const char *row, float *c);

/* The row kernels, once for each way to multiply bytes. */
#define TARGET
#define FOUR four_sums
#define FOUR_OF_16 four_sums_of_16
#define NAME(name) name##_by_sums
#include "neon_k_quants_rows.h"
#undef TARGET
#undef FOUR
#undef FOUR_OF_16
#undef NAME

#define TARGET DOT
#define FOUR four_dots
#define FOUR_OF_16 four_dots_of_16
#define NAME(name) name##_by_dots
#include "neon_k_quants_rows.h"

static int kind_of(int type) { return type >= Q4_K && type <= Q6_K ? type - Q4_K : type == IQ4_XS ? 3 : -1; }

int64_t swarmllm_k_block_bytes(int type) { return kind_of(type) < 0 ? 0 : block_bytes(type); }

bool swarmllm_k_product(const struct k_product *t) {
    const int kind = kind_of(t->type);
    if (kind < 0 || t->k > BLOCKS_MAX) {
        return false;
    }
    const row_kernel *kernels = swarmllm_has_dot() ? rows_by_dots[kind] : rows_by_sums[kind];
    const int64_t row_bytes = t->lda * block_bytes(t->type);
    const int64_t groups = (t->m + SHARE - 1) / SHARE;
    const int64_t first = groups * t->thread / t->n_threads * SHARE;
    const int64_t next = groups * (t->thread + 1) / t->n_threads * SHARE, end = next < t->m ? next : t->m;
    /* Rows stay in the cache until all columns had them. */
    const int64_t n_rows = t->n <= COLUMNS || row_bytes > NEAR / SHARE ? t->m : NEAR / row_bytes;
    for (int64_t from = first; from < end; from += n_rows) {
        const int64_t to = end - from < n_rows ? end : from + n_rows;
        for (int64_t j = 0; j < t->n; j += COLUMNS) {
            struct k_product part = *t;
            const int n = (int)(t->n - j < COLUMNS ? t->n - j : COLUMNS);
            part.b = (const struct q8_k *)t->b + j * t->ldb;
            for (int64_t i = from; i < to; i++) {
                kernels[n - 1](&part, (const char *)t->a + i * row_bytes, t->c + j * t->ldc + i);
            }
        }
    }
    return true;
}
#else
typedef int swarmllm_no_neon_k_quants;
#endif
