/* What files read that stand before ggml's functions and include no header of its. */
#ifndef SWARMLLM_GGML_TENSOR_H
#define SWARMLLM_GGML_TENSOR_H
#include <stddef.h>
#include <stdint.h>

/* The head of ggml's `struct ggml_tensor`. */
struct tensor {
    int type;
    void *buffer;
    int64_t shape[4];
    size_t strides[4];
    int operation;
    int32_t settings[16];
    int32_t flags;
    const struct tensor *operands[10];
    const struct tensor *viewed;
    size_t viewed_at;
    void *data;
};
#endif
