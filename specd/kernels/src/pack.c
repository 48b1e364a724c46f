/* From rows as files hold them to interleaved strips, and back to single rows (the embedding). Plain C: runs once. */
#include "common.h"

static int64_t block_columns(int32_t kind) {
    switch (kind) {
        case SPECD_F32:
        case SPECD_F16:
        case SPECD_BF16: return 1;
        case SPECD_Q8_0:
        case SPECD_Q4_0:
        case SPECD_Q4_1: return 32;
        case SPECD_Q4_K:
        case SPECD_Q6_K: return 256;
        default: return 0;
    }
}

static int64_t block_bytes(int32_t kind) {
    switch (kind) {
        case SPECD_F32: return 4;
        case SPECD_F16:
        case SPECD_BF16: return 2;
        case SPECD_Q8_0: return 34;
        case SPECD_Q4_0: return 18;
        case SPECD_Q4_1: return 20;
        case SPECD_Q4_K: return 144;
        default: return 210; /* Q6_K */
    }
}

int64_t specd_strip_bytes(int32_t kind, int64_t cols) {
    int64_t columns = block_columns(kind);
    if (columns == 0 || cols <= 0 || cols % columns) return 0;
    return layout_of(kind, cols).bytes;
}

static void put_u16(uint8_t *plane, int64_t index, int lane, const uint8_t *from) {
    memcpy(plane + (index * SPECD_STRIP + lane) * 2, from, 2);
}

/* Sixteen bytes of 4-bit weights as Q4_0, Q4_1 have them: column k in the low nibble of byte k, k + 16 in the high. */
static void put_nibbles(uint8_t *values, int64_t group, int lane, const uint8_t *from) {
    for (int k = 0; k < 16; k++) {
        values[((group * 4 + k / 4) * SPECD_STRIP + lane) * 4 + k % 4] = from[k];
    }
}

static void pack_q4(const strip_layout *l, const uint8_t *block, int64_t group, int lane, int has_min, uint8_t *out) {
    put_u16(out + l->scale, group, lane, block);
    if (has_min) put_u16(out + l->minimum, group, lane, block + 2);
    put_nibbles(out, group, lane, block + (has_min ? 4 : 2));
}

static void pack_q8(const strip_layout *l, const uint8_t *block, int64_t group, int lane, uint8_t *out) {
    put_u16(out + l->scale, group, lane, block);
    for (int quad = 0; quad < 8; quad++) {
        memcpy(out + ((group * 8 + quad) * SPECD_STRIP + lane) * 4, block + 2 + quad * 4, 4);
    }
}

/* d, dmin, 12 bytes of 6-bit scales and minima, then four times 32 bytes: group 2 i in their low nibbles, 2 i + 1 in
 * the high ones. */
static void pack_q4_k(const strip_layout *l, const uint8_t *block, int64_t index, int lane, uint8_t *out) {
    const uint8_t *packed = block + 4, *quants = block + 16;
    put_u16(out + l->scale, index, lane, block);
    put_u16(out + l->minimum, index, lane, block + 2);
    for (int g = 0; g < 8; g++) {
        int64_t group = index * 8 + g, place = group * SPECD_STRIP + lane;
        const uint8_t *pair = quants + g / 2 * 32;
        uint8_t scale = packed[g % 4] & 63, minimum = packed[g % 4 + 4] & 63, nibbles[16];
        if (g >= 4) {
            scale = (uint8_t)((packed[g + 4] & 15) | packed[g - 4] >> 6 << 4);
            minimum = (uint8_t)(packed[g + 4] >> 4 | packed[g] >> 6 << 4);
        }
        out[l->sub_scale + place] = scale;
        out[l->sub_min + place] = minimum;
        for (int k = 0; k < 16; k++) {
            uint8_t low = g % 2 ? pair[k] >> 4 : pair[k] & 15, high = g % 2 ? pair[k + 16] >> 4 : pair[k + 16] & 15;
            nibbles[k] = (uint8_t)(low | high << 4);
        }
        put_nibbles(out, group, lane, nibbles);
    }
}

/* Weight k of a Q6_K block, 0..63. Halves of 128: 64 bytes of low nibbles and 32 of high bits each. */
static int q6_value(const uint8_t *block, int k) {
    int half = k / 128, in = k % 128, quarter = in / 32, at = in % 32;
    uint8_t low = block[half * 64 + (quarter % 2) * 32 + at], high = block[128 + half * 32 + at];
    return (quarter < 2 ? low & 15 : low >> 4) | (high >> (2 * quarter) & 3) << 4;
}

static void pack_q6_k(const strip_layout *l, const uint8_t *block, int64_t index, int lane, uint8_t *out) {
    put_u16(out + l->scale, index, lane, block + 208);
    for (int g = 0; g < 8; g++) {
        int64_t group = index * 8 + g;
        uint8_t nibbles[16];
        for (int h = 0; h < 2; h++) {
            out[l->sub_scale + (group * 2 + h) * SPECD_STRIP + lane] = block[192 + g * 2 + h];
        }
        for (int k = 0; k < 16; k++) {
            int low = q6_value(block, g * 32 + k), high = q6_value(block, g * 32 + k + 16);
            nibbles[k] = (uint8_t)((low & 15) | (high & 15) << 4);
        }
        put_nibbles(out, group, lane, nibbles);
        for (int part = 0; part < 2; part++) {
            for (int c = 0; c < 4; c++) {
                int bits = 0;
                for (int f = 0; f < 4; f++) bits |= q6_value(block, g * 32 + (part + 2 * f) * 4 + c) >> 4 << (2 * f);
                out[l->bits + ((group * 2 + part) * SPECD_STRIP + lane) * 4 + c] = (uint8_t)bits;
            }
        }
    }
}

static void pack_row(int32_t kind, const strip_layout *l, const uint8_t *row, int64_t cols, int lane, uint8_t *out) {
    int64_t size = block_bytes(kind), count = cols / block_columns(kind);
    for (int64_t b = 0; b < count; b++) {
        const uint8_t *block = row + b * size;
        switch (kind) {
            case SPECD_Q4_0: pack_q4(l, block, b, lane, 0, out); break;
            case SPECD_Q4_1: pack_q4(l, block, b, lane, 1, out); break;
            case SPECD_Q8_0: pack_q8(l, block, b, lane, out); break;
            case SPECD_Q4_K: pack_q4_k(l, block, b, lane, out); break;
            case SPECD_Q6_K: pack_q6_k(l, block, b, lane, out); break;
            default: memcpy(out + (b * SPECD_STRIP + lane) * size, block, (size_t)size);
        }
    }
}

int specd_pack(int32_t kind, const uint8_t *rows, int64_t num_rows, int64_t cols, uint8_t *out) {
    int64_t strip = specd_strip_bytes(kind, cols);
    if (strip == 0) return SPECD_BAD_ARGUMENT;
    strip_layout l = layout_of(kind, cols);
    int64_t row_bytes = cols / block_columns(kind) * block_bytes(kind);
    memset(out, 0, (size_t)(strips_of(num_rows) * strip));
    for (int64_t row = 0; row < num_rows; row++) {
        pack_row(kind, &l, rows + row * row_bytes, cols, (int)(row % SPECD_STRIP), out + row / SPECD_STRIP * strip);
    }
    return SPECD_OK;
}

/* A plane of a strip: `count` times 16 rows side by side, `unit` bytes of each. */
typedef struct {
    int64_t offset, count, unit;
} Plane;

/* Writes a strip's planes to `planes`; returns how many they are. */
static int planes_of(int32_t kind, int64_t cols, Plane *planes) {
    strip_layout l = layout_of(kind, cols);
    int64_t groups = groups_of(cols), blocks = groups / 8;
    int n = 0;
    switch (kind) {
        case SPECD_F32:
        case SPECD_F16:
        case SPECD_BF16: planes[n++] = (Plane){0, groups * SPECD_GROUP, kind == SPECD_F32 ? 4 : 2}; return n;
        case SPECD_Q8_0: planes[n++] = (Plane){0, groups * 8, 4}; break;
        default: planes[n++] = (Plane){0, groups * 4, 4};
    }
    planes[n++] = (Plane){l.scale, kind == SPECD_Q4_K || kind == SPECD_Q6_K ? blocks : groups, 2};
    if (kind == SPECD_Q4_1) planes[n++] = (Plane){l.minimum, groups, 2};
    if (kind == SPECD_Q4_K) {
        planes[n++] = (Plane){l.minimum, blocks, 2};
        planes[n++] = (Plane){l.sub_scale, groups, 1};
        planes[n++] = (Plane){l.sub_min, groups, 1};
    }
    if (kind == SPECD_Q6_K) {
        planes[n++] = (Plane){l.bits, groups * 2, 4};
        planes[n++] = (Plane){l.sub_scale, groups * 2, 1};
    }
    return n;
}

int specd_pick(const specd_matrix *matrix, const int64_t *rows, int64_t count, uint8_t *out) {
    Plane planes[5];
    int num_planes = planes_of(matrix->kind, matrix->cols, planes);
    memset(out, 0, (size_t)(strips_of(count) * matrix->strip_bytes));
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= matrix->rows) return SPECD_BAD_ARGUMENT;
        const uint8_t *from = matrix->data + rows[i] / SPECD_STRIP * matrix->strip_bytes;
        uint8_t *to = out + i / SPECD_STRIP * matrix->strip_bytes;
        for (int p = 0; p < num_planes; p++) {
            int64_t unit = planes[p].unit;
            for (int64_t k = 0; k < planes[p].count; k++) {
                int64_t at = planes[p].offset + k * SPECD_STRIP * unit;
                memcpy(to + at + i % SPECD_STRIP * unit, from + at + rows[i] % SPECD_STRIP * unit, (size_t)unit);
            }
        }
    }
    return SPECD_OK;
}

static float scale_at(const uint8_t *plane, int64_t index, int lane) {
    return f16_value(load_u16(plane + (index * SPECD_STRIP + lane) * 2));
}

/* Weight `column` of a quantised strip as the file's integer. */
static int strip_value(const specd_matrix *m, const strip_layout *l, const uint8_t *strip, int lane, int64_t column) {
    int64_t group = column / SPECD_GROUP;
    int in = (int)(column % SPECD_GROUP), quad = in / 4;
    if (m->kind == SPECD_Q8_0) return (int8_t)strip[((group * 8 + quad) * SPECD_STRIP + lane) * 4 + in % 4];
    uint8_t byte = strip[((group * 4 + quad % 4) * SPECD_STRIP + lane) * 4 + in % 4];
    int value = quad < 4 ? byte & 15 : byte >> 4;
    if (m->kind != SPECD_Q6_K) return value;
    uint8_t bits = strip[l->bits + ((group * 2 + quad % 2) * SPECD_STRIP + lane) * 4 + in % 4];
    return value | (bits >> (2 * (quad / 2)) & 3) << 4;
}

static float quantised_at(const specd_matrix *m, const strip_layout *l, const uint8_t *strip, int lane, int64_t k) {
    int64_t group = k / SPECD_GROUP, place = group * SPECD_STRIP + lane;
    float value = (float)strip_value(m, l, strip, lane, k);
    switch (m->kind) {
        case SPECD_Q8_0: return scale_at(strip + l->scale, group, lane) * value;
        case SPECD_Q4_0: return scale_at(strip + l->scale, group, lane) * (value - 8.0f);
        case SPECD_Q4_1:
            value *= scale_at(strip + l->scale, group, lane);
            return value + scale_at(strip + l->minimum, group, lane);
        case SPECD_Q4_K:
            value *= scale_at(strip + l->scale, group / 8, lane) * (float)strip[l->sub_scale + place];
            return value - scale_at(strip + l->minimum, group / 8, lane) * (float)strip[l->sub_min + place];
        default: {
            int64_t half = group * 2 + k % SPECD_GROUP / 16;
            float scale = (float)(int8_t)strip[l->sub_scale + half * SPECD_STRIP + lane];
            return scale_at(strip + l->scale, group / 8, lane) * scale * (value - 32.0f);
        }
    }
}

void specd_unpack_row(const specd_matrix *matrix, int64_t row, float *out) {
    strip_layout l = layout_of(matrix->kind, matrix->cols);
    const uint8_t *strip = matrix->data + row / SPECD_STRIP * matrix->strip_bytes;
    int lane = (int)(row % SPECD_STRIP);
    for (int64_t k = 0; k < matrix->cols; k++) {
        int64_t place = k * SPECD_STRIP + lane;
        switch (matrix->kind) {
            case SPECD_F32: memcpy(out + k, strip + place * 4, 4); break;
            case SPECD_F16: out[k] = f16_value(load_u16(strip + place * 2)); break;
            case SPECD_BF16: out[k] = bf16_value(load_u16(strip + place * 2)); break;
            default: out[k] = quantised_at(matrix, &l, strip, lane, k);
        }
    }
}
