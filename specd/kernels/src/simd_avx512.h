/* Vectors of 16 lanes: AVX-512 F, BW, VL, DQ and VNNI. See simd_portable.h for what each operation means. */
#include <immintrin.h>

#define UNROLL _Pragma("GCC unroll 32")
#define KERNEL INLINE /* one copy for each number of rows */
#define W 16
#define MAX_ROWS 8 /* activation rows that one pass over a strip serves */
#define MIX_ROWS 4
#define MIX_VECTORS 4

typedef __m512 VF;
typedef __m512i VI;
typedef __m512i VB;
typedef __m512i VS;

INLINE VF vf_zero(void) { return _mm512_setzero_ps(); }
INLINE VF vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE VF vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, VF v) { _mm512_storeu_ps(p, v); }
INLINE VF vf_add(VF a, VF b) { return _mm512_add_ps(a, b); }
INLINE VF vf_sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
INLINE VF vf_mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
INLINE VF vf_div(VF a, VF b) { return _mm512_div_ps(a, b); }
INLINE VF vf_fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
INLINE VF vf_max(VF a, VF b) { return _mm512_max_ps(a, b); }
INLINE VF vf_min(VF a, VF b) { return _mm512_min_ps(a, b); }
INLINE VF vf_abs(VF a) { return _mm512_abs_ps(a); }
#define FOLD_HALVES(OP256, OP128, LOW, HIGH)                               \
    __m256 eight = OP256(LOW, HIGH);                                        \
    __m128 s = OP128(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
    s = OP128(s, _mm_movehl_ps(s, s));                                      \
    return _mm_cvtss_f32(OP128(s, _mm_movehdup_ps(s)))
INLINE float vf_total(const VF *v) { FOLD_HALVES(_mm256_add_ps, _mm_add_ps, _mm512_castps512_ps256(*v), _mm512_extractf32x8_ps(*v, 1)); }
INLINE float vf_peak(const VF *v) { FOLD_HALVES(_mm256_max_ps, _mm_max_ps, _mm512_castps512_ps256(*v), _mm512_extractf32x8_ps(*v, 1)); }
INLINE VF vf_zero_below(VF v, VF x, float low) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_NLT_UQ), v);
}
INLINE VF vf_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE VF vf_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE void vf_to_f16(VF v, uint16_t *p) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE VF vf_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE VF vf_pow2(VF n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvttps_epi32(n), _mm512_set1_epi32(127)), 23));
}

INLINE VI vi_zero(void) { return _mm512_setzero_si512(); }
INLINE VI vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE VI vi_add(VI a, VI b) { return _mm512_add_epi32(a, b); }
INLINE VI vi_mul(VI a, VI b) { return _mm512_mullo_epi32(a, b); }
INLINE VI vi_i8(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE VF vi_f32(VI a) { return _mm512_cvtepi32_ps(a); }
INLINE VI vf_round_i8(VF v, int8_t *p) {
    VI i = _mm512_cvtps_epi32(v);
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(i));
    return i;
}
INLINE int32_t vi_sum(VI a) { return _mm512_reduce_add_epi32(a); }

INLINE VB vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE VB vb_low(VB b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
INLINE VB vb_high(VB b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15)); }
INLINE VB vb_or_bits(VB low, VB bits, int field) {
    VB two = _mm512_and_si512(_mm512_srli_epi16(bits, (unsigned)(2 * field)), _mm512_set1_epi8(3));
    return _mm512_or_si512(low, _mm512_slli_epi16(two, 4));
}

INLINE VS vs_zero(void) { return _mm512_setzero_si512(); }
INLINE VS vs_dot(VS s, VB w, int32_t a) { return _mm512_dpbusd_epi32(s, w, _mm512_set1_epi32(a)); }
INLINE VI vs_sum(VS s) { return s; }
INLINE VI vi_dot_u6(VI s, VB w, int32_t a) { return _mm512_dpbusd_epi32(s, w, _mm512_set1_epi32(a)); }
/* dpbusd wants unsigned weights: 128 is added to each, and 128 times the activations' sum taken off at the start. */
INLINE VB vb_signed(VB w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
INLINE VI vi_signed_start(int32_t minus_sum) { return _mm512_set1_epi32(minus_sum * 128); }
INLINE VI vi_dot_s8(VI s, VB prepared, VB w, int32_t a) {
    (void)w;
    return _mm512_dpbusd_epi32(s, prepared, _mm512_set1_epi32(a));
}

INLINE VF vf_nibble(VB b, int field) {
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(b, (unsigned)(4 * field)), table);
}
INLINE VF vf_byte(VB b, int field) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(b, (unsigned)(24 - 8 * field)), 24));
}

/* rows: 16 vectors -> out[c * ld + r], a 16 x 16 transposition. */
INLINE void vf_transpose(const VF *rows, float *out, long ld) {
    __m512 t[16], u[16];
    UNROLL for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        u[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        u[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        u[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        u[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88), b = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
        __m512 d = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd), e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
        _mm512_storeu_ps(out + c * ld, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_storeu_ps(out + (4 + c) * ld, _mm512_shuffle_f32x4(d, e, 0x88));
        _mm512_storeu_ps(out + (8 + c) * ld, _mm512_shuffle_f32x4(a, b, 0xdd));
        _mm512_storeu_ps(out + (12 + c) * ld, _mm512_shuffle_f32x4(d, e, 0xdd));
    }
}
