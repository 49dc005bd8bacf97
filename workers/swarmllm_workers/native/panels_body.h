/* What products from panels share: panels.c (blocks of 256), panels_32.c (blocks of 32). */
#ifndef SWARMLLM_PANELS_BODY_H
#define SWARMLLM_PANELS_BODY_H
#include "blocks.h"

#include <immintrin.h>
#include <stddef.h>

enum { ROWS = 16, COLUMNS = 8, TILE = 16 };

#define UNROLL _Pragma("GCC unroll 16")
#define AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

/* Where the rows of a panel lie. */
struct rows {
    const char *first;
    __m512i offsets; /* of each row from the first, in bytes; rows that are not there lie where the last one does */
};

AVX512 INLINE struct rows rows_of(int64_t stride, int n) {
    int32_t offsets[ROWS];
    for (int row = 0; row < ROWS; row++) offsets[row] = (int32_t)((row < n ? row : n - 1) * stride);
    return (struct rows){NULL, _mm512_loadu_si512(offsets)};
}

/* Four bytes of each row. */
AVX512 INLINE __m512i four_of_each(const struct rows *rows, int64_t at) {
    return _mm512_i32gather_epi32(rows->offsets, rows->first + at, 1);
}

/* The first two bytes of four of each, as f16. */
AVX512 INLINE __m512 half_of_each(__m512i fours) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(fours)); }

INLINE int rows_from(int64_t at, int64_t m) { return m - at * ROWS < ROWS ? (int)(m - at * ROWS) : ROWS; }

/* Tiles of the matrix unit. The intrinsics of GCC 12 do not tell the compiler that tiles are read from memory. */
#define LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define ADD_UNSIGNED(sum, columns, weights) \
    __asm__ volatile("tdpbsud %%tmm" #weights ", %%tmm" #columns ", %%tmm" #sum ::)
#define ADD_SIGNED(sum, columns, weights) \
    __asm__ volatile("tdpbssd %%tmm" #weights ", %%tmm" #columns ", %%tmm" #sum ::)

struct __attribute__((packed, aligned(64))) tiles {
    uint8_t palette, start;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

INLINE void begin_tiles(const struct tiles *tiles) { __asm__ volatile("ldtilecfg %0" ::"m"(*tiles)); }
INLINE void end_tiles(void) { __asm__ volatile("tilerelease" ::); }
#endif
