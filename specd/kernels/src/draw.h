/* Drawing a token from a row of logits: temperature, top-k, top-p and min-p, then an exponential race.
 *
 * A row's token is a function of that row alone, the same on every level: maxima are exact, sums have one order
 * (element i goes to lane i mod 16, or from the largest down), thresholds are decided by value, so that tokens tied at
 * a boundary are all kept. The noise is that of specd/sampling/noise.py: SplitMix64's integers of key and token, and
 * e = -log(1 - u). Since e >= u, a weight w that does not beat the best so far with w / u cannot with w / e, so that
 * few logarithms are needed.
 */

enum { DRAW_BLOCK = 64, RADIX_BITS = 11, RADIX = 1 << RADIX_BITS };

#define GOLDEN 0x9E3779B97F4A7C15u
#define SLACK 1.00001f /* for the rounding of u, of the logarithm and of the quotient */

/* One thread's. Sizes are of the vocabulary rounded up to whole blocks. */
typedef struct {
    float *weights;
    float *tops;     /* [blocks] largest logit of each block */
    float *heaviest; /* [blocks] largest weight of each block; 0: the block's weights were not written */
    uint32_t *keys, *spare;
} DrawScratch;

/* Orders like the float, NaN aside. */
INLINE uint32_t order_key(float x) {
    uint32_t bits = float_bits(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
INLINE float key_value(uint32_t key) { return bits_value(key >> 31 ? key & 0x7fffffffu : ~key); }

/* Ascending. */
static void sort_keys(uint32_t *keys, uint32_t *spare, int64_t count) {
    for (int shift = 0; shift < 32; shift += RADIX_BITS) {
        int64_t starts[RADIX + 1] = {0};
        for (int64_t i = 0; i < count; i++) starts[(keys[i] >> shift & (RADIX - 1)) + 1]++;
        for (int r = 0; r < RADIX; r++) starts[r + 1] += starts[r];
        for (int64_t i = 0; i < count; i++) spare[starts[keys[i] >> shift & (RADIX - 1)]++] = keys[i];
        memcpy(keys, spare, (size_t)count * sizeof *keys);
    }
}

/* The 64 logits (or weights) of a block: of the last one a copy, filled up with `filling`. */
INLINE const float *draw_block(const float *row, int64_t block, int64_t vocabulary, float filling, float *copy) {
    int64_t at = block * DRAW_BLOCK, left = vocabulary - at;
    if (left >= DRAW_BLOCK) return row + at;
    for (int64_t i = 0; i < DRAW_BLOCK; i++) copy[i] = i < left ? row[at + i] : filling;
    return copy;
}

/* The largest of each block and of the row; NaN when the row has any. */
static float find_tops(const float *row, int64_t vocabulary, float filling, float *tops) {
    float peak = -INFINITY, copy[DRAW_BLOCK];
    int bad = 0;
    for (int64_t b = 0; b * DRAW_BLOCK < vocabulary; b++) {
        const float *x = draw_block(row, b, vocabulary, filling, copy);
        VF top[16 / W];
        UNROLL for (int v = 0; v < 16 / W; v++) top[v] = vf_load(x + v * W);
        UNROLL for (int i = 16; i < DRAW_BLOCK; i += W) {
            top[i / W % (16 / W)] = vf_max(vf_load(x + i), top[i / W % (16 / W)]);
        }
        for (int i = 0; i < DRAW_BLOCK; i++) bad |= x[i] != x[i];
        tops[b] = vf_peak(top);
        if (tops[b] > peak) peak = tops[b];
    }
    return bad ? NAN : peak;
}

/* The k-th largest logit of the row, k < vocabulary. */
static float kth_largest(const float *row, int64_t vocabulary, int64_t k, const DrawScratch *s) {
    float copy[DRAW_BLOCK], least = -INFINITY;
    int64_t blocks = (vocabulary + DRAW_BLOCK - 1) / DRAW_BLOCK, count = 0;
    if (k <= blocks) { /* k blocks have a logit that large, so k logits are */
        for (int64_t b = 0; b < blocks; b++) s->keys[b] = order_key(s->tops[b]);
        sort_keys(s->keys, s->spare, blocks);
        least = key_value(s->keys[blocks - k]);
    }
    for (int64_t b = 0; b < blocks; b++) {
        if (s->tops[b] < least) continue;
        const float *x = draw_block(row, b, vocabulary, -INFINITY, copy);
        int64_t real = vocabulary - b * DRAW_BLOCK;
        for (int i = 0; i < DRAW_BLOCK && i < real; i++) {
            if (x[i] >= least) s->keys[count++] = order_key(x[i]);
        }
    }
    sort_keys(s->keys, s->spare, count);
    return key_value(s->keys[count - k]);
}

/* e^((x - peak) / temperature) of the logits that reach `least`; the sum of all. */
static double weigh_row(const float *row, int64_t vocabulary, float peak, float temperature, float least,
                        const DrawScratch *s) {
    double lanes[16] = {0};
    float copy[DRAW_BLOCK];
    VF top = vf_set1(peak), divisor = vf_set1(temperature);
    for (int64_t b = 0; b * DRAW_BLOCK < vocabulary; b++) {
        float *w = s->weights + b * DRAW_BLOCK;
        s->heaviest[b] = 0.0f;
        if (s->tops[b] < least || (s->tops[b] - peak) / temperature < -88.0f) continue; /* all zero */
        const float *x = draw_block(row, b, vocabulary, -INFINITY, copy);
        UNROLL for (int i = 0; i < DRAW_BLOCK; i += W) {
            vf_store(w + i, vf_exp(vf_div(vf_sub(vf_load(x + i), top), divisor)));
        }
        for (int i = 0; i < DRAW_BLOCK; i++) w[i] = x[i] >= least && x[i] > -INFINITY ? w[i] : 0.0f;
        VF most[16 / W];
        UNROLL for (int v = 0; v < 16 / W; v++) most[v] = vf_load(w + v * W);
        UNROLL for (int i = 16; i < DRAW_BLOCK; i += W) {
            most[i / W % (16 / W)] = vf_max(vf_load(w + i), most[i / W % (16 / W)]);
        }
        s->heaviest[b] = vf_peak(most);
        for (int i = 0; i < DRAW_BLOCK; i += 16) {
            for (int l = 0; l < 16; l++) lanes[l] += (double)w[i + l];
        }
    }
    for (int width = 8; width > 0; width /= 2) {
        for (int l = 0; l < width; l++) lanes[l] += lanes[l + width];
    }
    return lanes[0];
}

/* The least weight kept by top-p: the weights above it sum to less than `mass`. */
static float mass_floor(int64_t vocabulary, double mass, const DrawScratch *s) {
    for (float least = 0x1p-10f;; least = least > 0x1p-40f ? least * 0x1p-15f : 0.0f) {
        int64_t count = 0;
        for (int64_t b = 0; b * DRAW_BLOCK < vocabulary; b++) {
            const float *w = s->weights + b * DRAW_BLOCK;
            if (s->heaviest[b] == 0.0f || s->heaviest[b] < least) continue;
            for (int i = 0; i < DRAW_BLOCK; i++) {
                if (w[i] >= least && w[i] > 0.0f) s->keys[count++] = float_bits(w[i]); /* in order: they are positive */
            }
        }
        sort_keys(s->keys, s->spare, count);
        double above = 0.0;
        float kept = 1.0f;
        for (int64_t i = count - 1; i >= 0;) {
            uint32_t key = s->keys[i];
            if (above >= mass) return kept;
            kept = bits_value(key);
            for (; i >= 0 && s->keys[i] == key; i--) above += (double)kept;
        }
        if (above >= mass || least == 0.0f) return kept;
    }
}

INLINE uint64_t split_mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* Exp(1) noise of 53 bits: see noise.py. */
static float exponential(uint64_t bits) {
    float u = ((float)(int64_t)(bits >> 11) + 0.5f) * 0x1p-53f, most = 1.0f - 0x1p-24f;
    return -log1pf(-(u < most ? u : most));
}

/* argmax of weight / noise over the weights that reach `least`, the lowest token among equals. */
static int64_t race(int64_t vocabulary, float least, uint64_t key, const DrawScratch *s) {
    float best = 0.0f;
    int64_t winner = 0;
    for (int64_t b = 0; b * DRAW_BLOCK < vocabulary; b++) {
        const float *w = s->weights + b * DRAW_BLOCK;
        if (s->heaviest[b] < least || s->heaviest[b] == 0.0f) continue;
        uint64_t bits[DRAW_BLOCK], first = key + (uint64_t)(b * DRAW_BLOCK + 1) * GOLDEN;
        float u[DRAW_BLOCK], limit = best * 0x1p-24f;
        int some = 0;
        for (uint64_t i = 0; i < DRAW_BLOCK; i++) bits[i] = split_mix(first + i * GOLDEN);
        for (int i = 0; i < DRAW_BLOCK; i++) u[i] = (float)(int32_t)(bits[i] >> 40); /* 2^24 u, rounded down */
        for (int i = 0; i < DRAW_BLOCK; i++) some |= (w[i] * SLACK >= limit * u[i]) & (w[i] >= least);
        if (!some) continue;
        for (int i = 0; i < DRAW_BLOCK; i++) {
            if (w[i] < least || w[i] * SLACK < best * 0x1p-24f * u[i]) continue;
            float score = w[i] / exponential(bits[i]);
            if (score > best) {
                best = score;
                winner = b * DRAW_BLOCK + i;
            }
        }
    }
    return winner;
}

/* Weights as they are given. */
static void race_row(const specd_draws *d, int64_t row, const DrawScratch *s) {
    const float *from = d->logits + (d->rows ? d->rows[row] : row) * d->stride;
    float peak = find_tops(from, d->vocabulary, 0.0f, s->heaviest);
    memcpy(s->weights, from, (size_t)d->vocabulary * sizeof *from);
    for (int64_t i = d->vocabulary; i % DRAW_BLOCK; i++) s->weights[i] = 0.0f;
    d->usable[row] = peak > 0.0f && peak < INFINITY;
    d->tokens[row] = d->usable[row] ? race(d->vocabulary, 0.0f, (uint64_t)d->keys[row], s) : 0;
}

static void draw_row(const specd_draws *d, int64_t row, const DrawScratch *s) {
    const float *logits = d->logits + (d->rows ? d->rows[row] : row) * d->stride;
    int64_t vocabulary = d->vocabulary, k = d->top_k[row];
    float peak = find_tops(logits, vocabulary, -INFINITY, s->tops), least = -INFINITY, floor = d->min_p[row];
    d->usable[row] = fabsf(peak / d->temperature[row]) < INFINITY; /* not NaN either; as the reference divides first */
    d->tokens[row] = 0;
    if (!d->usable[row]) return;
    if (k < vocabulary) least = kth_largest(logits, vocabulary, k, s);
    double total = weigh_row(logits, vocabulary, peak, d->temperature[row], least, s);
    if (d->top_p[row] < INFINITY) {
        float kept = mass_floor(vocabulary, (double)d->top_p[row] * total, s);
        floor = kept > floor ? kept : floor;
    }
    d->tokens[row] = race(vocabulary, floor, (uint64_t)d->keys[row], s);
}

static void run_draw(Job *job, int thread, int threads) {
    const specd_draws *d = job->draws;
    Range mine = share(d->num_rows, thread, threads);
    int64_t blocks = (d->vocabulary + DRAW_BLOCK - 1) / DRAW_BLOCK, each = blocks * (3 * DRAW_BLOCK + 2);
    float *memory = job->scratch_floats + thread * each;
    DrawScratch s = {memory, memory + blocks * DRAW_BLOCK, memory + blocks * (DRAW_BLOCK + 1), NULL, NULL};
    s.keys = (uint32_t *)(void *)(memory + blocks * (DRAW_BLOCK + 2));
    s.spare = s.keys + blocks * DRAW_BLOCK;
    for (long row = mine.first; row < mine.last; row++) {
        if (d->temperature) draw_row(d, row, &s);
        else race_row(d, row, &s);
    }
}
