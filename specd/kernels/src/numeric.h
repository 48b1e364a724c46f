/* Elementwise functions, sums in a fixed order, norms and the quantisation of activations. Included by each level. */

/* e^x to about one unit in the last place (Cephes' polynomial); 0 below -87.3, e^88 above 88; NaN stays NaN. */
INLINE VF vf_exp(VF x) {
    const float low = -87.3f;
    VF clamped = vf_min(vf_set1(88.0f), vf_max(vf_set1(low), x));
    VF n = vf_sub(vf_add(vf_mul(clamped, vf_set1(1.44269504f)), vf_set1(ROUND)), vf_set1(ROUND));
    VF r = vf_fma(n, vf_set1(-0.693359375f), clamped);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    VF p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_fma(vf_mul(r, r), p, vf_add(r, vf_set1(1.0f)));
    return vf_zero_below(vf_mul(p, vf_pow2(n)), x, low);
}

INLINE VF vf_silu(VF x) { return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), x)))); }

enum { NEEDS_X = 1, NEEDS_Q = 2 };

static void quantise_group(const Inputs *in, int64_t row, int64_t group) {
    const float *x = in->x + row * in->columns + group * SPECD_GROUP;
    int8_t *q = in->q + row * in->columns + group * SPECD_GROUP;
    int64_t at = row * in->groups + group;
    VF zeros[16 / W], peak[16 / W];
    UNROLL for (int v = 0; v < 16 / W; v++) zeros[v] = peak[v] = vf_zero();
    UNROLL for (int i = 0; i < SPECD_GROUP / W; i++) {
        VF value = vf_load(x + i * W);
        peak[i % (16 / W)] = vf_max(peak[i % (16 / W)], vf_abs(value));
        zeros[i % (16 / W)] = vf_fma(value, vf_zero(), zeros[i % (16 / W)]); /* 0, or NaN where x is not finite */
    }
    float largest = vf_peak(peak), bad = vf_total(zeros);
    if (!(bad == 0.0f)) { /* the row's results must be NaN, and no other row's */
        memset(q, 0, SPECD_GROUP);
        in->scales[at] = in->scaled[at] = bad;
        in->minus[2 * at] = in->minus[2 * at + 1] = 0;
        return;
    }
    VF inverse = vf_set1(largest > 1e-30f ? 127.0f / largest : 0.0f); /* smaller ones would overflow the division */
    int32_t sums[2];
    UNROLL for (int half = 0; half < 2; half++) {
        VI sum = vi_zero();
        UNROLL for (int i = 0; i < 16 / W; i++) {
            int at_column = half * 16 + i * W;
            sum = vi_add(sum, vf_round_i8(vf_mul(vf_load(x + at_column), inverse), q + at_column));
        }
        sums[half] = vi_sum(sum);
    }
    in->scales[at] = largest / 127.0f;
    in->scaled[at] = in->scales[at] * (float)(sums[0] + sums[1]);
    in->minus[2 * at] = -sums[0];
    in->minus[2 * at + 1] = -sums[1];
}

static void sum_group(const Inputs *in, int64_t row, int64_t group) {
    const float *x = in->x + row * in->columns + group * SPECD_GROUP;
    VF sums[16 / W];
    UNROLL for (int v = 0; v < 16 / W; v++) sums[v] = vf_add(vf_load(x + v * W), vf_load(x + 16 + v * W));
    in->sums[row * in->groups + group] = vf_total(sums);
}

INLINE void prepare_group(const Inputs *in, int64_t row, int64_t group, int needs) {
    if (needs & NEEDS_X) sum_group(in, row, group);
    if (needs & NEEDS_Q) quantise_group(in, row, group);
}

/* Row `row` of in->x is there, up to `width`; fills the padding and what the kernels read. */
static void prepare_row(const Inputs *in, int64_t row, int64_t width, int needs) {
    float *x = in->x + row * in->columns;
    for (int64_t i = width; i < in->columns; i++) x[i] = 0.0f;
    for (int64_t group = 0; group < in->groups; group++) prepare_group(in, row, group, needs);
}

/* out = weight * x / sqrt(mean(x^2) + eps), width floats; x itself without a weight. out may be x. */
static void rms_norm(const float *x, const float *weight, int64_t width, float eps, float *out) {
    if (weight == NULL) {
        if (out != x) memcpy(out, x, (size_t)width * sizeof(float));
        return;
    }
    float lanes[16] = {0};
    int64_t whole = width / 16 * 16;
    VF sums[16 / W];
    UNROLL for (int i = 0; i < 16 / W; i++) sums[i] = vf_zero();
    for (int64_t k = 0; k < whole; k += 16) {
        UNROLL for (int i = 0; i < 16 / W; i++) {
            VF v = vf_load(x + k + i * W);
            sums[i] = vf_fma(v, v, sums[i]);
        }
    }
    if (whole < width) {
        UNROLL for (int i = 0; i < 16 / W; i++) vf_store(lanes + i * W, sums[i]);
        for (int64_t k = whole; k < width; k++) lanes[k - whole] = fmaf(x[k], x[k], lanes[k - whole]);
        UNROLL for (int i = 0; i < 16 / W; i++) sums[i] = vf_load(lanes + i * W);
    }
    float factor = 1.0f / sqrtf(vf_total(sums) / (float)width + eps);
    for (int64_t k = 0; k < width; k++) out[k] = weight[k] * (x[k] * factor);
}
