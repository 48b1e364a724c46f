/* Vectors of 8 lanes: AVX2, FMA and F16C. See simd_portable.h for what each operation means. */
#include <immintrin.h>

#define UNROLL _Pragma("GCC unroll 32")
#define KERNEL INLINE /* one copy for each number of rows */
#define W 8
#define MAX_ROWS 4 /* activation rows that one pass over a strip serves */
#define MIX_ROWS 4
#define MIX_VECTORS 2

typedef __m256 VF;
typedef __m256i VI;
typedef __m256i VB;
typedef __m256i VS;

INLINE VF vf_zero(void) { return _mm256_setzero_ps(); }
INLINE VF vf_set1(float x) { return _mm256_set1_ps(x); }
INLINE VF vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float *p, VF v) { _mm256_storeu_ps(p, v); }
INLINE VF vf_add(VF a, VF b) { return _mm256_add_ps(a, b); }
INLINE VF vf_sub(VF a, VF b) { return _mm256_sub_ps(a, b); }
INLINE VF vf_mul(VF a, VF b) { return _mm256_mul_ps(a, b); }
INLINE VF vf_div(VF a, VF b) { return _mm256_div_ps(a, b); }
INLINE VF vf_fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
INLINE VF vf_max(VF a, VF b) { return _mm256_max_ps(a, b); }
INLINE VF vf_min(VF a, VF b) { return _mm256_min_ps(a, b); }
INLINE VF vf_abs(VF a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
#define FOLD_HALVES(OP256, OP128, LOW, HIGH)                               \
    __m256 eight = OP256(LOW, HIGH);                                        \
    __m128 s = OP128(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
    s = OP128(s, _mm_movehl_ps(s, s));                                      \
    return _mm_cvtss_f32(OP128(s, _mm_movehdup_ps(s)))
INLINE float vf_total(const VF *v) { FOLD_HALVES(_mm256_add_ps, _mm_add_ps, v[0], v[1]); }
INLINE float vf_peak(const VF *v) { FOLD_HALVES(_mm256_max_ps, _mm_max_ps, v[0], v[1]); }
INLINE VF vf_zero_below(VF v, VF x, float low) {
    return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(low), _CMP_NLT_UQ), v);
}
INLINE VF vf_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE VF vf_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE void vf_to_f16(VF v, uint16_t *p) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE VF vf_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE VF vf_pow2(VF n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127)), 23));
}

INLINE VI vi_zero(void) { return _mm256_setzero_si256(); }
INLINE VI vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
INLINE VI vi_add(VI a, VI b) { return _mm256_add_epi32(a, b); }
INLINE VI vi_mul(VI a, VI b) { return _mm256_mullo_epi32(a, b); }
INLINE VI vi_i8(const int8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE VF vi_f32(VI a) { return _mm256_cvtepi32_ps(a); }
INLINE VI vf_round_i8(VF v, int8_t *p) {
    VI i = _mm256_cvtps_epi32(v);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
    return i;
}
INLINE int32_t vi_sum(VI a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

INLINE VB vb_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE VB vb_low(VB b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
INLINE VB vb_high(VB b) { return _mm256_and_si256(_mm256_srli_epi16(b, 4), _mm256_set1_epi8(15)); }
INLINE VB vb_or_bits(VB low, VB bits, int field) {
    VB two = _mm256_and_si256(_mm256_srli_epi16(bits, 2 * field), _mm256_set1_epi8(3));
    return _mm256_or_si256(low, _mm256_slli_epi16(two, 4));
}

/* Sixteen-bit sums hold a whole group of 4-bit weights (8 * 2 * 15 * 127 = 30480), and of nothing wider. */
INLINE VS vs_zero(void) { return _mm256_setzero_si256(); }
INLINE VS vs_dot(VS s, VB w, int32_t a) {
    return _mm256_add_epi16(s, _mm256_maddubs_epi16(w, _mm256_set1_epi32(a)));
}
INLINE VI vs_sum(VS s) { return _mm256_madd_epi16(s, _mm256_set1_epi16(1)); }
INLINE VI vi_dot_u6(VI s, VB w, int32_t a) {
    return _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(w, _mm256_set1_epi32(a)), _mm256_set1_epi16(1)));
}
/* maddubs wants unsigned weights: their signs go to the activations. */
INLINE VB vb_signed(VB w) { return _mm256_abs_epi8(w); }
INLINE VI vi_signed_start(int32_t minus_sum) {
    (void)minus_sum;
    return _mm256_setzero_si256();
}
INLINE VI vi_dot_s8(VI s, VB prepared, VB w, int32_t a) {
    __m256i pairs = _mm256_maddubs_epi16(prepared, _mm256_sign_epi8(_mm256_set1_epi32(a), w));
    return _mm256_add_epi32(s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

INLINE VF vf_nibble(VB b, int field) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(b, 4 * field), _mm256_set1_epi32(15)));
}
INLINE VF vf_byte(VB b, int field) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(b, 24 - 8 * field), 24));
}

/* rows: 8 vectors -> out[c * ld + r], an 8 x 8 transposition. */
INLINE void vf_transpose(const VF *rows, float *out, long ld) {
    __m256 t[8], u[8];
    UNROLL for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        _mm256_storeu_ps(out + c * ld, _mm256_permute2f128_ps(u[c], u[4 + c], 0x20));
        _mm256_storeu_ps(out + (4 + c) * ld, _mm256_permute2f128_ps(u[c], u[4 + c], 0x31));
    }
}
