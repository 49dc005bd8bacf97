/* What kernels of several files use. */
#ifndef SWARMLLM_BLOCKS_H
#define SWARMLLM_BLOCKS_H
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Bytes from what is computed to what memory is asked for, where a matrix is read as it lies there. With 2 KiB and 8 KiB a
 * step of Q8_0 took the same on a Zen 3; Q4_K_M was 6 % quicker with 8. */
enum { STREAM_AHEAD = 1 << 13 };

/* The weights of IQ4_NL and IQ4_XS. */
static const int8_t iq4_weights[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* And of MXFP4, twice as large. */
static const int8_t fp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* ---- Blocks of 32 numbers, as files have them. ---- */

struct __attribute__((packed)) q4_0 { /* and IQ4_NL */
    uint16_t scale;
    uint8_t values[16];
};
struct __attribute__((packed)) q5_0 {
    uint16_t scale;
    uint32_t high;
    uint8_t values[16];
};
struct __attribute__((packed)) mxfp4 {
    uint8_t exponent;
    uint8_t values[16];
};
struct __attribute__((packed)) q8_0 {
    uint16_t scale;
    int8_t values[32];
};

/* ---- Blocks of 256 numbers. ---- */

enum { GROUP = 32, VALUES = 256 };

struct __attribute__((packed)) q4_k {
    uint16_t scale, minimum;
    uint8_t scales[12];
    uint8_t values[VALUES / 2];
};
struct __attribute__((packed)) q5_k {
    uint16_t scale, minimum;
    uint8_t scales[12];
    uint8_t high[VALUES / 8];
    uint8_t values[VALUES / 2];
};
struct __attribute__((packed)) q6_k {
    uint8_t values[VALUES / 2];
    uint8_t high[VALUES / 4];
    int8_t scales[VALUES / 16];
    uint16_t scale;
};
struct __attribute__((packed)) iq4_xs {
    uint16_t scale, high_scales;
    uint8_t low_scales[4];
    uint8_t values[VALUES / 2];
};
struct q8_k {
    float scale;
    int8_t values[VALUES];
    int16_t sums[VALUES / 16];
};

/* Columns of a batch lie together as kernels with AVX2 read them, at multiples of a register's size: of blocks as ggml
 * leaves them, half of the loads cross from one line of the cache into the next. */
enum { REGISTER = 32 };

/* Eight scales and eight minima of six bits each, as bytes. */
INLINE void six_bit_scales(const uint8_t *packed, uint64_t *scales, uint64_t *minima) {
    uint32_t a, b, c;
    memcpy(&a, packed, sizeof a);
    memcpy(&b, packed + 4, sizeof b);
    memcpy(&c, packed + 8, sizeof c);
    const uint32_t high_scales = (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030);
    const uint32_t high_minima = (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030);
    *scales = (a & 0x3f3f3f3f) | (uint64_t)high_scales << 32;
    *minima = (b & 0x3f3f3f3f) | (uint64_t)high_minima << 32;
}
#endif
