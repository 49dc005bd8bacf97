/* What weights.c computes of every logit. */
#ifndef SWARMLLM_WEIGHTS_H
#define SWARMLLM_WEIGHTS_H

#include <stddef.h>
#include <stdint.h>

#define BLOCK 128

/* `sums`: of the weights exp(logit / temperature - largest / temperature) of each block of the `n` logits, the last of
 * which may be shorter. `weights`, where not NULL, gets each of them. */
void swarmllm_weigh(const float *logits, size_t n, float largest, float temperature, double *sums, float *weights);

/* The largest of each block of the `n` logits; NaN where one of the block is. */
void swarmllm_block_maxima(const float *logits, size_t n, float *maxima);

#endif
