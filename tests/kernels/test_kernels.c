/* The kernels on odd sizes and every format, to be run under the address and undefined-behaviour sanitizers.
 *
 * Memory is allocated to the byte, so that a read or write past any end is found. Prints one line and returns 0 when
 * every level gives the same results whatever the number of threads.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "specd_kernels.h"

enum { HIDDEN = 256, INNER = 272, HEADS = 4, KV_HEADS = 2, WIDTH = 16, VOCABULARY = 309, LAYERS = 2, STATES = 3 * HIDDEN };
enum { PAGES = 36, PAGE_SIZE = 5, POSITIONS = 256 };

static unsigned seed = 1;
static unsigned next_random(void) { return (seed = seed * 1664525u + 1013904223u) >> 8; }
static float uniform(void) { return (float)(next_random() % 2001) / 1000.0f - 1.0f; }

static void fail(const char *what) {
    fprintf(stderr, "failed: %s\n", what);
    exit(1);
}

static void *get(size_t size) {
    void *p = aligned_alloc(64, (size + 63) / 64 * 64);
    if (p == NULL) fail("memory");
    return p;
}

static float *floats(int64_t count, float size) {
    float *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = size * uniform();
    return x;
}

/* Random blocks whose f16 scales are small: their exponents are cut. */
static specd_matrix matrix(int32_t kind, int64_t rows, int64_t cols) {
    static const int32_t kinds[] = {SPECD_F32, SPECD_F16, SPECD_BF16, SPECD_Q8_0, SPECD_Q4_0,
                                    SPECD_Q4_1, SPECD_Q4_K, SPECD_Q6_K};
    static const int64_t bytes[] = {4, 2, 2, 34, 18, 20, 144, 210}, columns[] = {1, 1, 1, 32, 32, 32, 256, 256};
    int k = 0;
    while (kinds[k] != kind) k++;
    int64_t blocks = cols / columns[k], size = blocks * bytes[k];
    uint8_t *plain = malloc((size_t)(rows * size));
    for (int64_t i = 0; i < rows * size; i++) plain[i] = (uint8_t)next_random();
    for (int64_t b = 0; b < rows * blocks; b++) {
        uint8_t *block = plain + b * bytes[k];
        float value = 0.1f * uniform();
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (kind == SPECD_F32) memcpy(block, &value, 4);
        else if (kind == SPECD_BF16) memcpy(block, (uint8_t *)&bits + 2, 2);
        else if (kind == SPECD_Q6_K) block[209] = 0x04 | (block[209] & 0x83);
        else block[1] = 0x10 | (block[1] & 0x87);
        if (kind == SPECD_Q4_1 || kind == SPECD_Q4_K) block[3] = 0x10 | (block[3] & 0x87);
    }
    specd_matrix m = {NULL, NULL, rows, cols, specd_strip_bytes(kind, cols), kind, 0};
    uint8_t *data = get((size_t)((rows + 15) / 16 * m.strip_bytes));
    if (specd_pack(kind, plain, rows, cols, data) != SPECD_OK) fail("pack");
    free(plain);
    m.data = data;
    return m;
}

static void free_matrix(const specd_matrix *m) {
    free((void *)m->data);
    free((void *)m->bias);
}

/* Rows taken out of a matrix, one twice, are what they were in it. */
static void check_pick(const specd_matrix *m) {
    enum { PICKED = 19 };
    int64_t rows[PICKED];
    float *row = malloc((size_t)m->cols * 4), *same = malloc((size_t)m->cols * 4);
    uint8_t *data = get((size_t)((PICKED + 15) / 16 * m->strip_bytes));
    for (int64_t i = 0; i < PICKED; i++) rows[i] = i % 2 ? m->rows - 1 - i / 2 : i / 2;
    if (specd_pick(m, rows, PICKED, data) != SPECD_OK) fail("pick");
    specd_matrix picked = {data, NULL, PICKED, m->cols, m->strip_bytes, m->kind, 0};
    for (int i = 0; i < PICKED; i++) {
        specd_unpack_row(m, rows[i], row);
        specd_unpack_row(&picked, i, same);
        if (memcmp(row, same, (size_t)m->cols * 4) != 0) fail("picked row");
    }
    rows[7] = m->rows;
    if (specd_pick(m, rows, PICKED, data) != SPECD_BAD_ARGUMENT) fail("pick beyond the end");
    free(row);
    free(same);
    free(data);
}

static void check_linear(int32_t kind) {
    specd_linear linear = {{matrix(kind, 37, 256), matrix(SPECD_Q8_0, 16, 256)}, 2};
    linear.parts[0].bias = floats(37, 1.0f);
    specd_workspace *workspace = specd_workspace_new();
    float *x = floats(11 * 256, 3.0f), *first = malloc(11 * 53 * 4), *other = malloc(11 * 53 * 4);
    for (int mode = 0; mode < 2; mode++) {
        specd_linear_rows(specd_level("portable"), &linear, mode, x, 11, first, workspace, 1);
        char levels[64];
        strcpy(levels, specd_levels());
        for (char *name = strtok(levels, " "); name != NULL; name = strtok(NULL, " ")) {
            for (int threads = 1; threads < 4; threads += 2) {
                specd_linear_rows(specd_level(name), &linear, mode, x, 11, other, workspace, threads);
                if (memcmp(first, other, 11 * 53 * 4) != 0) fail(name);
            }
        }
    }
    check_pick(&linear.parts[0]);
    free(x);
    free(first);
    free(other);
    specd_workspace_free(workspace);
    free_matrix(&linear.parts[0]);
    free_matrix(&linear.parts[1]);
}

static specd_linear one(specd_matrix m) {
    specd_linear linear = {{m}, 1};
    return linear;
}

/* With three layers' states, a bias, and one of the norms missing. */
static specd_fusion *make_fusion(void) {
    specd_fusion *f = calloc(1, sizeof *f);
    f->embedding_norm = floats(HIDDEN, 1.0f);
    f->proj = one(matrix(SPECD_BF16, HIDDEN, 2 * HIDDEN));
    f->proj.parts[0].bias = floats(HIDDEN, 0.1f);
    f->features = one(matrix(SPECD_Q8_0, HIDDEN, STATES));
    f->hidden_first = 1;
    return f;
}

static specd_model make_model(int32_t activations, const specd_fusion *fusion) {
    specd_layer *layers = calloc(LAYERS, sizeof *layers);
    for (int i = 0; i < LAYERS; i++) {
        specd_layer *l = &layers[i];
        l->input_norm = floats(HIDDEN, 1.0f);
        l->mlp_norm = floats(HIDDEN, 1.0f);
        l->qkv.parts[0] = matrix(SPECD_Q4_K, HEADS * WIDTH, HIDDEN);
        l->qkv.parts[1] = matrix(SPECD_Q4_1, KV_HEADS * WIDTH, HIDDEN);
        l->qkv.parts[2] = matrix(SPECD_Q6_K, KV_HEADS * WIDTH, HIDDEN);
        l->qkv.num_parts = 3;
        l->output = one(matrix(SPECD_Q4_0, HIDDEN, HEADS * WIDTH));
        l->gate = matrix(SPECD_Q8_0, INNER, HIDDEN);
        l->up = matrix(SPECD_BF16, INNER, HIDDEN);
        l->gate.bias = floats(INNER, 0.1f);
        l->down = one(matrix(SPECD_F16, HIDDEN, INNER));
    }
    specd_model m = {layers, floats(HIDDEN, 1.0f), matrix(SPECD_F32, VOCABULARY, HIDDEN),
                     matrix(SPECD_Q8_0, VOCABULARY, HIDDEN), LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, 1e-5f,
                     activations, fusion};
    return m;
}

static void free_model(specd_model *m) {
    for (int i = 0; i < LAYERS; i++) {
        const specd_layer *l = &m->layers[i];
        for (int p = 0; p < 3; p++) free_matrix(&l->qkv.parts[p]);
        free_matrix(&l->output.parts[0]);
        free_matrix(&l->gate);
        free_matrix(&l->up);
        free_matrix(&l->down.parts[0]);
        free((void *)l->input_norm);
        free((void *)l->mlp_norm);
    }
    if (m->fusion) {
        free_matrix(&m->fusion->proj.parts[0]);
        free_matrix(&m->fusion->features.parts[0]);
        free((void *)m->fusion->embedding_norm);
        free((void *)m->fusion);
    }
    free_matrix(&m->embedding);
    free_matrix(&m->head);
    free((void *)m->norm);
    free((void *)m->layers);
}

/* A batch of a prefill row, a decode row and a verify row; with `tree`, of three trees of five nodes. */
enum { ROWS = 3, NODES = 5, MAX_TOKENS = 32 };
typedef struct {
    int32_t query_lens[ROWS], kv_lens[ROWS], indptr[ROWS + 1];
    int32_t indices[PAGES];
    int64_t tokens[MAX_TOKENS], positions[MAX_TOKENS], slots[MAX_TOKENS], parents[ROWS * NODES];
    void *kv[LAYERS];
    float *cosines, *sines;
} Arrays;

static int64_t fill_arrays(Arrays *a, int tree) {
    static const int32_t queries[ROWS] = {11, 1, 6}, lengths[ROWS] = {70, 23, 67};
    int64_t token = 0;
    a->indptr[0] = 0;
    for (int b = 0; b < ROWS; b++) {
        a->query_lens[b] = tree ? NODES : queries[b];
        a->kv_lens[b] = lengths[b];
        int32_t pages = (lengths[b] + PAGE_SIZE - 1) / PAGE_SIZE;
        a->indptr[b + 1] = a->indptr[b] + pages;
        for (int32_t p = a->indptr[b]; p < a->indptr[b + 1]; p++) a->indices[p] = PAGES - 1 - p;
        for (int32_t i = 0; i < a->query_lens[b]; i++, token++) {
            int64_t at = lengths[b] - a->query_lens[b] + i;
            a->tokens[token] = next_random() % VOCABULARY;
            a->positions[token] = at;
            a->slots[token] = (int64_t)a->indices[a->indptr[b] + at / PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE;
        }
        for (int n = 0; n < NODES; n++) a->parents[b * NODES + n] = n - 1 - (n > 2);
    }
    return token;
}

/* The k largest and the sum, of hidden states and of the logits that they give: ordered, and the same bits. */
static void check_top(const specd_kernels *level, const specd_model *model, const float *hidden, const float *logits,
                      int64_t rows, specd_workspace *workspace, int threads) {
    int64_t sizes[] = {1, 5, VOCABULARY}, order[MAX_TOKENS];
    for (int s = 0; s < 3; s++) {
        int64_t k = sizes[s], count = rows * k;
        float *values = malloc((size_t)count * 8);
        int64_t *places = malloc((size_t)count * 16);
        double lse[2 * MAX_TOKENS];
        specd_tops made = {values, places, lse, k}, read = {values + count, places + count, lse + rows, k};
        specd_logits_rows given = {logits, order, rows, VOCABULARY, VOCABULARY};
        for (int64_t row = 0; row < rows; row++) order[row] = row;
        if (specd_top(level, model, hidden, rows, &made, workspace, threads) != SPECD_OK) fail("top");
        if (specd_top_rows(level, &given, &read, workspace, threads) != SPECD_OK) fail("top of rows");
        if (memcmp(values, values + count, (size_t)count * 4) != 0) fail("top values");
        if (memcmp(places, places + count, (size_t)count * 8) != 0) fail("top places");
        if (memcmp(lse, lse + rows, (size_t)rows * 8) != 0) fail("log-sum-exp");
        for (int64_t i = 0; i < count; i++) {
            if (values[i] != logits[i / k * VOCABULARY + places[i]]) fail("top logit");
            if (i % k == 0) continue;
            if (values[i] > values[i - 1] || (values[i] == values[i - 1] && places[i] < places[i - 1])) fail("order");
        }
        made.k = VOCABULARY + 1;
        if (specd_top(level, model, hidden, rows, &made, workspace, threads) != SPECD_BAD_ARGUMENT) fail("bad k");
        free(values);
        free(places);
    }
}

/* values, places: the best logit of every row. */
static void check_forward_top(const specd_kernels *level, const specd_model *model, const specd_batch *batch,
                              const float *values, const int64_t *places, specd_workspace *workspace, int threads) {
    int64_t last = batch->num_tokens - 1, rows[3] = {last, 0, last}, found[3];
    float peaks[3];
    specd_tops tops = {peaks, found, NULL, 1};
    if (specd_forward_top(level, model, batch, rows, 3, &tops, workspace, threads) != SPECD_OK) fail("forward top");
    for (int i = 0; i < 3; i++) {
        if (found[i] != places[rows[i]] || peaks[i] != values[rows[i]]) fail("the best after a forward");
    }
    if (specd_forward_top(level, model, batch, rows, 0, &tops, workspace, threads) != SPECD_OK) fail("no rows");
    rows[1] = last + 1;
    int status = specd_forward_top(level, model, batch, rows, 3, &tops, workspace, threads);
    if (status != SPECD_BAD_ARGUMENT) fail("bad row");
    rows[1] = 0;
    tops.k = 0;
    status = specd_forward_top(level, model, batch, rows, 3, &tops, workspace, threads);
    if (status != SPECD_BAD_ARGUMENT) fail("bad k after a forward");
}

/* state_width: 0, or of the states that a head reads. */
static void check_forward(int32_t activations, int32_t kv_kind, int tree, int64_t state_width) {
    specd_model model = make_model(activations, state_width ? make_fusion() : NULL);
    Arrays a;
    int64_t tokens = fill_arrays(&a, tree), bytes = kv_kind == SPECD_F32 ? 4 : 2;
    size_t layer_bytes = (size_t)(PAGES * 2 * PAGE_SIZE * KV_HEADS * WIDTH * bytes);
    for (int i = 0; i < LAYERS; i++) a.kv[i] = calloc(1, layer_bytes);
    a.cosines = floats(POSITIONS * WIDTH / 2, 1.0f);
    a.sines = floats(POSITIONS * WIDTH / 2, 1.0f);
    size_t size = (size_t)(tokens * HIDDEN) * 4;
    float *first = malloc(size), *hidden = malloc(size), *aux = malloc(size * 3);
    float *states = state_width ? floats(tokens * state_width, 1.0f) : NULL;
    float *logits = malloc(MAX_TOKENS * VOCABULARY * 4);
    float values[MAX_TOKENS];
    int64_t places[MAX_TOKENS];
    specd_batch batch = {.tokens = a.tokens, .positions = a.positions, .write_slots = a.slots,
                         .query_lens = a.query_lens, .kv_lens = a.kv_lens,
                         .kv_indptr = a.indptr, .kv_indices = a.indices,
                         .parents = tree ? a.parents : NULL, .kv = a.kv, .cosines = a.cosines, .sines = a.sines,
                         .num_tokens = tokens, .num_sequences = ROWS, .tree_nodes = tree ? NODES : 0,
                         .page_size = PAGE_SIZE, .num_pages = PAGES, .num_positions = POSITIONS, .kv_kind = kv_kind,
                         .num_aux = 3, .aux_layers = {0, 1, LAYERS}, .hidden = first, .aux = aux, .states = states,
                         .state_width = state_width};
    char levels[64];
    strcpy(levels, specd_levels());
    for (char *name = strtok(levels, " "); name != NULL; name = strtok(NULL, " ")) {
        for (int threads = 1; threads < 4; threads += 2) {
            specd_workspace *workspace = specd_workspace_new();
            if (specd_forward(specd_level(name), &model, &batch, workspace, threads) != SPECD_OK) fail("forward");
            if (batch.hidden == hidden && memcmp(first, hidden, size) != 0) fail(name);
            batch.hidden = hidden;
            specd_logits(specd_level(name), &model, first, tokens, logits, workspace, threads);
            specd_argmax(specd_level(name), &model, first, tokens, values, places, workspace, threads);
            for (int64_t t = 0; t < tokens; t++) {
                if (isfinite(values[t]) && logits[t * VOCABULARY + places[t]] != values[t]) fail("argmax");
                if (!isfinite(values[t])) fail("finite");
            }
            check_top(specd_level(name), &model, first, logits, tokens, workspace, threads);
            check_forward_top(specd_level(name), &model, &batch, values, places, workspace, threads);
            specd_workspace_free(workspace);
        }
    }
    specd_workspace *workspace = specd_workspace_new();
    batch.state_width++;
    int status = specd_forward(specd_level("portable"), &model, &batch, workspace, 1);
    if (state_width && status != SPECD_BAD_ARGUMENT) fail("bad width");
    batch.state_width--;
    batch.states = state_width ? NULL : first;
    if (specd_forward(specd_level("portable"), &model, &batch, workspace, 1) != SPECD_BAD_ARGUMENT) fail("bad states");
    batch.states = states;
    a.slots[1] = PAGES * PAGE_SIZE;
    if (specd_forward(specd_level("portable"), &model, &batch, workspace, 1) != SPECD_BAD_ARGUMENT) fail("bad slot");
    specd_workspace_free(workspace);
    for (int i = 0; i < LAYERS; i++) free(a.kv[i]);
    free(a.cosines);
    free(a.sines);
    free(first);
    free(hidden);
    free(aux);
    free(states);
    free(logits);
    free_model(&model);
}

/* Rows of an odd vocabulary, one that cannot be used among them, and a race of the same numbers as weights. */
static void check_draw(int64_t vocabulary) {
    enum { DRAWS = 7 };
    float *logits = floats(DRAWS * vocabulary, 4.0f), temperature[DRAWS], top_p[DRAWS], min_p[DRAWS];
    int64_t rows[DRAWS], top_k[DRAWS], keys[DRAWS], tokens[DRAWS], first[DRAWS] = {0};
    uint8_t usable[DRAWS];
    for (int64_t i = 0; i < DRAWS * vocabulary; i += 5) logits[i] = 1.0f; /* ties */
    logits[3 * vocabulary] = NAN;
    for (int i = 0; i < DRAWS; i++) {
        rows[i] = DRAWS - 1 - i;
        keys[i] = (int64_t)((uint64_t)next_random() << 40 | next_random());
        temperature[i] = 0.5f + (float)i;
        top_k[i] = i % 2 && i < vocabulary ? i : vocabulary;
        top_p[i] = i % 3 ? 0.6f : INFINITY;
        min_p[i] = i == 4 ? 0.3f : 0.0f;
    }
    specd_draws d = {logits, rows, temperature, top_k, top_p, min_p, keys, tokens, usable, DRAWS, vocabulary, vocabulary};
    for (int weights = 0; weights < 2; weights++) {
        char levels[64];
        int begun = 0;
        strcpy(levels, specd_levels());
        if (weights) {
            d.temperature = NULL;
            for (int64_t i = 0; i < DRAWS * vocabulary; i++) logits[i] = fabsf(logits[i]);
        }
        for (char *name = strtok(levels, " "); name != NULL; name = strtok(NULL, " ")) {
            for (int threads = 1; threads < 4; threads += 2, begun = 1) {
                specd_workspace *workspace = specd_workspace_new();
                if (specd_draw(specd_level(name), &d, workspace, threads) != SPECD_OK) fail("draw");
                for (int i = 0; i < DRAWS; i++) {
                    if (usable[i] != (i != 3)) fail("usable");
                    if (tokens[i] < 0 || tokens[i] >= vocabulary) fail("drawn token");
                }
                if (begun && memcmp(first, tokens, sizeof first) != 0) fail(name);
                memcpy(first, tokens, sizeof first);
                specd_workspace_free(workspace);
            }
        }
    }
    free(logits);
}

/* Three rows: a prompt's chunk, one draft kept of two, and a NaN. */
static void check_step(void) {
    const float values[] = {1, 1, 1, NAN};
    const int64_t best[] = {7, 8, 9, 5}, drafts[] = {-1, -1, 7, 6, -1, -1};
    const int64_t row_index[] = {0, 0, 0, 0, 1, 2, 3, 3, 3}, num_drafts[] = {0, 2, 0}, root_offset[] = {1, 0, 0};
    const uint8_t emits[] = {0, 1, 1};
    const int32_t offsets[] = {0, 2, 5, 6};
    int64_t tokens[9], num_accepted[3], next_token[3], last_row[3], shifted[6], last_rows[3];
    uint8_t failed[3];
    const specd_acceptance step = {values, best, drafts, row_index, num_drafts, emits, root_offset, offsets, 3, 4, 2,
                                   tokens, num_accepted, next_token, last_row, failed};
    if (specd_accept(&step) != SPECD_OK) fail("accept status");
    const int64_t emitted[] = {-1, -1, -1, 7, 8, -1, -1, -1, -1}, rows[] = {1, 3, 5};
    if (memcmp(tokens, emitted, sizeof emitted) != 0 || memcmp(last_row, rows, sizeof rows) != 0) fail("accept");
    if (num_accepted[0] != 0 || num_accepted[1] != 1 || failed[0] || failed[1] || !failed[2]) fail("accepted");
    const int64_t computed[] = {1, 2, 3, 7, 6, 4}, next_prompt[] = {30, -1, -1};
    const specd_shifts shift = {computed, offsets, emits, last_row, next_token, next_prompt, 3, 6, shifted, last_rows};
    if (specd_shift(&shift) != SPECD_OK) fail("shift status");
    const int64_t moved[] = {2, 30, 7, 8, 4, 0};
    if (memcmp(shifted, moved, sizeof moved) != 0 || memcmp(last_rows, rows, sizeof rows) != 0) fail("shift");
    specd_acceptance few = step;
    few.num_rows = 3;
    specd_shifts other = shift;
    other.num_tokens = 5;
    if (specd_accept(&few) == SPECD_OK || specd_shift(&other) == SPECD_OK) fail("indices");
}

int main(void) {
    check_step();
    static const int32_t kinds[] = {SPECD_F32, SPECD_F16, SPECD_BF16, SPECD_Q8_0, SPECD_Q4_0,
                                    SPECD_Q4_1, SPECD_Q4_K, SPECD_Q6_K};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) check_linear(kinds[k]);
    for (int tree = 0; tree < 2; tree++) {
        check_forward(SPECD_FAST, SPECD_F32, tree, 0);
        check_forward(SPECD_EXACT, SPECD_F16, tree, 0);
        check_forward(SPECD_FAST, SPECD_BF16, tree, 0);
        check_forward(SPECD_FAST, SPECD_F32, tree, STATES);
        check_forward(SPECD_EXACT, SPECD_F32, tree, HIDDEN);
    }
    for (int64_t vocabulary = 1; vocabulary < 400; vocabulary += 57) check_draw(vocabulary);
    if (specd_strip_bytes(SPECD_Q4_K, 128) != 0 || specd_strip_bytes(99, 256) != 0) fail("strip bytes");
    if (specd_level("none") != NULL) fail("level");
    printf("levels: %s\n", specd_levels());
    return 0;
}
