/* The row of a decode job, from where it was decrypted to where the model reads it, if it is one: what ring_work.py
 * does with numpy where this file was not built. After a step that has read every weight, each call of numpy costs as
 * much as all of this. It includes no header of Python and links to nothing.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* `data`: `offset` bytes of something else, `head_size` bytes that must be `head`, and `n` values. False, and `row` is
 * of no use, where the head is another or a value is NaN or infinite. */
__attribute__((visibility("default"))) bool swarmllm_take_row(const char *data, size_t offset, const char *head,
                                                              size_t head_size, float *row, size_t n) {
    const uint32_t exponent = 0x7f800000;
    uint32_t n_bad = 0;
    if (memcmp(data + offset, head, head_size) != 0) {
        return false;
    }
    memcpy(row, data + offset + head_size, n * sizeof *row);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, row + i, sizeof bits);
        n_bad += (bits & exponent) == exponent;
    }
    return n_bad == 0;
}
