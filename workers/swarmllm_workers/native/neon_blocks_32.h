/* Products with NEON of types in blocks of 32 numbers: neon_blocks_32.c has them, blocks_32.h says what is asked. */
#ifndef SWARMLLM_NEON_BLOCKS_32_H
#define SWARMLLM_NEON_BLOCKS_32_H
#include <stdint.h>

/* Whether libllama was compiled for processors with dot products of bytes, and with SVE. Both decide the bits of its sums;
 * with SVE it has some for Q8_0 and Q4_0 that nothing here has. small_batches.py says so before the first product. */
extern int64_t swarmllm_ggml_has_dot, swarmllm_ggml_has_sve;
#endif
