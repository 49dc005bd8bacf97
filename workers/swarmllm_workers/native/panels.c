/* Products of K-quants with many columns, from panels: sixteen rows of the matrix, unpacked once for all columns.
 *
 * ggml's dot products, and ours with their bits, multiply each group of 32 weights by its scale for every column anew. Here
 * a panel holds weights that have been multiplied by the scales of their groups. Such numbers need more than a byte, so
 * each is a sum of two or three digits of base 8:
 *
 *     weight * scale = digit0 + 8 * digit1 (+ 64 * digit2), each digit a byte
 *
 * and a block of 256 weights is multiplied with a column without a look at its groups: once for each digit, with VNNI or
 * with the matrix unit (AMX). All of that is exact in 32 bits. Then a block's sum is multiplied by the two scales that
 * are no whole numbers, in f32, one block after the other.
 *
 * A row has the same bits whatever other columns are there, and with either unit. They are not those of ggml's dot
 * products, which add up eight parts of a block by themselves.
 *
 * Scales of Q4_K and Q5_K are 0 to 63: two digits of 0 to 7, times weights of up to 31. Those of Q6_K are -128 to 127:
 * three digits of -3 to 4, times weights of -32 to 31.
 */
#include "panels.h"

#include "blocks_32.h"
#include "k_quants.h"

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#include "panels_body.h"

#include <cpuid.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FOURS = VALUES / 4, DIGITS_MAX = 3, CHUNK = 3, STEPS = 4, GROUPS = 8 };

/* Blocks of ROWS rows, one after the other along the rows. In a register of 64 bytes, row r has bytes [4 r, 4 r + 4). */
struct panel {
    uint8_t digits[CHUNK][DIGITS_MAX][FOURS][ROWS * 4];
    int16_t minima[CHUNK][GROUPS / 2][ROWS * 2]; /* of two groups each */
    int32_t starts[CHUNK][DIGITS_MAX][ROWS]; /* for columns to which 128 was added: what the sums begin with */
    float scales[CHUNK][ROWS];
    float minimum_scales[CHUNK][ROWS];
} __attribute__((aligned(64)));

/* ---- Unpacking. ---- */

/* A byte of each row, as a number. */
AVX512 INLINE __m512i byte_of_each(__m512i fours, int which) {
    return _mm512_and_si512(_mm512_srli_epi32(fours, (unsigned)(8 * which)), _mm512_set1_epi32(255));
}

/* The scales of the groups of each row. Q4_K and Q5_K begin alike. See six_bit_scales. */
AVX512 INLINE void take_scales(struct panel *p, int block, const struct rows *rows, __m512i scales[GROUPS]) {
    const __m512i both = four_of_each(rows, 0), a = four_of_each(rows, 4), b = four_of_each(rows, 8), c = four_of_each(rows, 12);
    const __m512i six = _mm512_set1_epi32(0x3f3f3f3f), four = _mm512_set1_epi32(0x0f0f0f0f), two = _mm512_set1_epi32(0x30303030);
    const __m512i of_groups[2] = {
        _mm512_and_si512(a, six),
        _mm512_or_si512(_mm512_and_si512(c, four), _mm512_and_si512(_mm512_srli_epi32(a, 2), two)),
    };
    const __m512i minima[2] = {
        _mm512_and_si512(b, six),
        _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(c, 4), four), _mm512_and_si512(_mm512_srli_epi32(b, 2), two)),
    };
    UNROLL for (int group = 0; group < GROUPS; group++) scales[group] = byte_of_each(of_groups[group / 4], group % 4);
    UNROLL for (int pair = 0; pair < GROUPS / 2; pair++) {
        const __m512i first = byte_of_each(minima[pair / 2], pair % 2 * 2);
        const __m512i second = byte_of_each(minima[pair / 2], pair % 2 * 2 + 1);
        _mm512_store_si512(p->minima[block][pair], _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
    }
    _mm512_store_ps(p->scales[block], half_of_each(both));
    _mm512_store_ps(p->minimum_scales[block], half_of_each(_mm512_srli_epi32(both, 16)));
}

/* Four weights of each row times the digits of the scales of their group: two products of bytes in 16 bits. */
AVX512 INLINE void put_unsigned(struct panel *p, int block, int fours, __m512i weights, __m512i scale) {
    const __m512i both = _mm512_or_si512(scale, _mm512_slli_epi32(scale, 16));
    const __m512i low = _mm512_and_si512(both, _mm512_set1_epi16(7)), high = _mm512_srli_epi16(both, 3);
    _mm512_store_si512(p->digits[block][0][fours], _mm512_mullo_epi16(weights, low));
    _mm512_store_si512(p->digits[block][1][fours], _mm512_mullo_epi16(weights, high));
}

AVX512 static void unpack_q4_k(struct panel *p, int block, const struct rows *rows) {
    const __m512i nibbles = _mm512_set1_epi8(15);
    __m512i scales[GROUPS];
    take_scales(p, block, rows, scales);
    for (int at = 0; at < 32; at++) {
        const int group = at / 8 * 2, fours = group * 8 + at % 8;
        const __m512i x = four_of_each(rows, 16 + 4 * at);
        put_unsigned(p, block, fours, _mm512_and_si512(x, nibbles), scales[group]);
        put_unsigned(p, block, fours + 8, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibbles), scales[group + 1]);
    }
}

AVX512 static void unpack_q5_k(struct panel *p, int block, const struct rows *rows) {
    const __m512i nibbles = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16);
    __m512i scales[GROUPS];
    take_scales(p, block, rows, scales);
    for (int column = 0; column < 8; column++) {
        const __m512i high = four_of_each(rows, 16 + 4 * column);
        for (int pair = 0; pair < 4; pair++) {
            const int group = pair * 2, fours = group * 8 + column;
            const __m512i x = four_of_each(rows, 48 + 32 * pair + 4 * column);
            const __m512i one = _mm512_and_si512(_mm512_slli_epi16(_mm512_srli_epi16(high, (unsigned)group), 4), fifth);
            const __m512i two = _mm512_and_si512(_mm512_slli_epi16(_mm512_srli_epi16(high, (unsigned)group + 1), 4), fifth);
            put_unsigned(p, block, fours, _mm512_or_si512(_mm512_and_si512(x, nibbles), one), scales[group]);
            put_unsigned(p, block, fours + 8,
                         _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(x, 4), nibbles), two), scales[group + 1]);
        }
    }
}

/* The digits of scales of Q6_K, each -3 to 4. */
AVX512 INLINE void digits_of(__m512i scale, __m512i digits[DIGITS_MAX]) {
    const __m512i three = _mm512_set1_epi32(3), seven = _mm512_set1_epi32(7);
    UNROLL for (int i = 0; i < DIGITS_MAX - 1; i++) {
        digits[i] = _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(scale, three), seven), three);
        scale = _mm512_srai_epi32(_mm512_sub_epi32(scale, digits[i]), 3);
    }
    digits[DIGITS_MAX - 1] = scale;
}

/* `weights`: 32 too large. With digit d, (weight * |d|) - 32 * |d| in bytes, and its sign turned for a negative d. */
AVX512 INLINE void put_signed(struct panel *p, int block, int fours, __m512i weights,
                              const __m512i digits[DIGITS_MAX]) {
    UNROLL for (int i = 0; i < DIGITS_MAX; i++) {
        const __m512i digit = digits[i], size = _mm512_abs_epi32(digit);
        const __m512i both = _mm512_or_si512(size, _mm512_slli_epi32(size, 16));
        const __m512i middle = _mm512_mullo_epi16(both, _mm512_set1_epi16(32 + (32 << 8)));
        const __m512i product = _mm512_sub_epi8(_mm512_mullo_epi16(weights, both), middle);
        const __m512i sign = _mm512_srai_epi32(digit, 31);
        _mm512_store_si512(p->digits[block][i][fours], _mm512_sub_epi8(_mm512_xor_si512(product, sign), sign));
    }
}

AVX512 static void unpack_q6_k(struct panel *p, int block, const struct rows *rows) {
    const __m512i nibbles = _mm512_set1_epi8(15), top = _mm512_set1_epi8(0x30);
    __m512i digits[16][DIGITS_MAX];
    for (int group = 0; group < 16; group++) { /* the byte to the highest, for its sign */
        const __m512i scales = _mm512_slli_epi32(four_of_each(rows, 192 + group / 4 * 4), (unsigned)(24 - 8 * (group % 4)));
        digits_of(_mm512_srai_epi32(scales, 24), digits[group]);
    }
    _mm512_store_ps(p->scales[block], half_of_each(_mm512_srli_epi32(four_of_each(rows, 206), 16)));
    for (int half = 0; half < 2; half++) {
        for (int column = 0; column < 8; column++) {
            const __m512i high = four_of_each(rows, 128 + 32 * half + 4 * column);
            const __m512i first = four_of_each(rows, 64 * half + 4 * column);
            const __m512i second = four_of_each(rows, 64 * half + 32 + 4 * column);
            const __m512i weights[4] = {
                _mm512_or_si512(_mm512_and_si512(first, nibbles), _mm512_and_si512(_mm512_slli_epi16(high, 4), top)),
                _mm512_or_si512(_mm512_and_si512(second, nibbles), _mm512_and_si512(_mm512_slli_epi16(high, 2), top)),
                _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(first, 4), nibbles), _mm512_and_si512(high, top)),
                _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(second, 4), nibbles),
                                _mm512_and_si512(_mm512_srli_epi16(high, 2), top)),
            };
            UNROLL for (int i = 0; i < 4; i++) {
                put_signed(p, block, half * 32 + i * 8 + column, weights[i], digits[half * 8 + 2 * i + column / 4]);
            }
        }
    }
    const __m512i added = _mm512_set1_epi8((char)128);
    for (int i = 0; i < DIGITS_MAX; i++) {
        __m512i sum = _mm512_setzero_si512();
        for (int fours = 0; fours < FOURS; fours++) {
            sum = _mm512_dpbusd_epi32(sum, added, _mm512_load_si512(p->digits[block][i][fours]));
        }
        _mm512_store_si512(p->starts[block][i], _mm512_sub_epi32(_mm512_setzero_si512(), sum));
    }
}

/* ---- Multiplying. ---- */

/* TILE columns of a block as the matrix unit reads them. */
struct column_tile {
    int8_t values[STEPS][TILE][64];
    int16_t sums[TILE][GROUPS];
    float scales[TILE];
} __attribute__((aligned(64)));

/* Some columns, and where what is computed goes. */
struct part {
    const struct panel *panel;
    int n_blocks;
    bool is_first;          /* of the chunks along the rows */
    const struct q8_k *b;   /* the first block of the first column */
    const struct column_tile *tiles; /* and of the first TILE columns */
    int64_t ldb;
    float *c;               /* of the first column */
    int64_t ldc;
    __mmask16 present;      /* rows that are there */
};

/* The sums of a column's groups. */
AVX512 INLINE void take_sums(const struct q8_k *column, int16_t sums[GROUPS]) {
    const __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)column->sums);
    const __m128i groups = _mm256_cvtepi32_epi16(_mm256_madd_epi16(halves, _mm256_set1_epi16(1)));
    _mm_storeu_si128((__m128i *)(void *)sums, groups);
}

/* Adds one block of one column, of which the sums are `digits`, to `sum`. */
AVX512 INLINE __m512 with_block(const bool is_signed, const struct part *t, int block, float scale,
                                const int16_t groups[GROUPS], const __m512i digits[DIGITS_MAX], __m512 sum) {
    __m512i total = _mm512_add_epi32(digits[0], _mm512_slli_epi32(digits[1], 3));
    if (is_signed) {
        total = _mm512_add_epi32(total, _mm512_slli_epi32(digits[2], 6));
    }
    const __m512 factor = _mm512_set1_ps(scale);
    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(_mm512_load_ps(t->panel->scales[block]), factor), sum);
    if (!is_signed) {
        __m512i minimum = _mm512_setzero_si512();
        UNROLL for (int pair = 0; pair < GROUPS / 2; pair++) {
            int32_t both;
            memcpy(&both, groups + 2 * pair, sizeof both);
            minimum = _mm512_dpwssd_epi32(minimum, _mm512_load_si512(t->panel->minima[block][pair]), _mm512_set1_epi32(both));
        }
        const __m512 of_minimum = _mm512_mul_ps(_mm512_load_ps(t->panel->minimum_scales[block]), factor);
        sum = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minimum), of_minimum, sum);
    }
    return sum;
}

AVX512 INLINE __m512 so_far(const struct part *t, int column) {
    return t->is_first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(t->present, t->c + column * t->ldc);
}

AVX512 INLINE void multiply_vnni(const bool is_signed, const int n_columns, const struct part *t) {
    const int n_digits = is_signed ? 3 : 2;
    const __m512i added = _mm512_set1_epi8((char)128);
    for (int block = 0; block < t->n_blocks; block++) {
        __m512i sums[COLUMNS][DIGITS_MAX];
        UNROLL for (int j = 0; j < n_columns; j++) {
            UNROLL for (int i = 0; i < n_digits; i++) {
                sums[j][i] = is_signed ? _mm512_load_si512(t->panel->starts[block][i]) : _mm512_setzero_si512();
            }
        }
        for (int fours = 0; fours < FOURS; fours++) {
            __m512i x[DIGITS_MAX];
            UNROLL for (int i = 0; i < n_digits; i++) x[i] = _mm512_load_si512(t->panel->digits[block][i][fours]);
            UNROLL for (int j = 0; j < n_columns; j++) {
                int32_t four;
                memcpy(&four, t->b[j * t->ldb + block].values + 4 * fours, sizeof four);
                __m512i y = _mm512_set1_epi32(four);
                if (is_signed) {
                    y = _mm512_xor_si512(y, added);
                }
                UNROLL for (int i = 0; i < n_digits; i++) {
                    sums[j][i] = is_signed ? _mm512_dpbusd_epi32(sums[j][i], y, x[i]) : _mm512_dpbusd_epi32(sums[j][i], x[i], y);
                }
            }
        }
        UNROLL for (int j = 0; j < n_columns; j++) {
            struct part here = *t;
            here.is_first = t->is_first && block == 0;
            const struct q8_k *column = t->b + j * t->ldb + block;
            int16_t groups[GROUPS];
            take_sums(column, groups);
            const __m512 sum = with_block(is_signed, t, block, column->scale, groups, sums[j], so_far(&here, j));
            _mm512_mask_storeu_ps(t->c + j * t->ldc, t->present, sum);
        }
    }
}

/* TILE columns, of which the first `skipped` have been computed. Tiles: sums of up to three digits (0 to 2), columns (3),
 * weights (4 to 6). */
AVX512 INLINE void multiply_amx(const bool is_signed, const int skipped, const struct part *t) {
    __m512 sums[TILE];
    int32_t products[DIGITS_MAX][TILE][ROWS] __attribute__((aligned(64)));
    UNROLL for (int j = 0; j < TILE; j++) sums[j] = so_far(t, j);
    for (int block = 0; block < t->n_blocks; block++) {
        const struct column_tile *columns = t->tiles + block;
        ZERO(0);
        ZERO(1);
        if (is_signed) {
            ZERO(2);
        }
        for (int step = 0; step < STEPS; step++) {
            LOAD(3, columns->values[step], 64);
            LOAD(4, t->panel->digits[block][0][TILE * step], 64);
            LOAD(5, t->panel->digits[block][1][TILE * step], 64);
            if (is_signed) {
                LOAD(6, t->panel->digits[block][2][TILE * step], 64);
                ADD_SIGNED(0, 3, 4);
                ADD_SIGNED(1, 3, 5);
                ADD_SIGNED(2, 3, 6);
            } else {
                ADD_UNSIGNED(0, 3, 4);
                ADD_UNSIGNED(1, 3, 5);
            }
        }
        STORE(0, products[0], 64);
        STORE(1, products[1], 64);
        if (is_signed) {
            STORE(2, products[2], 64);
        }
        UNROLL for (int j = 0; j < TILE; j++) {
            const __m512i digits[DIGITS_MAX] = {
                _mm512_load_si512(products[0][j]),
                _mm512_load_si512(products[1][j]),
                is_signed ? _mm512_load_si512(products[2][j]) : _mm512_setzero_si512(),
            };
            sums[j] = with_block(is_signed, t, block, columns->scales[j], columns->sums[j], digits, sums[j]);
        }
    }
    for (int j = skipped; j < TILE; j++) _mm512_mask_storeu_ps(t->c + j * t->ldc, t->present, sums[j]);
}

#define OF(n)                                                                                    \
    AVX512 static void unsigned_##n(const struct part *t) { multiply_vnni(false, n, t); }        \
    AVX512 static void signed_##n(const struct part *t) { multiply_vnni(true, n, t); }
OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8)
#define EACH(name) name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8
static void (*const with_vnni[2][COLUMNS])(const struct part *) = {{EACH(unsigned_)}, {EACH(signed_)}};

AVX512 static void amx_unsigned(const struct part *t, int skipped) { multiply_amx(false, skipped, t); }
AVX512 static void amx_signed(const struct part *t, int skipped) { multiply_amx(true, skipped, t); }

/* The first of the TILE columns that come at `j`: the last ones overlap those before them. */
INLINE int64_t tile_from(const struct panel_product *t, int64_t j) { return t->n - j < TILE ? t->n - TILE : j; }

/* All columns, [tiles][k]. */
AVX512 static void lay_tiles(const struct panel_product *t, struct column_tile *tiles) {
    for (int64_t j = 0; j < t->n; j += TILE) {
        for (int column = 0; column < TILE; column++) {
            const struct q8_k *b = (const struct q8_k *)t->b + (tile_from(t, j) + column) * t->ldb;
            for (int64_t block = 0; block < t->k; block++, b++) {
                struct column_tile *to = tiles + j / TILE * t->k + block;
                UNROLL for (int step = 0; step < STEPS; step++) {
                    _mm512_store_si512(to->values[step][column], _mm512_loadu_si512(b->values + 64 * step));
                }
                take_sums(b, to->sums[column]);
                to->scales[column] = b->scale;
            }
        }
    }
}

AVX512 static void multiply(const struct panel_product *t, struct part part) {
    const bool is_signed = t->type == Q6_K;
    struct part here = part;
    if (t->unit == PANELS_AMX) {
        for (int64_t j = 0; j < t->n; j += TILE) {
            const int64_t from = tile_from(t, j);
            here.tiles = part.tiles + j / TILE * t->k;
            here.c = part.c + from * part.ldc;
            (is_signed ? amx_signed : amx_unsigned)(&here, (int)(j - from));
        }
        return;
    }
    for (int64_t j = 0; j < t->n; j += COLUMNS) {
        const int n = t->n - j < COLUMNS ? (int)(t->n - j) : COLUMNS;
        here.b = part.b + j * part.ldb;
        here.c = part.c + j * part.ldc;
        with_vnni[is_signed][n - 1](&here);
    }
}

AVX512 static void compute(const struct panel_product *t, int64_t first, int64_t end, const struct column_tile *tiles) {
    const int64_t block_bytes = swarmllm_k_block_bytes(t->type);
    struct panel panel;
    /* The columns of a chunk stay in the cache for all rows. */
    for (int64_t from = 0; from < t->k; from += CHUNK) {
        const int n_blocks = t->k - from < CHUNK ? (int)(t->k - from) : CHUNK;
        for (int64_t at = first; at < end; at++) {
            const int n_rows = rows_from(at, t->m);
            struct rows rows = rows_of(t->lda * block_bytes, n_rows);
            for (int block = 0; block < n_blocks; block++) {
                rows.first = (const char *)t->a + (at * ROWS * t->lda + from + block) * block_bytes;
                (t->type == Q4_K ? unpack_q4_k : t->type == Q5_K ? unpack_q5_k : unpack_q6_k)(&panel, block, &rows);
            }
            multiply(t, (struct part){
                            .panel = &panel,
                            .n_blocks = n_blocks,
                            .is_first = from == 0,
                            .b = (const struct q8_k *)t->b + from,
                            .tiles = tiles == NULL ? NULL : tiles + from,
                            .ldb = t->ldb,
                            .c = t->c + at * ROWS,
                            .ldc = t->ldc,
                            .present = (__mmask16)((1 << n_rows) - 1),
                        });
        }
    }
}

static void compute_k(const struct panel_product *t, int64_t first, int64_t end) {
    struct panel_product here = *t;
    struct column_tile *tiles = NULL;
    if (t->unit == PANELS_AMX) {
        tiles = aligned_alloc(64, (size_t)((t->n + TILE - 1) / TILE * t->k) * sizeof *tiles);
        here.unit = tiles == NULL ? PANELS_VNNI : PANELS_AMX; /* with the same bits */
    }
    if (tiles == NULL) {
        compute(&here, first, end, NULL);
        return;
    }
    struct tiles settings = {.palette = 1};
    for (int i = 0; i < 7; i++) {
        settings.row_bytes[i] = 64;
        settings.rows[i] = TILE;
    }
    lay_tiles(&here, tiles);
    begin_tiles(&settings);
    compute(&here, first, end, tiles);
    end_tiles();
    free(tiles);
}

/* Linux gives a process the state of the matrix unit when it asks for it. */
static bool may_use_amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_TILE) && (d & AMX_INT8) &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

__attribute__((visibility("default"))) int64_t swarmllm_panels(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) {
        return PANELS_NONE;
    }
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vnni")) {
        return PANELS_AVX2;
    }
    return may_use_amx() ? PANELS_AMX : PANELS_VNNI;
}

bool swarmllm_panel_product(const struct panel_product *t) {
    const bool is_k_quant = t->type == Q4_K || t->type == Q5_K || t->type == Q6_K;
    const bool is_of_32 = t->type == Q8_0 || t->type == Q4_0 || t->type == Q5_0;
    if (t->unit == PANELS_FEW) {
        return swarmllm_panels_few(t);
    }
    const int64_t far = ROWS * VALUES * 2; /* more bytes than rows or columns in a register have, for each block */
    if ((!is_k_quant && !is_of_32) || t->n < PANEL_COLUMNS_MIN || t->lda > INT32_MAX / far || t->ldb > INT32_MAX / far) {
        return false;
    }
    if (t->unit == PANELS_AVX2) {
        if (is_k_quant) {
            swarmllm_panels_avx2(t);
        }
        return is_k_quant;
    }
    const int64_t panels = (t->m + ROWS - 1) / ROWS;
    const int64_t first = panels * t->thread / t->n_threads, end = panels * (t->thread + 1) / t->n_threads;
    (is_k_quant ? compute_k : swarmllm_panels_32)(t, first, end);
    return true;
}
#else
__attribute__((visibility("default"))) int64_t swarmllm_panels(void) { return PANELS_NONE; }

bool swarmllm_panel_product(const struct panel_product *product) {
    (void)product;
    return false;
}
#endif
