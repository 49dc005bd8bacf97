/* The row kernels of neon_k_quants.c, which includes this with TARGET, FOUR, FOUR_OF_16 and NAME: what they are compiled
 * for, what makes four sums of 32 and of 16 products, and their names. */

TARGET INLINE void NAME(row)(const int type, const int n, const struct k_product *t, const char *row, float *c) {
    const int n_fours = (n + 3) / 4;
    float32x4_t floats[FOURS];
    float each[COLUMNS];
    UNROLL for (int q = 0; q < n_fours; q++) floats[q] = vdupq_n_f32(0);
    for (int64_t l = 0; l < t->k; l++) {
        const char *block = row + l * block_bytes(type);
        const struct q8_k *y = (const struct q8_k *)t->b + l;
        const struct scales s = scales_of(type, block);
        int32x4_t sums[COLUMNS], minima[COLUMNS];
        float32x4_t scales[FOURS];
        UNROLL for (int j = 0; j < 4 * n_fours; j++) {
            const struct q8_k *column = y + (j < n ? j : 0) * t->ldb;
            each[j] = column->scale;
            sums[j] = type == Q6_K && j < n ? less_32(&s, column) : vdupq_n_s32(0);
            minima[j] = (type == Q4_K || type == Q5_K) && j < n ? times_minima(&s, column) : vdupq_n_s32(0);
        }
        UNROLL for (int q = 0; q < n_fours; q++) scales[q] = vld1q_f32(each + 4 * q);
        UNROLL for (int g = 0; g < 8; g++) {
            const struct bytes_32 x = group(type, block, g);
            UNROLL for (int j = 0; j < n; j++) {
                const struct bytes_32 column = load_32(y[j * t->ldb].values + GROUP * g);
                if (type == Q6_K) {
                    sums[j] = vmlaq_n_s32(sums[j], FOUR_OF_16(x.low, column.low), s.each[2 * g]);
                    sums[j] = vmlaq_n_s32(sums[j], FOUR_OF_16(x.high, column.high), s.each[2 * g + 1]);
                } else {
                    sums[j] = vmlaq_n_s32(sums[j], FOUR(x, column), s.each[g]);
                }
            }
        }
        UNROLL for (int q = 0; q < n_fours; q++) {
            const float32x4_t sum = vcvtq_f32_s32(sums_of_columns(sums + 4 * q));
            const float32x4_t both = vmulq_n_f32(scales[q], s.block);
            const float32x4_t less = vcvtq_f32_s32(sums_of_columns(minima + 4 * q));
            const float32x4_t minimum = vmulq_n_f32(scales[q], s.minimum);
            if (type == Q5_K) {
                floats[q] = vaddq_f32(floats[q], vfmaq_f32(vnegq_f32(vmulq_f32(minimum, less)), both, sum));
            } else {
                floats[q] = type == Q4_K ? vfmsq_f32(floats[q], minimum, less) : floats[q];
                floats[q] = vfmaq_f32(floats[q], both, sum);
            }
        }
    }
    UNROLL for (int q = 0; q < n_fours; q++) vst1q_f32(each + 4 * q, floats[q]);
    UNROLL for (int j = 0; j < n; j++) c[j * t->ldc] = each[j];
}

#define ROW(type, n) \
    TARGET static void NAME(row_##type##_##n)(const struct k_product *t, const char *of, float *c) { NAME(row)(type, n, t, of, c); }
#define ROWS(type) ROW(type, 1) ROW(type, 2) ROW(type, 3) ROW(type, 4) ROW(type, 5) ROW(type, 6) ROW(type, 7) ROW(type, 8)
#define EACH(type)                                                                           \
    {NAME(row_##type##_1), NAME(row_##type##_2), NAME(row_##type##_3), NAME(row_##type##_4), \
     NAME(row_##type##_5), NAME(row_##type##_6), NAME(row_##type##_7), NAME(row_##type##_8)}
ROWS(Q4_K) ROWS(Q5_K) ROWS(Q6_K) ROWS(IQ4_XS)
static const row_kernel NAME(rows)[4][COLUMNS] = {EACH(Q4_K), EACH(Q5_K), EACH(Q6_K), EACH(IQ4_XS)};
#undef ROW
#undef ROWS
#undef EACH
