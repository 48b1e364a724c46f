/* y = W x for a strip of 16 weight rows and up to MAX_ROWS input rows: one function a format and mode.
 *
 * Lanes are weight rows, so no sum crosses lanes. Fast: exact integer dot products of each group, scaled and added in
 * the order of the groups. Exact: a group's products are added in the order of the columns, then the groups. Either
 * way one lane does the same operations whatever W and the number of rows are.
 */

typedef struct {
    const uint8_t *values, *bits, *sub_scale, *sub_min;
    const uint16_t *scale, *minimum;
    const uint8_t *next; /* what to fetch ahead: the next strip, or once that is done this one */
} Strip;

/* tile[r * 16 + lane] = row `row + r` of the inputs times weight row `lane`, r < rows <= MAX_ROWS. */
typedef void (*StripKernel)(const Strip *w, const Inputs *in, long row, int rows, float *tile);

#define ROWS for (int i = 0; i < rows; i++)
#define INPUT(group) (in->q + (row + i) * in->columns + (group) * SPECD_GROUP)
#define AT(group) ((row + i) * in->groups + (group))

/* Asks for the next strip's memory while this one is worked on: group g's share of it, `bytes` a group. */
INLINE void fetch_ahead(const Strip *w, long g, int bytes) {
    UNROLL for (int i = 0; i < bytes; i += 64) __builtin_prefetch(w->next + g * bytes + i);
}

INLINE void start(int rows, VF *acc) { UNROLL ROWS acc[i] = vf_zero(); }
INLINE void finish(int rows, const VF *acc, int part, float *tile) {
    UNROLL ROWS vf_store(tile + i * SPECD_STRIP + part * W, acc[i]);
}

/* sums[i] += the dot products of a group of 4-bit weights with row i, as integers. */
KERNEL void dot_nibbles(int rows, const uint8_t *values, const Inputs *in, long row, long group, VI *sums) {
    VS s[MAX_ROWS];
    UNROLL ROWS s[i] = vs_zero();
    UNROLL for (int quad = 0; quad < 4; quad++) {
        VB both = vb_load(values + quad * 4 * SPECD_STRIP), low = vb_low(both), high = vb_high(both);
        UNROLL ROWS s[i] = vs_dot(s[i], low, load_i32(INPUT(group) + quad * 4));
        UNROLL ROWS s[i] = vs_dot(s[i], high, load_i32(INPUT(group) + quad * 4 + 16));
    }
    UNROLL ROWS sums[i] = vs_sum(s[i]);
}

KERNEL void fast_q4_0(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    VF acc[MAX_ROWS];
    VI sums[MAX_ROWS];
    start(rows, acc);
    for (long g = 0; g < in->groups; g++) {
        fetch_ahead(w, g, 288);
        dot_nibbles(rows, w->values + g * 256 + part * 4 * W, in, row, g, sums);
        VF scale = vf_f16(w->scale + g * SPECD_STRIP + part * W);
        UNROLL ROWS { /* a weight is its nibble less 8 */
            const int32_t *minus = in->minus + 2 * AT(g);
            VI dot = vi_add(sums[i], vi_set1((minus[0] + minus[1]) * 8));
            acc[i] = vf_fma(vf_mul(scale, vf_set1(in->scales[AT(g)])), vi_f32(dot), acc[i]);
        }
    }
    finish(rows, acc, part, tile);
}

KERNEL void fast_q4_1(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    VF acc[MAX_ROWS];
    VI sums[MAX_ROWS];
    start(rows, acc);
    for (long g = 0; g < in->groups; g++) {
        fetch_ahead(w, g, 320);
        dot_nibbles(rows, w->values + g * 256 + part * 4 * W, in, row, g, sums);
        VF scale = vf_f16(w->scale + g * SPECD_STRIP + part * W);
        VF minimum = vf_f16(w->minimum + g * SPECD_STRIP + part * W);
        UNROLL ROWS {
            acc[i] = vf_fma(vf_mul(scale, vf_set1(in->scales[AT(g)])), vi_f32(sums[i]), acc[i]);
            acc[i] = vf_fma(minimum, vf_set1(in->scaled[AT(g)]), acc[i]);
        }
    }
    finish(rows, acc, part, tile);
}

KERNEL void fast_q8_0(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    VF acc[MAX_ROWS];
    start(rows, acc);
    for (long g = 0; g < in->groups; g++) {
        fetch_ahead(w, g, 544);
        VI sums[MAX_ROWS];
        UNROLL ROWS {
            const int32_t *minus = in->minus + 2 * AT(g);
            sums[i] = vi_signed_start(minus[0] + minus[1]);
        }
        UNROLL for (int quad = 0; quad < 8; quad++) {
            VB raw = vb_load(w->values + g * 512 + quad * 4 * SPECD_STRIP + part * 4 * W), prepared = vb_signed(raw);
            UNROLL ROWS sums[i] = vi_dot_s8(sums[i], prepared, raw, load_i32(INPUT(g) + quad * 4));
        }
        VF scale = vf_f16(w->scale + g * SPECD_STRIP + part * W);
        UNROLL ROWS acc[i] = vf_fma(vf_mul(scale, vf_set1(in->scales[AT(g)])), vi_f32(sums[i]), acc[i]);
    }
    finish(rows, acc, part, tile);
}

/* Scale and minimum of a group of Q4_K: a half times six bits, exact in a float. */
INLINE VF q4_k_scale(const Strip *w, int part, long g) {
    return vf_mul(vf_f16(w->scale + g / 8 * SPECD_STRIP + part * W), vf_u8(w->sub_scale + g * SPECD_STRIP + part * W));
}
INLINE VF q4_k_minimum(const Strip *w, int part, long g) {
    VF positive = vf_mul(vf_f16(w->minimum + g / 8 * SPECD_STRIP + part * W),
                         vf_u8(w->sub_min + g * SPECD_STRIP + part * W));
    return vf_sub(vf_zero(), positive);
}

KERNEL void fast_q4_k(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    VF acc[MAX_ROWS];
    VI sums[MAX_ROWS];
    start(rows, acc);
    for (long g = 0; g < in->groups; g++) {
        fetch_ahead(w, g, 296);
        dot_nibbles(rows, w->values + g * 256 + part * 4 * W, in, row, g, sums);
        VF scale = q4_k_scale(w, part, g), minimum = q4_k_minimum(w, part, g);
        UNROLL ROWS {
            acc[i] = vf_fma(vf_mul(scale, vf_set1(in->scales[AT(g)])), vi_f32(sums[i]), acc[i]);
            acc[i] = vf_fma(minimum, vf_set1(in->scaled[AT(g)]), acc[i]);
        }
    }
    finish(rows, acc, part, tile);
}

/* Four columns of 6-bit weights of group g: quad 0..7. */
INLINE VB q6_bytes(const Strip *w, int part, long g, int quad) {
    VB both = vb_load(w->values + g * 256 + quad % 4 * 4 * SPECD_STRIP + part * 4 * W);
    VB bits = vb_load(w->bits + g * 128 + quad % 2 * 4 * SPECD_STRIP + part * 4 * W);
    return vb_or_bits(quad < 4 ? vb_low(both) : vb_high(both), bits, quad / 2);
}

KERNEL void fast_q6_k(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    VF acc[MAX_ROWS];
    start(rows, acc);
    for (long g = 0; g < in->groups; g++) {
        fetch_ahead(w, g, 420);
        VI total[MAX_ROWS];
        UNROLL ROWS total[i] = vi_zero();
        UNROLL for (int half = 0; half < 2; half++) {
            VI sums[MAX_ROWS], sub;
            UNROLL ROWS sums[i] = vi_set1(in->minus[2 * AT(g) + half] * 32); /* a weight is its 6 bits less 32 */
            UNROLL for (int quad = 4 * half; quad < 4 * half + 4; quad++) {
                VB bytes = q6_bytes(w, part, g, quad);
                UNROLL ROWS sums[i] = vi_dot_u6(sums[i], bytes, load_i32(INPUT(g) + quad * 4));
            }
            sub = vi_i8((const int8_t *)w->sub_scale + (2 * g + half) * SPECD_STRIP + part * W);
            UNROLL ROWS total[i] = vi_add(total[i], vi_mul(sub, sums[i]));
        }
        VF scale = vf_f16(w->scale + g / 8 * SPECD_STRIP + part * W);
        UNROLL ROWS acc[i] = vf_fma(vf_mul(scale, vf_set1(in->scales[AT(g)])), vi_f32(total[i]), acc[i]);
    }
    finish(rows, acc, part, tile);
}

/* Exact mode --------------------------------------------------------------------------------------------------- */

#define X(column) in->x[(row + i) * in->columns + (column)]

/* sums[i] = the group's nibbles times row i, column by column. */
KERNEL void sum_nibbles(int rows, const uint8_t *values, const Inputs *in, long row, long group, VF *sums) {
    VB both[4];
    UNROLL for (int quad = 0; quad < 4; quad++) both[quad] = vb_load(values + quad * 4 * SPECD_STRIP);
    UNROLL ROWS sums[i] = vf_zero();
    UNROLL for (int column = 0; column < SPECD_GROUP; column++) {
        VF weight = vf_nibble(both[column / 4 % 4], 2 * (column % 4) + column / 16);
        UNROLL ROWS sums[i] = vf_fma(weight, vf_set1(X(group * SPECD_GROUP + column)), sums[i]);
    }
}

KERNEL void exact_nibbles(int kind, int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    VF acc[MAX_ROWS], sums[MAX_ROWS];
    start(rows, acc);
    for (long g = 0; g < in->groups; g++) {
        fetch_ahead(w, g, 320);
        sum_nibbles(rows, w->values + g * 256 + part * 4 * W, in, row, g, sums);
        long at = g * SPECD_STRIP + part * W;
        VF scale = kind == SPECD_Q4_K ? q4_k_scale(w, part, g) : vf_f16(w->scale + at);
        VF minimum = kind == SPECD_Q4_K   ? q4_k_minimum(w, part, g)
                     : kind == SPECD_Q4_1 ? vf_f16(w->minimum + at)
                                          : vf_mul(vf_set1(-8.0f), scale);
        UNROLL ROWS {
            acc[i] = vf_fma(scale, sums[i], acc[i]);
            acc[i] = vf_fma(minimum, vf_set1(in->sums[AT(g)]), acc[i]);
        }
    }
    finish(rows, acc, part, tile);
}
KERNEL void exact_q4_0(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    exact_nibbles(SPECD_Q4_0, rows, w, part, in, row, tile);
}
KERNEL void exact_q4_1(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    exact_nibbles(SPECD_Q4_1, rows, w, part, in, row, tile);
}
KERNEL void exact_q4_k(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    exact_nibbles(SPECD_Q4_K, rows, w, part, in, row, tile);
}

KERNEL void exact_q8_0(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    VF acc[MAX_ROWS], sums[MAX_ROWS];
    start(rows, acc);
    for (long g = 0; g < in->groups; g++) {
        fetch_ahead(w, g, 544);
        UNROLL ROWS sums[i] = vf_zero();
        UNROLL for (int quad = 0; quad < 8; quad++) {
            VB bytes = vb_load(w->values + g * 512 + quad * 4 * SPECD_STRIP + part * 4 * W);
            UNROLL for (int c = 0; c < 4; c++) {
                VF weight = vf_byte(bytes, c);
                UNROLL ROWS sums[i] = vf_fma(weight, vf_set1(X(g * SPECD_GROUP + quad * 4 + c)), sums[i]);
            }
        }
        VF scale = vf_f16(w->scale + g * SPECD_STRIP + part * W);
        UNROLL ROWS acc[i] = vf_fma(scale, sums[i], acc[i]);
    }
    finish(rows, acc, part, tile);
}

KERNEL void exact_q6_k(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    VF acc[MAX_ROWS], sums[MAX_ROWS];
    start(rows, acc);
    for (long g = 0; g < in->groups; g++) {
        fetch_ahead(w, g, 420);
        VF scale = vf_f16(w->scale + g / 8 * SPECD_STRIP + part * W);
        UNROLL for (int half = 0; half < 2; half++) {
            UNROLL ROWS sums[i] = vf_zero();
            UNROLL for (int quad = 4 * half; quad < 4 * half + 4; quad++) {
                VB bytes = q6_bytes(w, part, g, quad);
                UNROLL for (int c = 0; c < 4; c++) {
                    VF weight = vf_sub(vf_byte(bytes, c), vf_set1(32.0f));
                    UNROLL ROWS sums[i] = vf_fma(weight, vf_set1(X(g * SPECD_GROUP + quad * 4 + c)), sums[i]);
                }
            }
            VI sub = vi_i8((const int8_t *)w->sub_scale + (2 * g + half) * SPECD_STRIP + part * W);
            VF both = vf_mul(scale, vi_f32(sub));
            UNROLL ROWS acc[i] = vf_fma(both, sums[i], acc[i]);
        }
    }
    finish(rows, acc, part, tile);
}

INLINE VF vf_value(int kind, const void *values, long index) {
    if (kind == SPECD_F32) return vf_load((const float *)values + index);
    return kind == SPECD_F16 ? vf_f16((const uint16_t *)values + index) : vf_bf16((const uint16_t *)values + index);
}

KERNEL void floats(int kind, int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    VF acc[MAX_ROWS], sums[MAX_ROWS];
    start(rows, acc);
    for (long g = 0; g < in->groups; g++) {
        fetch_ahead(w, g, kind == SPECD_F32 ? 2048 : 1024);
        UNROLL ROWS sums[i] = vf_zero();
        UNROLL for (int column = 0; column < SPECD_GROUP; column++) {
            VF weight = vf_value(kind, w->values, (g * SPECD_GROUP + column) * SPECD_STRIP + part * W);
            UNROLL ROWS sums[i] = vf_fma(weight, vf_set1(X(g * SPECD_GROUP + column)), sums[i]);
        }
        UNROLL ROWS acc[i] = vf_add(acc[i], sums[i]);
    }
    finish(rows, acc, part, tile);
}
KERNEL void floats_f32(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    floats(SPECD_F32, rows, w, part, in, row, tile);
}
KERNEL void floats_f16(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    floats(SPECD_F16, rows, w, part, in, row, tile);
}
KERNEL void floats_bf16(int rows, const Strip *w, int part, const Inputs *in, long row, float *tile) {
    floats(SPECD_BF16, rows, w, part, in, row, tile);
}

#undef X
#undef AT
#undef INPUT
#undef ROWS
