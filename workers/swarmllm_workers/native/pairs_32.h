/* Products of types in blocks of 32 numbers with AVX-512: pairs_32.c has them, small_batches.c asks for them. */
#ifndef SWARMLLM_PAIRS_32_H
#define SWARMLLM_PAIRS_32_H
#include "blocks_32.h"

/* As `swarmllm_product_32`, for a processor with AVX-512 BW, DQ, VL and VNNI. */
bool swarmllm_product_pairs_32(const struct product_32 *product);
#endif
