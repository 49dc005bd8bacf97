/* The tap: called by libllama's scheduler for every tensor of a graph (cb_eval), some 800 times per decode step.
 *
 * It copies the output of a segment's last layer out of the graph and, where the architecture transforms what it is
 * fed (scales it, adds positions), puts the true hidden states over the result. It includes no header of ggml: the
 * functions it needs come in as pointers, so it compiles with any C compiler and links to nothing.
 * Where told to, it also puts right the factor by which the graph scales queries, before that is computed: the
 * operation is the one called SCALE whose operand is called Qcur-*, and its factor must be the one expected.
 * tap.py does the same in Python where this file was not built.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct swarmllm_tap {
    const char *(*get_name)(const void *tensor);
    size_t (*n_bytes)(const void *tensor);
    void (*read)(const void *tensor, void *data, size_t offset, size_t size);
    void (*write)(void *tensor, const void *data, size_t offset, size_t size);
    const char *output_name;
    const char *input_name; /* NULL: the graph takes what it is fed as it is */
    void *output;
    const void *input;
    size_t output_size;
    size_t input_size;
    int32_t n_read;
    int32_t n_written;
    int32_t n_mismatched; /* tensors of the right name and the wrong size: nothing was copied */
    int32_t n_rescaled;
    const char *(*op_name)(const void *tensor); /* NULL: factors are as they should be */
    size_t operand_offset;                      /* of the pointer to the operand, in a tensor */
    size_t factor_offset;
    float wrong_factor;
    float right_factor;
};

static void rescale(struct swarmllm_tap *tap, char *tensor) {
    const void *operand;
    float factor;
    if (strcmp(tap->op_name(tensor), "SCALE") != 0) {
        return;
    }
    memcpy(&operand, tensor + tap->operand_offset, sizeof operand);
    memcpy(&factor, tensor + tap->factor_offset, sizeof factor);
    if (strncmp(tap->get_name(operand), "Qcur-", 5) != 0) {
        return;
    }
    if (factor != tap->wrong_factor && factor != tap->right_factor) { /* right: a graph that is used again */
        tap->n_mismatched++;
        return;
    }
    memcpy(tensor + tap->factor_offset, &tap->right_factor, sizeof factor);
    tap->n_rescaled++;
}

bool swarmllm_tap(void *tensor, bool ask, void *user_data) {
    struct swarmllm_tap *tap = user_data;
    const char *name = tap->get_name(tensor);
    const bool is_output = strcmp(name, tap->output_name) == 0;
    const bool is_input = tap->input_name != NULL && strcmp(name, tap->input_name) == 0;
    if (ask) {
        if (tap->op_name != NULL) {
            rescale(tap, tensor);
        }
        return is_output || is_input;
    }
    if (is_input) {
        if (tap->n_bytes(tensor) == tap->input_size) {
            tap->write(tensor, tap->input, 0, tap->input_size);
            tap->n_written++;
        } else {
            tap->n_mismatched++;
        }
        return true;
    }
    if (is_output) {
        if (tap->n_bytes(tensor) == tap->output_size) {
            tap->read(tensor, tap->output, 0, tap->output_size);
            tap->n_read++;
        } else {
            tap->n_mismatched++;
        }
        return false; /* what follows is the dummy head: stop here */
    }
    return true;
}
