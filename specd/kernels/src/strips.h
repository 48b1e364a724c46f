/* From the kernels of linear.h to projections: one instance for each number of rows, chosen by format and mode. */

#if MAX_ROWS >= 8
#define MORE_CASES(BODY)                                  \
    case 5: BODY(5, w, part, in, row, tile); break;       \
    case 6: BODY(6, w, part, in, row, tile); break;       \
    case 7: BODY(7, w, part, in, row, tile); break;       \
    case 8: BODY(8, w, part, in, row, tile); break;
#else
#define MORE_CASES(BODY)
#endif

#define STRIP_KERNEL(NAME, BODY)                                                                      \
    static void NAME(const Strip *w, const Inputs *in, long row, int rows, float *tile) {             \
        for (int part = 0; part < SPECD_STRIP / W; part++) {                                          \
            switch (rows) {                                                                           \
                case 1: BODY(1, w, part, in, row, tile); break;                                       \
                case 2: BODY(2, w, part, in, row, tile); break;                                       \
                case 3: BODY(3, w, part, in, row, tile); break;                                       \
                case 4: BODY(4, w, part, in, row, tile); break;                                       \
                    MORE_CASES(BODY)                                                                  \
                default: break;                                                                       \
            }                                                                                         \
        }                                                                                             \
    }

STRIP_KERNEL(strip_fast_q4_0, fast_q4_0)
STRIP_KERNEL(strip_fast_q4_1, fast_q4_1)
STRIP_KERNEL(strip_fast_q8_0, fast_q8_0)
STRIP_KERNEL(strip_fast_q4_k, fast_q4_k)
STRIP_KERNEL(strip_fast_q6_k, fast_q6_k)
STRIP_KERNEL(strip_exact_q4_0, exact_q4_0)
STRIP_KERNEL(strip_exact_q4_1, exact_q4_1)
STRIP_KERNEL(strip_exact_q8_0, exact_q8_0)
STRIP_KERNEL(strip_exact_q4_k, exact_q4_k)
STRIP_KERNEL(strip_exact_q6_k, exact_q6_k)
STRIP_KERNEL(strip_f32, floats_f32)
STRIP_KERNEL(strip_f16, floats_f16)
STRIP_KERNEL(strip_bf16, floats_bf16)

static StripKernel strip_kernel(int32_t kind, int32_t activations) {
    int fast = activations == SPECD_FAST;
    switch (kind) {
        case SPECD_F32: return strip_f32;
        case SPECD_F16: return strip_f16;
        case SPECD_BF16: return strip_bf16;
        case SPECD_Q4_0: return fast ? strip_fast_q4_0 : strip_exact_q4_0;
        case SPECD_Q4_1: return fast ? strip_fast_q4_1 : strip_exact_q4_1;
        case SPECD_Q8_0: return fast ? strip_fast_q8_0 : strip_exact_q8_0;
        case SPECD_Q4_K: return fast ? strip_fast_q4_k : strip_exact_q4_k;
        default: return fast ? strip_fast_q6_k : strip_exact_q6_k;
    }
}

static Strip strip_at(const specd_matrix *matrix, const strip_layout *l, int64_t strip) {
    const uint8_t *data = matrix->data + strip * matrix->strip_bytes;
    Strip w;
    w.values = data;
    w.next = data + matrix->strip_bytes;
    w.bits = data + l->bits;
    w.sub_scale = data + l->sub_scale;
    w.sub_min = data + l->sub_min;
    w.scale = (const uint16_t *)(const void *)(data + l->scale);
    w.minimum = (const uint16_t *)(const void *)(data + l->minimum);
    return w;
}

INLINE int needs_of(const specd_matrix *matrix, int32_t activations) {
    return activations == SPECD_FAST && is_quantised(matrix->kind) ? NEEDS_Q : NEEDS_X;
}

INLINE int needs_of_linear(const specd_linear *linear, int32_t activations) {
    int needs = 0;
    for (int64_t p = 0; p < linear->num_parts; p++) needs |= needs_of(&linear->parts[p], activations);
    return needs;
}

/* Item `index` of `count` cut into `threads` pieces of nearly the same size: [first, last). */
typedef struct { long first, last; } Range;
INLINE Range share(int64_t count, int index, int threads) {
    Range range = {(long)(count * index / threads), (long)(count * (index + 1) / threads)};
    return range;
}

/* A strip's 16 results of one row to y: as they are (STORE) or on top of what is there (ADD), `width` of them. */
enum { STORE, ADD };
INLINE void put_tile(const float *tile, const float *bias, int mode, int width, float *y) {
    if (width == SPECD_STRIP) {
        UNROLL for (int n = 0; n < SPECD_STRIP; n += W) {
            VF value = vf_load(tile + n);
            if (bias) value = vf_add(value, vf_load(bias + n));
            if (mode == ADD) value = vf_add(vf_load(y + n), value);
            vf_store(y + n, value);
        }
        return;
    }
    for (int n = 0; n < width; n++) {
        float value = bias ? tile[n] + bias[n] : tile[n];
        y[n] = mode == ADD ? y[n] + value : value;
    }
}

/* One strip times all rows; `out` is where its first result of the first row goes. */
static void run_strip(const specd_matrix *matrix, const strip_layout *l, StripKernel kernel, int64_t strip,
                      const Inputs *in, long rows, int mode, float *out, int64_t ld) {
    float tile[MAX_ROWS * SPECD_STRIP];
    Strip w = strip_at(matrix, l, strip);
    int64_t first = strip * SPECD_STRIP, left = matrix->rows - first;
    int width = left < SPECD_STRIP ? (int)left : SPECD_STRIP;
    const float *bias = matrix->bias ? matrix->bias + first : NULL;
    for (long row = 0; row < rows; row += MAX_ROWS) {
        int count = rows - row < MAX_ROWS ? (int)(rows - row) : MAX_ROWS;
        kernel(&w, in, row, count, tile);
        w.next = w.values;
        for (int i = 0; i < count; i++) {
            put_tile(tile + i * SPECD_STRIP, bias, mode, width, out + (row + i) * ld);
        }
    }
}

/* This thread's share of a projection: the strips of all parts, counted through. */
static void run_linear(const specd_linear *linear, int32_t activations, const Inputs *in, long rows, int mode,
                       float *out, int64_t ld, int thread, int threads) {
    int64_t total = 0, base = 0, offset = 0;
    for (int64_t p = 0; p < linear->num_parts; p++) total += strips_of(linear->parts[p].rows);
    Range mine = share(total, thread, threads);
    for (int64_t p = 0; p < linear->num_parts; p++) {
        const specd_matrix *matrix = &linear->parts[p];
        int64_t strips = strips_of(matrix->rows);
        strip_layout l = layout_of(matrix->kind, matrix->cols);
        StripKernel kernel = strip_kernel(matrix->kind, activations);
        for (int64_t s = 0; s < strips; s++) {
            if (base + s < mine.first || base + s >= mine.last) continue;
            run_strip(matrix, &l, kernel, s, in, rows, mode, out + offset + s * SPECD_STRIP, ld);
        }
        base += strips;
        offset += matrix->rows;
    }
}
