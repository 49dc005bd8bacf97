/* The row kernels of neon_blocks_32.c, which includes this with TARGET, FOUR and NAME: what they are compiled for, what
 * makes four sums of 32 products, and their names. */

/* Four sums of the products of a block with each of `n` columns. */
TARGET INLINE void NAME(multiply)(const int type, const int n, const struct product_32 *t, const char *block, int64_t l,
                                  int32x4_t *fours) {
    const struct bytes_32 x = weights(type, block);
    const struct q8_0 *y = (const struct q8_0 *)t->b + l;
    UNROLL for (int j = 0; j < n; j++) fours[j] = FOUR(x, load_32(y[j * t->ldb].values));
}

/* The products of both scales, for each column. */
TARGET INLINE void NAME(both_scales)(const int type, const char *block, const float *scales, float32x4_t *both) {
    const float scale = scale_of(type, block);
    both[0] = vmulq_n_f32(vld1q_f32(scales), scale);
    both[1] = vmulq_n_f32(vld1q_f32(scales + 4), scale);
}

TARGET INLINE void NAME(add_block)(const int type, const int n, const struct product_32 *t, const char *block, int64_t l,
                                   const float *scales, float32x4_t *sums) {
    int32x4_t fours[COLUMNS];
    float32x4_t both[COLUMNS / 4];
    float each[COLUMNS];
    NAME(multiply)(type, n, t, block, l, fours);
    NAME(both_scales)(type, block, scales + l * COLUMNS, both);
    vst1q_f32(each, both[0]);
    vst1q_f32(each + 4, both[1]);
    UNROLL for (int j = 0; j < n; j++) sums[j] = vmlaq_n_f32(sums[j], vcvtq_f32_s32(fours[j]), each[j]);
}

TARGET INLINE void NAME(row_of_fours)(const int type, const int n, const struct product_32 *t, const char *blocks,
                                      const float *scales, float *c) {
    float32x4_t even[COLUMNS], odd[COLUMNS];
    int64_t l = 0;
    UNROLL for (int j = 0; j < n; j++) even[j] = odd[j] = vdupq_n_f32(0);
    for (; l + 1 < t->k; l += 2) {
        NAME(add_block)(type, n, t, blocks + l * block_bytes_32(type), l, scales, even);
        NAME(add_block)(type, n, t, blocks + (l + 1) * block_bytes_32(type), l + 1, scales, odd);
    }
    UNROLL for (int j = 0; j < n; j++) c[j * t->ldc] = vaddvq_f32(even[j]) + vaddvq_f32(odd[j]);
    if (l < t->k) {
        const char *block = blocks + l * block_bytes_32(type);
        const float scale = scale_of(type, block);
        int32x4_t fours[COLUMNS];
        NAME(multiply)(type, n, t, block, l, fours);
        UNROLL for (int j = 0; j < n; j++) {
            const float sum = (float)vaddvq_s32(fours[j]), of_column = scales[l * COLUMNS + j];
            c[j * t->ldc] = type == Q4_0 ? __builtin_fmaf(sum * scale, of_column, c[j * t->ldc])
                                         : __builtin_fmaf(sum, scale * of_column, c[j * t->ldc]);
        }
    }
}

/* The sums of a block, as floats, and the products of both scales. */
TARGET INLINE void NAME(sums_of_block)(const int type, const int n, const struct product_32 *t, const char *block, int64_t l,
                                       const float *scales, float32x4_t *sums, float32x4_t *both) {
    int32x4_t fours[COLUMNS];
    NAME(multiply)(type, n, t, block, l, fours);
    NAME(both_scales)(type, block, scales + l * COLUMNS, both);
    UNROLL for (int j = n; j < COLUMNS; j++) fours[j] = vdupq_n_s32(0);
    UNROLL for (int q = 0; q < (n + 3) / 4; q++) sums[q] = vcvtq_f32_s32(sums_of_columns(fours + 4 * q));
}

TARGET INLINE void NAME(row_of_sums)(const int type, const int n, const struct product_32 *t, const char *blocks,
                                     const float *scales, float *c) {
    const int n_fours = (n + 3) / 4;
    float32x4_t all[COLUMNS / 4], first[COLUMNS / 4], second[COLUMNS / 4], both[COLUMNS / 4], others[COLUMNS / 4];
    float each[COLUMNS];
    int64_t l = 0;
    UNROLL for (int q = 0; q < n_fours; q++) all[q] = vdupq_n_f32(0);
    for (; l + 1 < t->k; l += 2) {
        NAME(sums_of_block)(type, n, t, blocks + l * block_bytes_32(type), l, scales, first, both);
        NAME(sums_of_block)(type, n, t, blocks + (l + 1) * block_bytes_32(type), l + 1, scales, second, others);
        UNROLL for (int q = 0; q < n_fours; q++) {
            const float32x4_t two = type == MXFP4 ? vfmaq_f32(vmulq_f32(first[q], both[q]), second[q], others[q])
                                                  : vfmaq_f32(vmulq_f32(second[q], others[q]), first[q], both[q]);
            all[q] = vaddq_f32(all[q], two);
        }
    }
    if (l < t->k) {
        NAME(sums_of_block)(type, n, t, blocks + l * block_bytes_32(type), l, scales, first, both);
        UNROLL for (int q = 0; q < n_fours; q++) all[q] = vfmaq_f32(all[q], first[q], both[q]);
    }
    UNROLL for (int q = 0; q < n_fours; q++) vst1q_f32(each + 4 * q, all[q]);
    UNROLL for (int j = 0; j < n; j++) c[j * t->ldc] = each[j];
}

#define ROW(type, n)                                                                                                     \
    TARGET static void NAME(row_##type##_##n)(const struct product_32 *t, const char *blocks, const float *scales,      \
                                              float *c) {                                                               \
        type == IQ4_NL || type == MXFP4 ? NAME(row_of_sums)(type, n, t, blocks, scales, c)                              \
                                        : NAME(row_of_fours)(type, n, t, blocks, scales, c);                            \
    }
#define ROWS(type) ROW(type, 1) ROW(type, 2) ROW(type, 3) ROW(type, 4) ROW(type, 5) ROW(type, 6) ROW(type, 7) ROW(type, 8)
#define EACH(type)                                                                                                      \
    {NAME(row_##type##_1), NAME(row_##type##_2), NAME(row_##type##_3), NAME(row_##type##_4),                            \
     NAME(row_##type##_5), NAME(row_##type##_6), NAME(row_##type##_7), NAME(row_##type##_8)}
ROWS(Q8_0) ROWS(Q4_0) ROWS(Q5_0) ROWS(IQ4_NL) ROWS(MXFP4)
static const row_kernel NAME(rows)[5][COLUMNS] = {EACH(Q8_0), EACH(Q4_0), EACH(Q5_0), EACH(IQ4_NL), EACH(MXFP4)};
#undef ROW
#undef ROWS
#undef EACH
