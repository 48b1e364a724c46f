/* Paged attention of decode, verify, prefill and token trees.
 *
 * A context is cut into segments of 64 by absolute position, and the segments' results (maximum, sum, weighted values)
 * are merged in their order. Inside a segment scores add over the head's columns and values over the keys, each in
 * order, a query at a time in its own lanes' accumulator. So a query's result does not depend on who shares its block.
 * A tree's query attends to the chain it would be after acceptance: the prefix, then its ancestors by depth; its result
 * is that chain's, bit for bit.
 *
 * A key or value beyond what a query sees is never read into its sums: junk there may be NaN.
 */

typedef struct {
    const specd_model *model;
    const specd_batch *batch;
    const float *qkv; /* [T, ld] rotated queries and keys, values */
    int64_t ld;
    float *out; /* rows of heads * D floats, out_ld apart */
    int64_t out_ld;
    float *partial;
    const uint8_t *kv; /* this layer's pages */
    int64_t group;     /* query heads of a key head */
    int split;         /* items are single segments, merged afterwards */
} Attend;

INLINE int64_t kind_bytes(int32_t kind) { return kind == SPECD_F32 ? 4 : 2; }

/* c[i] += sum over k of a[i][k] * b[k], the lanes from `lane` on; k in order. */
KERNEL void mix_tile(int kind, int rows, int vectors, const float *a, long lda, int first, int last,
                     const uint8_t *const *b, long lane, float *c, long ldc) {
    VF acc[MIX_ROWS][MIX_VECTORS];
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int v = 0; v < vectors; v++) acc[i][v] = vf_load(c + i * ldc + lane + v * W);
    }
    for (int k = first; k < last; k++) {
        UNROLL for (int v = 0; v < vectors; v++) {
            VF value = vf_value(kind, b[k], lane + v * W);
            UNROLL for (int i = 0; i < rows; i++) acc[i][v] = vf_fma(vf_set1(a[i * lda + k]), value, acc[i][v]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int v = 0; v < vectors; v++) vf_store(c + i * ldc + lane + v * W, acc[i][v]);
    }
}

KERNEL void mix_rows(int kind, int rows, const float *a, long lda, int first, int last, const uint8_t *const *b,
                     long lanes, float *c, long ldc) {
    long lane = 0;
    for (; lane + MIX_VECTORS * W <= lanes; lane += MIX_VECTORS * W) {
        mix_tile(kind, rows, MIX_VECTORS, a, lda, first, last, b, lane, c, ldc);
    }
    for (; lane < lanes; lane += W) mix_tile(kind, rows, 1, a, lda, first, last, b, lane, c, ldc);
}

#define MIX(NAME, KIND)                                                                                        \
    static void NAME(int rows, const float *a, long lda, int first, int last, const uint8_t *const *b,         \
                     long lanes, float *c, long ldc) {                                                         \
        switch (rows) {                                                                                        \
            case 1: mix_rows(KIND, 1, a, lda, first, last, b, lanes, c, ldc); break;                           \
            case 2: mix_rows(KIND, 2, a, lda, first, last, b, lanes, c, ldc); break;                           \
            case 3: mix_rows(KIND, MIX_ROWS < 3 ? 1 : 3, a, lda, first, last, b, lanes, c, ldc); break;        \
            default: mix_rows(KIND, MIX_ROWS, a, lda, first, last, b, lanes, c, ldc);                          \
        }                                                                                                      \
    }
MIX(mix_f32, SPECD_F32)
MIX(mix_f16, SPECD_F16)
MIX(mix_bf16, SPECD_BF16)

typedef void (*Mix)(int, const float *, long, int, int, const uint8_t *const *, long, float *, long);
INLINE Mix mix_of(int32_t kind) { return kind == SPECD_F32 ? mix_f32 : kind == SPECD_F16 ? mix_f16 : mix_bf16; }

/* Where the keys of context positions base .. base + count lie; their values are `side` bytes further. */
static void key_rows(const Attend *at, const Block *block, const int32_t *path, int64_t head, int64_t base, int count,
                     const uint8_t **rows) {
    const specd_batch *batch = at->batch;
    const int32_t *pages = batch->kv_indices + batch->kv_indptr[block->sequence];
    int64_t row = at->model->head_dim * kind_bytes(batch->kv_kind), slot = at->model->kv_heads * row;
    int64_t page = base / batch->page_size, offset = base % batch->page_size;
    for (int j = 0; j < count; j++) {
        if (base + j >= block->prefix) {
            int64_t place = block->prefix + path[base + j - block->prefix];
            page = place / batch->page_size;
            offset = place % batch->page_size;
        }
        rows[j] = at->kv + (pages[page] * 2 * batch->page_size + offset) * slot + head * row;
        if (++offset == batch->page_size) {
            offset = 0;
            page++;
        }
    }
}

/* keys[d, j] = key j's column d. Lanes past `count` repeat the first key: they are finite if it is, and never used. */
static void transpose_keys(int32_t kind, const uint8_t *const *rows, int count, int64_t width, int64_t side,
                           float *keys) {
    int64_t bytes = width * kind_bytes(kind);
    for (int j = 0; j < SPECD_SEGMENT; j += W) {
        const uint8_t *from[W];
        for (int l = 0; l < W; l++) {
            from[l] = rows[j + l < count ? j + l : 0];
            for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(from[l] + side + b, 0, 2); /* the values */
        }
        for (long d = 0; d < width; d += W) {
            VF tile[W];
            for (int l = 0; l < W; l++) tile[l] = vf_value(kind, from[l], d);
            vf_transpose(tile, keys + d * SPECD_SEGMENT + j, SPECD_SEGMENT);
        }
    }
}

/* Scores of one query in one segment -> weights e^(score - maximum), of the first `seen` keys. */
static void weigh(float *scores, int seen, float scale, float *maximum, float *sum) {
    VF s[SPECD_SEGMENT / W], peak[16 / W], total[16 / W], factor = vf_set1(scale);
    for (int j = seen; j < SPECD_SEGMENT; j++) scores[j] = -INFINITY;
    UNROLL for (int v = 0; v < SPECD_SEGMENT / W; v++) s[v] = vf_mul(vf_load(scores + v * W), factor);
    UNROLL for (int v = 0; v < 16 / W; v++) peak[v] = s[v];
    UNROLL for (int v = 16 / W; v < SPECD_SEGMENT / W; v++) peak[v % (16 / W)] = vf_max(peak[v % (16 / W)], s[v]);
    *maximum = vf_peak(peak);
    VF top = vf_set1(*maximum);
    UNROLL for (int v = 0; v < SPECD_SEGMENT / W; v++) s[v] = vf_exp(vf_sub(s[v], top));
    UNROLL for (int v = 0; v < 16 / W; v++) total[v] = vf_zero();
    UNROLL for (int v = 0; v < SPECD_SEGMENT / W; v++) {
        vf_store(scores + v * W, s[v]);
        total[v % (16 / W)] = vf_add(total[v % (16 / W)], s[v]);
    }
    *sum = vf_total(total);
}

/* Results of queries first .. last - 1, [D] value sums, the maximum and the sum each: `merged` takes in `segment`. */
static void merge(float *merged, const float *segment, int64_t first, int64_t last, int64_t width, float *factors) {
    int64_t size = width + 2, padded = (last - first + 15) / 16 * 16;
    float *keep = factors, *take = factors + padded;
    for (int64_t q = 0; q < padded; q++) keep[q] = take[q] = 0.0f;
    for (int64_t q = first; q < last; q++) {
        float *old = merged + q * size + width;
        float own = segment[q * size + width], top = *old > own ? *old : own;
        keep[q - first] = *old - top;
        take[q - first] = own - top;
        *old = top;
    }
    for (int64_t q = 0; q < 2 * padded; q += W) vf_store(factors + q, vf_exp(vf_load(factors + q)));
    for (int64_t q = first; q < last; q++) {
        float *into = merged + q * size;
        const float *from = segment + q * size;
        VF kept = vf_set1(keep[q - first]), taken = vf_set1(take[q - first]);
        for (int64_t d = 0; d < width; d += W) {
            vf_store(into + d, vf_fma(vf_load(into + d), kept, vf_mul(vf_load(from + d), taken)));
        }
        into[width + 1] = fmaf(into[width + 1], keep[q - first], from[width + 1] * take[q - first]);
    }
}

static void merge_start(float *merged, int64_t width) {
    for (int64_t d = 0; d < width; d++) merged[d] = 0.0f;
    merged[width] = -INFINITY;
    merged[width + 1] = 0.0f;
}

static void write_out(const Attend *at, const Block *block, int64_t head, int64_t query, const float *merged) {
    int64_t width = at->model->head_dim, token = block->token + query / at->group;
    float *out = at->out + token * at->out_ld + (head * at->group + query % at->group) * width;
    VF total = vf_set1(merged[width + 1]);
    for (int64_t d = 0; d < width; d += W) vf_store(out + d, vf_div(vf_load(merged + d), total));
}

/* How many keys of the segment at `base` a query sees. */
INLINE int seen_by(const Attend *at, const Block *block, int64_t query, int64_t base, int64_t length) {
    int64_t seen = (block->prefix < length ? length : block->position + query / at->group + 1) - base;
    return seen < 0 ? 0 : seen > SPECD_SEGMENT ? SPECD_SEGMENT : (int)seen;
}

/* The first query that sees something of a segment; the later ones do too. */
static int64_t first_seeing(const Attend *at, const Block *block, int64_t queries, int64_t segment, int64_t length) {
    int64_t query = 0;
    while (query < queries && seen_by(at, block, query, segment * SPECD_SEGMENT, length) == 0) query++;
    return query;
}

/* Value sums of the block's queries in one segment, into scratch->segment. */
static void mix_values(const Attend *at, const Block *block, const AttendScratch *s, const uint8_t *const *values,
                       int64_t base, int64_t length) {
    int64_t width = at->model->head_dim, queries = block->count * at->group;
    Mix mix = mix_of(at->batch->kv_kind);
    for (int64_t q = 0; q < queries; q += MIX_ROWS) {
        int rows = queries - q < MIX_ROWS ? (int)(queries - q) : MIX_ROWS;
        int shared = seen_by(at, block, q, base, length); /* later queries see at least as much */
        float *out = s->segment + q * (width + 2);
        const float *weights = s->scores + q * SPECD_SEGMENT;
        for (int i = 0; i < rows; i++) memset(out + i * (width + 2), 0, (size_t)width * sizeof *out);
        mix(rows, weights, SPECD_SEGMENT, 0, shared, values, width, out, width + 2);
        for (int i = 1; i < rows; i++) {
            int seen = seen_by(at, block, q + i, base, length);
            if (seen == shared) continue;
            mix(1, weights + i * SPECD_SEGMENT, SPECD_SEGMENT, shared, seen, values, width, out + i * (width + 2),
                width + 2);
        }
    }
}

/* One segment for all queries of a block and one key head. */
static void attend_segment(const Attend *at, const Block *block, const AttendScratch *s, int64_t head, int64_t index,
                           int64_t length) {
    const uint8_t *rows[SPECD_SEGMENT];
    int64_t width = at->model->head_dim, base = index * SPECD_SEGMENT, queries = block->count * at->group;
    int64_t left = length - base;
    int count = left < SPECD_SEGMENT ? (int)left : SPECD_SEGMENT;
    float scale = 1.0f / sqrtf((float)width);
    key_rows(at, block, s->path, head, base, count, rows);
    int64_t side = at->batch->page_size * at->model->kv_heads * width * kind_bytes(at->batch->kv_kind);
    transpose_keys(at->batch->kv_kind, rows, count, width, side, s->keys);
    memset(s->scores, 0, (size_t)(queries * SPECD_SEGMENT) * sizeof(float));
    for (int64_t q = 0; q < queries; q += MIX_ROWS) {
        int some = queries - q < MIX_ROWS ? (int)(queries - q) : MIX_ROWS;
        mix_f32(some, s->queries + q * width, width, 0, (int)width, s->columns, SPECD_SEGMENT,
                s->scores + q * SPECD_SEGMENT, SPECD_SEGMENT);
    }
    for (int64_t q = 0; q < queries; q++) {
        float *state = s->segment + q * (width + 2) + width;
        int seen = seen_by(at, block, q, base, length);
        if (seen > 0) weigh(s->scores + q * SPECD_SEGMENT, seen, scale, state, state + 1);
    }
    for (int j = 0; j < count; j++) rows[j] += side;
    mix_values(at, block, s, rows, base, length);
}

/* Context length of a block's last query, and for trees its path. */
static int64_t block_length(const Attend *at, const Block *block, int32_t *path) {
    const specd_batch *batch = at->batch;
    if (batch->parents == NULL) return block->position + block->count;
    const int64_t *parents = batch->parents + block->sequence * batch->tree_nodes;
    int64_t depth = 0;
    for (int64_t node = block->position; node >= 0; node = parents[node]) depth++;
    int64_t at_depth = depth;
    for (int64_t node = block->position; node >= 0; node = parents[node]) path[--at_depth] = (int32_t)node;
    return block->prefix + depth;
}

static void load_queries(const Attend *at, const Block *block, const AttendScratch *s, int64_t head) {
    int64_t width = at->model->head_dim;
    for (int64_t i = 0; i < block->count; i++) {
        memcpy(s->queries + i * at->group * width, at->qkv + (block->token + i) * at->ld + head * at->group * width,
               (size_t)(at->group * width) * sizeof(float));
    }
    for (int64_t d = 0; d < width; d++) s->columns[d] = (const uint8_t *)(s->keys + d * SPECD_SEGMENT);
}

/* Item `index` of a block: one key head, and when split one segment of it. */
static void attend_item(const Attend *at, const Block *block, const AttendScratch *s, int64_t index) {
    int64_t width = at->model->head_dim, queries = block->count * at->group, size = width + 2;
    int64_t head = at->split ? index / block->segments : index;
    int64_t length = block_length(at, block, s->path);
    load_queries(at, block, s, head);
    if (at->split) {
        attend_segment(at, block, s, head, index % block->segments, length);
        memcpy(at->partial + block->partial + index * queries * size, s->segment,
               (size_t)(queries * size) * sizeof(float));
        return;
    }
    for (int64_t q = 0; q < queries; q++) merge_start(s->merged + q * size, width);
    for (int64_t segment = 0; segment * SPECD_SEGMENT < length; segment++) {
        attend_segment(at, block, s, head, segment, length);
        merge(s->merged, s->segment, first_seeing(at, block, queries, segment, length), queries, width, s->factors);
    }
    for (int64_t q = 0; q < queries; q++) write_out(at, block, head, q, s->merged + q * size);
}

/* Merges the partial results of one key head of a block. */
static void merge_item(const Attend *at, const Block *block, const AttendScratch *s, int64_t head) {
    int64_t width = at->model->head_dim, queries = block->count * at->group, size = width + 2;
    int64_t length = block_length(at, block, s->path);
    for (int64_t q = 0; q < queries; q++) merge_start(s->merged + q * size, width);
    for (int64_t segment = 0; segment < block->segments; segment++) {
        const float *partial = at->partial + block->partial + (head * block->segments + segment) * queries * size;
        merge(s->merged, partial, first_seeing(at, block, queries, segment, length), queries, width, s->factors);
    }
    for (int64_t q = 0; q < queries; q++) write_out(at, block, head, q, s->merged + q * size);
}
