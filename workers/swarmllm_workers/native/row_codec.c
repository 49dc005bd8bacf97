/* Rows of hidden states as q8_0, ggml's blocks of 32 values, and back: what swarmllm_proto/tensors.py does with
 * numpy where this file was not built, with the same bits. A stage does it to every row that it sends on. It includes
 * no header of Python and links to nothing. Compiled with -ffp-contract=off: a fused product would round otherwise.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 32
#define BLOCK_BYTES 34
#define EXPORT __attribute__((visibility("default")))

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The nearest f16 of a value that is not negative, ties to even; 0x7c00 (infinity) and above for what is too large. */
static uint16_t half_of(float value) {
    uint32_t bits = bits_of(value);
    if (bits >= 0x47800000) {
        return 0x7c00;
    }
    if (bits < 0x38800000) { /* below 2^-14: a multiple of 2^-24 */
        return (uint16_t)(bits_of(value * 16777216.0f + 8388608.0f) - 0x4b000000);
    }
    bits -= 0x38000000;
    return (uint16_t)((bits + 0xfff + ((bits >> 13) & 1)) >> 13);
}

static float of_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude < 0x0400) {
        return float_of(sign | bits_of((float)magnitude * (1.0f / 16777216.0f)));
    }
    return float_of(sign | ((magnitude << 13) + 0x38000000));
}

/* `n_blocks` blocks of `values` to `packed`, and to `rounded` what they say then. False, and nothing of use has been
 * written, where a value is NaN or infinite or too large for its block's scale. */
EXPORT bool swarmllm_pack_q8_0(const float *values, size_t n_blocks, uint8_t *packed, float *rounded) {
    for (size_t block = 0; block < n_blocks; block++) {
        uint32_t largest = 0;
        for (int i = 0; i < BLOCK; i++) {
            uint32_t bits = bits_of(values[i]) & 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
        float exact = float_of(largest) / 127.0f;
        uint16_t half = largest < 0x7f800000 ? half_of(exact) : 0x7c00;
        if (half >= 0x7c00) {
            return false;
        }
        float inverse = half ? 1.0f / exact : 0.0f, scale = of_half(half);
        int8_t codes[BLOCK];
        memcpy(packed, &half, sizeof half);
        for (int i = 0; i < BLOCK; i++) {
            /* To the nearest integer, ties to even: what is larger than 2^23 has no fraction. */
            float shifted = values[i] * inverse + 12582912.0f;
            codes[i] = (int8_t)(bits_of(shifted) - 0x4b400000);
            rounded[i] = (float)codes[i] * scale + 0.0f;
        }
        memcpy(packed + 2, codes, BLOCK);
        values += BLOCK;
        rounded += BLOCK;
        packed += BLOCK_BYTES;
    }
    return true;
}

/* `data`: `offset` bytes of something else, `head_size` bytes that must be `head`, and `n_blocks` blocks. False, and
 * `values` is of no use, where the head is another or a scale is NaN or infinite. */
EXPORT bool swarmllm_take_q8_0(const uint8_t *data, size_t offset, const uint8_t *head, size_t head_size, float *values,
                               size_t n_blocks) {
    if (memcmp(data + offset, head, head_size) != 0) {
        return false;
    }
    data += offset + head_size;
    for (size_t block = 0; block < n_blocks; block++) {
        uint16_t half;
        memcpy(&half, data, sizeof half);
        if ((half & 0x7c00) == 0x7c00) {
            return false;
        }
        float scale = of_half(half);
        for (int i = 0; i < BLOCK; i++) {
            values[i] = (float)(int8_t)data[2 + i] * scale + 0.0f;
        }
        values += BLOCK;
        data += BLOCK_BYTES;
    }
    return true;
}
