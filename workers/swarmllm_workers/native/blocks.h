/* What kernels of several files use. */
#ifndef SWARMLLM_BLOCKS_H
#define SWARMLLM_BLOCKS_H
#include <stdint.h>

/* Bytes from what is computed to what memory is asked for, where a matrix is read as it lies there. With 2 KiB and 8 KiB a
 * step of Q8_0 took the same on a Zen 3; Q4_K_M was 6 % quicker with 8. */
enum { STREAM_AHEAD = 1 << 13 };

/* The weights of IQ4_NL and IQ4_XS. */
static const int8_t iq4_weights[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
#endif
