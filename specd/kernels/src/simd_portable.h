/* The vector operations in plain C, which the compiler may vectorise; also what they mean.
 *
 * VF: W floats. VI: W 32-bit integers. VB: W lanes of four bytes (four columns of one weight row each).
 * VS: running dot products of one group of 4-bit weights, VI after vs_sum.
 */
#include <math.h>
#include <string.h>

/* No copies for each number of rows here: without vector registers they gain nothing and take minutes to compile. */
#define UNROLL
#define KERNEL static
#define W 16
#define MAX_ROWS 4 /* activation rows that one pass over a strip serves */
#define MIX_ROWS 2
#define MIX_VECTORS 1

typedef struct { float v[W]; } VF;
typedef struct { int32_t v[W]; } VI;
typedef struct { uint8_t v[4 * W]; } VB;
typedef VI VS;

#define LANES for (int l = 0; l < W; l++)
#define MAP(TYPE, EXPRESSION) \
    TYPE r;                   \
    LANES r.v[l] = (EXPRESSION); \
    return r

INLINE VF vf_set1(float x) { MAP(VF, x); }
INLINE VF vf_zero(void) { return vf_set1(0.0f); }
INLINE VF vf_load(const float *p) { MAP(VF, p[l]); }
INLINE void vf_store(float *p, VF v) { LANES p[l] = v.v[l]; }
INLINE VF vf_add(VF a, VF b) { MAP(VF, a.v[l] + b.v[l]); }
INLINE VF vf_sub(VF a, VF b) { MAP(VF, a.v[l] - b.v[l]); }
INLINE VF vf_mul(VF a, VF b) { MAP(VF, a.v[l] * b.v[l]); }
INLINE VF vf_div(VF a, VF b) { MAP(VF, a.v[l] / b.v[l]); }
INLINE VF vf_fma(VF a, VF b, VF c) { MAP(VF, fmaf(a.v[l], b.v[l], c.v[l])); } /* one rounding */
INLINE VF vf_max(VF a, VF b) { MAP(VF, a.v[l] > b.v[l] ? a.v[l] : b.v[l]); }  /* b when either is NaN */
INLINE VF vf_min(VF a, VF b) { MAP(VF, a.v[l] < b.v[l] ? a.v[l] : b.v[l]); }
INLINE VF vf_abs(VF a) { MAP(VF, fabsf(a.v[l])); }
/* Of 16 lanes in 16 / W vectors: halves onto halves, so that every W gives the same sum. */
INLINE float vf_total(const VF *v) {
    VF s = v[0];
    for (int width = 8; width > 0; width /= 2) {
        for (int l = 0; l < width; l++) s.v[l] += s.v[l + width];
    }
    return s.v[0];
}
INLINE float vf_peak(const VF *v) {
    VF m = v[0];
    for (int width = 8; width > 0; width /= 2) {
        for (int l = 0; l < width; l++) m.v[l] = m.v[l] > m.v[l + width] ? m.v[l] : m.v[l + width];
    }
    return m.v[0];
}
/* v, but 0 where x < low; a NaN in x keeps v. */
INLINE VF vf_zero_below(VF v, VF x, float low) { MAP(VF, x.v[l] < low ? 0.0f : v.v[l]); }
INLINE VF vf_f16(const uint16_t *p) { MAP(VF, f16_value(p[l])); }
INLINE VF vf_bf16(const uint16_t *p) { MAP(VF, bf16_value(p[l])); }
INLINE void vf_to_f16(VF v, uint16_t *p) { LANES p[l] = f16_bits(v.v[l]); }
INLINE VF vf_u8(const uint8_t *p) { MAP(VF, (float)p[l]); }
/* 2^n for whole n in [-126, 127]; anything for a NaN. */
INLINE VF vf_pow2(VF n) { MAP(VF, bits_value((uint32_t)((n.v[l] == n.v[l] ? (int32_t)n.v[l] : 0) + 127) << 23)); }

INLINE VI vi_set1(int32_t x) { MAP(VI, x); }
INLINE VI vi_zero(void) { return vi_set1(0); }
INLINE VI vi_add(VI a, VI b) { MAP(VI, a.v[l] + b.v[l]); }
INLINE VI vi_mul(VI a, VI b) { MAP(VI, a.v[l] * b.v[l]); }
INLINE VI vi_i8(const int8_t *p) { MAP(VI, p[l]); }
INLINE VF vi_f32(VI a) { MAP(VF, (float)a.v[l]); }
/* Rounds to nearest even, |v| <= 127, stores bytes and gives the integers. The addition leaves them in the low bits. */
INLINE VI vf_round_i8(VF v, int8_t *p) {
    VI r;
    LANES {
        r.v[l] = (int32_t)((v.v[l] + ROUND) - ROUND);
        p[l] = (int8_t)r.v[l];
    }
    return r;
}
INLINE int32_t vi_sum(VI a) {
    int32_t s = 0;
    LANES s += a.v[l];
    return s;
}

INLINE VB vb_load(const uint8_t *p) {
    VB r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
#define MAP_BYTES(EXPRESSION) \
    VB r;                     \
    for (int l = 0; l < 4 * W; l++) r.v[l] = (uint8_t)(EXPRESSION); \
    return r
INLINE VB vb_low(VB b) { MAP_BYTES(b.v[l] & 15); }
INLINE VB vb_high(VB b) { MAP_BYTES(b.v[l] >> 4); }
/* low plus two bits of `bits` (field 0..3) as bits 4 and 5. */
INLINE VB vb_or_bits(VB low, VB bits, int field) { MAP_BYTES(low.v[l] | ((bits.v[l] >> (2 * field)) & 3) << 4); }

/* Per lane s + w[0] a[0] + .. + w[3] a[3]: a is four signed bytes. */
INLINE VI dot_unsigned(VI s, VB w, int32_t a) {
    int8_t x[4];
    memcpy(x, &a, sizeof x);
    LANES s.v[l] += w.v[4 * l] * x[0] + w.v[4 * l + 1] * x[1] + w.v[4 * l + 2] * x[2] + w.v[4 * l + 3] * x[3];
    return s;
}
INLINE VS vs_zero(void) { return vi_zero(); }
INLINE VS vs_dot(VS s, VB w, int32_t a) { return dot_unsigned(s, w, a); }   /* w <= 15 */
INLINE VI vs_sum(VS s) { return s; }
INLINE VI vi_dot_u6(VI s, VB w, int32_t a) { return dot_unsigned(s, w, a); } /* w <= 63 */
/* Signed weights: start, then vi_dot_s8 with vb_signed(w) for each four columns. minus_sum: -(sum of the a's). */
INLINE VB vb_signed(VB w) { return w; }
INLINE VI vi_signed_start(int32_t minus_sum) {
    (void)minus_sum;
    return vi_zero();
}
INLINE VI vi_dot_s8(VI s, VB prepared, VB w, int32_t a) {
    (void)prepared;
    int8_t x[4];
    memcpy(x, &a, sizeof x);
    LANES for (int c = 0; c < 4; c++) s.v[l] += (int8_t)w.v[4 * l + c] * x[c];
    return s;
}

/* Nibble `field` (0..7, the lowest first) of each lane's four bytes; signed byte `field` (0..3). */
INLINE VF vf_nibble(VB b, int field) { MAP(VF, (float)((b.v[4 * l + field / 2] >> (4 * (field % 2))) & 15)); }
INLINE VF vf_byte(VB b, int field) { MAP(VF, (float)(int8_t)b.v[4 * l + field]); }

/* rows: W vectors -> out[c * ld + r]. */
INLINE void vf_transpose(const VF *rows, float *out, long ld) {
    for (int c = 0; c < W; c++) LANES out[c * ld + l] = rows[l].v[c];
}
