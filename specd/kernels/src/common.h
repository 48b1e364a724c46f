/* Scalar conversions and the layout of packed strips: shared by every file of the library. */
#ifndef SPECD_COMMON_H
#define SPECD_COMMON_H

#include <string.h>

#include "specd_kernels.h"

#ifndef INLINE /* a build under sanitizers says `static inline`: forced, it takes minutes */
#define INLINE static inline __attribute__((always_inline))
#endif

/* Adding and taking away 1.5 * 2^23 rounds |x| < 2^22 to the nearest whole number, ties to even. */
#define ROUND 12582912.0f

INLINE float bits_value(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE float bf16_value(uint16_t h) { return bits_value((uint32_t)h << 16); }

/* Exact: every half is a float. */
INLINE float f16_value(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    if (exponent == 31) return bits_value(sign | 0x7f800000 | fraction << 13);
    if (exponent != 0) return bits_value(sign | (exponent + 112) << 23 | fraction << 13);
    float small = (float)fraction * 5.9604644775390625e-8f; /* 2^-24 */
    return sign ? -small : small;
}

INLINE uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* To nearest, ties to even. */
INLINE uint16_t bf16_bits(float x) {
    uint32_t bits = float_bits(x);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t f16_bits(float x) {
    uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000;
    float size = bits_value(bits & 0x7fffffff);
    if (x != x) return (uint16_t)(sign | 0x7e00);
    if (size >= 65520.0f) return (uint16_t)(sign | 0x7c00);
    if (size < 6.103515625e-5f) { /* below 2^-14: adding 2^-1 leaves whole multiples of 2^-24 in the low bits */
        return (uint16_t)(sign | (float_bits(size + 0.5f) - 0x3f000000));
    }
    uint32_t magnitude = bits & 0x7fffffff;
    return (uint16_t)(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

INLINE uint16_t load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

INLINE int32_t load_i32(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE int64_t groups_of(int64_t cols) { return (cols + SPECD_GROUP - 1) / SPECD_GROUP; }
INLINE int64_t strips_of(int64_t rows) { return (rows + SPECD_STRIP - 1) / SPECD_STRIP; }
INLINE int is_quantised(int32_t kind) { return kind != SPECD_F32 && kind != SPECD_F16 && kind != SPECD_BF16; }

/* Where the planes of a strip lie. 16 rows side by side in each:
 *
 *   floats   values [cols, 16]
 *   Q8_0     values [group, quad 8, row, column 4] signed        scale [group, row]
 *   Q4_0/1   values [group, quad 4, row, column 4]: quad q in the low nibble, quad q + 4 in the high one
 *                                                                scale [group, row]; Q4_1 minimum [group, row]
 *   Q4_K     values as Q4_1; scale, minimum [block of 8 groups, row] f16; sub_scale, sub_min [group, row] u8
 *   Q6_K     values: low nibbles as Q4_0; bits [group, 2, row, column 4]: quad h + 2 f in field f of part h;
 *            scale [block, row] f16; sub_scale [group, half, row] i8
 */
typedef struct {
    int64_t scale, minimum, sub_scale, sub_min, bits; /* offsets in bytes; values are at 0 */
    int64_t bytes;
} strip_layout;

INLINE strip_layout layout_of(int32_t kind, int64_t cols) {
    int64_t groups = groups_of(cols), blocks = groups / 8, row16 = SPECD_STRIP * 2;
    strip_layout l = {0, 0, 0, 0, 0, 0};
    switch (kind) {
        case SPECD_F32: l.bytes = groups * SPECD_GROUP * SPECD_STRIP * 4; break;
        case SPECD_F16:
        case SPECD_BF16: l.bytes = groups * SPECD_GROUP * SPECD_STRIP * 2; break;
        case SPECD_Q8_0:
            l.scale = groups * 512;
            l.bytes = l.scale + groups * row16;
            break;
        case SPECD_Q4_0:
        case SPECD_Q4_1:
            l.scale = groups * 256;
            l.minimum = l.scale + groups * row16;
            l.bytes = kind == SPECD_Q4_1 ? l.minimum + groups * row16 : l.minimum;
            break;
        case SPECD_Q4_K:
            l.scale = groups * 256;
            l.minimum = l.scale + blocks * row16;
            l.sub_scale = l.minimum + blocks * row16;
            l.sub_min = l.sub_scale + groups * SPECD_STRIP;
            l.bytes = l.sub_min + groups * SPECD_STRIP;
            break;
        case SPECD_Q6_K:
            l.bits = groups * 256;
            l.sub_scale = l.bits + groups * 128;
            l.scale = l.sub_scale + groups * 2 * SPECD_STRIP;
            l.bytes = l.scale + blocks * row16;
            break;
        default: break;
    }
    l.bytes = (l.bytes + 63) / 64 * 64;
    return l;
}

#endif
