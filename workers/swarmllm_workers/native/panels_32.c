/* Products of Q8_0, Q4_0 and Q5_0 with many columns, from panels of sixteen rows of the matrix (see panels.c).
 *
 * Weights are a byte as they are. A block's 32 products are added up exactly, with VNNI or with the matrix unit, then
 * multiplied by both scales and added in f32, one block after the other. ggml's dot products, and its tiles, add up eight
 * parts of a block by themselves, so their bits are others.
 */
#include "panels.h"

#include "blocks_32.h"

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#include "panels_body.h"

enum { BLOCK = 32, FOURS = BLOCK / 4, CHUNK = 48 };

struct column_block {
    uint16_t scale;
    int8_t values[BLOCK];
} __attribute__((packed));

/* Blocks of ROWS rows, one after the other along the rows. In a register of 64 bytes, row r has bytes [4 r, 4 r + 4). */
struct panel {
    int8_t weights[CHUNK][FOURS][ROWS * 4];
    int32_t starts[CHUNK][ROWS]; /* for columns to which 128 was added: what the sums begin with */
    float scales[CHUNK][ROWS];
} __attribute__((aligned(64)));

/* Some columns, and where what is computed goes. */
struct part {
    const struct panel *panel;
    int n_blocks;
    bool is_first; /* of the chunks along the rows */
    const struct column_block *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    __mmask16 present; /* rows that are there */
};

AVX512 static void unpack(int type, struct panel *p, int block, const struct rows *rows) {
    const __m512i nibbles = _mm512_set1_epi8(15);
    __m512i *to = (__m512i *)(void *)p->weights[block];
    _mm512_store_ps(p->scales[block], half_of_each(four_of_each(rows, 0)));
    if (type == Q8_0) {
        for (int i = 0; i < FOURS; i++) to[i] = four_of_each(rows, 2 + 4 * i);
    } else if (type == Q4_0) {
        for (int i = 0; i < FOURS / 2; i++) {
            const __m512i x = four_of_each(rows, 2 + 4 * i), middle = _mm512_set1_epi8(8);
            to[i] = _mm512_sub_epi8(_mm512_and_si512(x, nibbles), middle);
            to[i + FOURS / 2] = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(x, 4), nibbles), middle);
        }
    } else {
        const __m512i high = four_of_each(rows, 2), middle = _mm512_set1_epi8(16);
        /* Bit i of a group of four goes to bit 4 of byte i. */
        const __m512i each = _mm512_set1_epi32(0x08040201);
        const __m512i spread = _mm512_set1_epi32(0x01010101);
        for (int i = 0; i < FOURS; i++) {
            const __m512i x = four_of_each(rows, 6 + 4 * (i % (FOURS / 2)));
            const __m512i low = _mm512_and_si512(i < FOURS / 2 ? x : _mm512_srli_epi16(x, 4), nibbles);
            const __m512i bits = _mm512_and_si512(_mm512_srli_epi32(high, (unsigned)(4 * i)), _mm512_set1_epi32(15));
            const __mmask64 is_set = _mm512_test_epi8_mask(_mm512_mullo_epi32(bits, spread), each);
            to[i] = _mm512_sub_epi8(_mm512_mask_add_epi8(low, is_set, low, middle), middle);
        }
    }
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < FOURS; i++) sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8((char)128), to[i]);
    _mm512_store_si512(p->starts[block], _mm512_sub_epi32(_mm512_setzero_si512(), sum));
}

AVX512 INLINE __m512 so_far(const struct part *t, int column) {
    return t->is_first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(t->present, t->c + column * t->ldc);
}

AVX512 INLINE __m512 with_block(const struct part *t, int block, float scale, __m512i product, __m512 sum) {
    const __m512 both = _mm512_mul_ps(_mm512_load_ps(t->panel->scales[block]), _mm512_set1_ps(scale));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), both, sum);
}

/* From the first of some columns to each, in bytes. */
AVX512 INLINE __m512i column_offsets(const struct part *t, int n) {
    int32_t offsets[TILE];
    for (int j = 0; j < TILE; j++) offsets[j] = (int32_t)((j < n ? j : n - 1) * t->ldb * (int64_t)sizeof *t->b);
    return _mm512_loadu_si512(offsets);
}

AVX512 INLINE void multiply_vnni(const int n_columns, const struct part *t) {
    const __m512i added = _mm512_set1_epi8((char)128), offsets = column_offsets(t, n_columns);
    float scales[TILE] __attribute__((aligned(64)));
    __m512 sums[COLUMNS];
    UNROLL for (int j = 0; j < n_columns; j++) sums[j] = so_far(t, j);
    for (int block = 0; block < t->n_blocks; block++) {
        __m512i products[COLUMNS];
        _mm512_store_ps(scales, half_of_each(_mm512_i32gather_epi32(offsets, t->b + block, 1)));
        UNROLL for (int j = 0; j < n_columns; j++) products[j] = _mm512_load_si512(t->panel->starts[block]);
        UNROLL for (int i = 0; i < FOURS; i++) {
            const __m512i x = _mm512_load_si512(t->panel->weights[block][i]);
            UNROLL for (int j = 0; j < n_columns; j++) {
                int32_t four;
                memcpy(&four, t->b[j * t->ldb + block].values + 4 * i, sizeof four);
                products[j] = _mm512_dpbusd_epi32(products[j], _mm512_xor_si512(_mm512_set1_epi32(four), added), x);
            }
        }
        UNROLL for (int j = 0; j < n_columns; j++) sums[j] = with_block(t, block, scales[j], products[j], sums[j]);
    }
    UNROLL for (int j = 0; j < n_columns; j++) _mm512_mask_storeu_ps(t->c + j * t->ldc, t->present, sums[j]);
}

/* TILE columns, of which the first `skipped` have been computed. Tiles: sums (0, 1), columns (2, 3), weights (4, 5), of
 * two blocks: the second is unpacked, or zeros. */
AVX512 static void multiply_amx(const struct part *t, int skipped) {
    __m512 sums[TILE];
    int32_t products[2][TILE][ROWS] __attribute__((aligned(64)));
    float scales[2][TILE] __attribute__((aligned(64)));
    const __m512i offsets = column_offsets(t, TILE);
    const int64_t stride = t->ldb * (int64_t)sizeof *t->b;
    UNROLL for (int j = 0; j < TILE; j++) sums[j] = so_far(t, j);
    for (int block = 0; block < t->n_blocks; block += 2) {
        const struct column_block *one = t->b + block, *two = block + 1 < t->n_blocks ? one + 1 : one;
        ZERO(0);
        ZERO(1);
        LOAD(2, one->values, stride);
        LOAD(4, t->panel->weights[block], 64);
        ADD_SIGNED(0, 2, 4);
        LOAD(3, two->values, stride);
        LOAD(5, t->panel->weights[block + 1], 64);
        ADD_SIGNED(1, 3, 5);
        STORE(0, products[0], 64);
        STORE(1, products[1], 64);
        _mm512_store_ps(scales[0], half_of_each(_mm512_i32gather_epi32(offsets, one, 1)));
        _mm512_store_ps(scales[1], half_of_each(_mm512_i32gather_epi32(offsets, two, 1)));
        UNROLL for (int j = 0; j < TILE; j++) {
            sums[j] = with_block(t, block, scales[0][j], _mm512_load_si512(products[0][j]), sums[j]);
            sums[j] = with_block(t, block + 1, scales[1][j], _mm512_load_si512(products[1][j]), sums[j]);
        }
    }
    for (int j = skipped; j < TILE; j++) _mm512_mask_storeu_ps(t->c + j * t->ldc, t->present, sums[j]);
}

#define OF(n) \
    AVX512 static void vnni_##n(const struct part *t) { multiply_vnni(n, t); }
OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8)
static void (*const with_vnni[COLUMNS])(const struct part *) = {vnni_1, vnni_2, vnni_3, vnni_4,
                                                               vnni_5, vnni_6, vnni_7, vnni_8};

static void multiply(const struct panel_product *t, struct part part) {
    struct part here = part;
    if (t->unit == PANELS_AMX) {
        for (int64_t j = 0; j < t->n; j += TILE) {
            const int64_t from = t->n - j < TILE ? t->n - TILE : j;
            here.b = part.b + from * part.ldb;
            here.c = part.c + from * part.ldc;
            multiply_amx(&here, (int)(j - from));
        }
        return;
    }
    for (int64_t j = 0; j < t->n; j += COLUMNS) {
        const int n = t->n - j < COLUMNS ? (int)(t->n - j) : COLUMNS;
        here.b = part.b + j * part.ldb;
        here.c = part.c + j * part.ldc;
        with_vnni[n - 1](&here);
    }
}

AVX512 static void compute(const struct panel_product *t, int64_t first, int64_t end) {
    const int64_t block_bytes = t->type == Q8_0 ? sizeof(struct q8_0) : t->type == Q4_0 ? sizeof(struct q4_0) : sizeof(struct q5_0);
    struct panel panel;
    /* The columns of a chunk stay in the cache for all rows. */
    for (int64_t from = 0; from < t->k; from += CHUNK) {
        const int n_blocks = t->k - from < CHUNK ? (int)(t->k - from) : CHUNK;
        for (int64_t at = first; at < end; at++) {
            const int n_rows = rows_from(at, t->m);
            struct rows rows = rows_of(t->lda * block_bytes, n_rows);
            for (int block = 0; block < n_blocks; block++) {
                rows.first = (const char *)t->a + (at * ROWS * t->lda + from + block) * block_bytes;
                unpack(t->type, &panel, block, &rows);
            }
            if (n_blocks % 2 != 0 && n_blocks < CHUNK) {
                memset(panel.weights[n_blocks], 0, sizeof panel.weights[0]);
                memset(panel.scales[n_blocks], 0, sizeof panel.scales[0]);
            }
            multiply(t, (struct part){
                            .panel = &panel,
                            .n_blocks = n_blocks,
                            .is_first = from == 0,
                            .b = (const struct column_block *)t->b + from,
                            .ldb = t->ldb,
                            .c = t->c + at * ROWS,
                            .ldc = t->ldc,
                            .present = (__mmask16)((1 << n_rows) - 1),
                        });
        }
    }
}

void swarmllm_panels_32(const struct panel_product *t, int64_t first, int64_t end) {
    struct tiles tiles = {.palette = 1, .row_bytes = {64, 64, BLOCK, BLOCK, 64, 64}, .rows = {TILE, TILE, TILE, TILE, FOURS, FOURS}};
    if (t->unit == PANELS_AMX) {
        begin_tiles(&tiles);
    }
    compute(t, first, end);
    if (t->unit == PANELS_AMX) {
        end_tiles();
    }
}
#endif
