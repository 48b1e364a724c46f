/* A tiny model, and a head, on every level: forwards, logits, the best of them, and what is refused. */
#include "test_kernels.h"

enum { INNER = 272, HEADS = 4, KV_HEADS = 2, WIDTH = 16, VOCABULARY = 309, LAYERS = 2 };
enum { PAGES = 36, PAGE_SIZE = 5, POSITIONS = 256 };

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


/* Everything that a forward of the arrays reads and writes; `hidden` is written by the first one. */
static specd_batch make_batch(Arrays *a, int32_t kv_kind, int tree, int64_t state_width) {
    int64_t tokens = fill_arrays(a, tree), bytes = kv_kind == SPECD_F32 ? 4 : 2;
    for (int i = 0; i < LAYERS; i++) a->kv[i] = calloc(1, (size_t)(PAGES * 2 * PAGE_SIZE * KV_HEADS * WIDTH * bytes));
    a->cosines = floats(POSITIONS * WIDTH / 2, 1.0f);
    a->sines = floats(POSITIONS * WIDTH / 2, 1.0f);
    return (specd_batch){.tokens = a->tokens, .positions = a->positions, .write_slots = a->slots,
                         .query_lens = a->query_lens, .kv_lens = a->kv_lens,
                         .kv_indptr = a->indptr, .kv_indices = a->indices,
                         .parents = tree ? a->parents : NULL, .kv = a->kv, .cosines = a->cosines, .sines = a->sines,
                         .num_tokens = tokens, .num_sequences = ROWS, .tree_nodes = tree ? NODES : 0,
                         .page_size = PAGE_SIZE, .num_pages = PAGES, .num_positions = POSITIONS, .kv_kind = kv_kind,
                         .num_aux = 3, .aux_layers = {0, 1, LAYERS},
                         .hidden = malloc((size_t)(tokens * HIDDEN) * 4),
                         .aux = malloc((size_t)(tokens * HIDDEN) * 4 * 3),
                         .states = state_width ? floats(tokens * state_width, 1.0f) : NULL,
                         .state_width = state_width};
}

static void free_batch(specd_batch *batch, Arrays *a) {
    for (int i = 0; i < LAYERS; i++) free(a->kv[i]);
    free(a->cosines);
    free(a->sines);
    free(batch->hidden);
    free(batch->aux);
    free((void *)batch->states);
}

/* expected: the hidden states of another level, or NULL. */
static void check_level(const char *name, const specd_model *model, const specd_batch *batch, const float *expected,
                        int threads) {
    const specd_kernels *level = specd_level(name);
    specd_workspace *workspace = specd_workspace_new();
    int64_t tokens = batch->num_tokens, places[MAX_TOKENS];
    float *logits = malloc(MAX_TOKENS * VOCABULARY * 4), values[MAX_TOKENS];
    if (specd_forward(level, model, batch, workspace, threads) != SPECD_OK) fail("forward");
    if (expected && memcmp(expected, batch->hidden, (size_t)(tokens * HIDDEN) * 4) != 0) fail(name);
    specd_logits(level, model, batch->hidden, tokens, logits, workspace, threads);
    specd_argmax(level, model, batch->hidden, tokens, values, places, workspace, threads);
    for (int64_t t = 0; t < tokens; t++) {
        if (!isfinite(values[t])) fail("finite");
        if (logits[t * VOCABULARY + places[t]] != values[t]) fail("argmax");
    }
    check_top(level, model, batch->hidden, logits, tokens, workspace, threads);
    check_forward_top(level, model, batch, values, places, workspace, threads);
    specd_workspace_free(workspace);
    free(logits);
}

static void check_refusals(const specd_model *model, const specd_batch *batch, Arrays *a) {
    const specd_kernels *level = specd_level("portable");
    specd_workspace *workspace = specd_workspace_new();
    specd_batch other = *batch;
    other.state_width++;
    int status = specd_forward(level, model, &other, workspace, 1);
    if (batch->states && status != SPECD_BAD_ARGUMENT) fail("bad width");
    other = *batch;
    other.states = batch->states ? NULL : batch->hidden;
    if (specd_forward(level, model, &other, workspace, 1) != SPECD_BAD_ARGUMENT) fail("bad states");
    a->slots[1] = PAGES * PAGE_SIZE;
    if (specd_forward(level, model, batch, workspace, 1) != SPECD_BAD_ARGUMENT) fail("bad slot");
    specd_workspace_free(workspace);
}

void check_forward(int32_t activations, int32_t kv_kind, int tree, int64_t state_width) {
    specd_model model = make_model(activations, state_width ? make_fusion() : NULL);
    Arrays a;
    specd_batch batch = make_batch(&a, kv_kind, tree, state_width);
    size_t size = (size_t)(batch.num_tokens * HIDDEN) * 4;
    float *first = malloc(size);
    char levels[64];
    int begun = 0;
    strcpy(levels, specd_levels());
    for (char *name = strtok(levels, " "); name != NULL; name = strtok(NULL, " ")) {
        for (int threads = 1; threads < 4; threads += 2, begun = 1) {
            check_level(name, &model, &batch, begun ? first : NULL, threads);
            memcpy(first, batch.hidden, size);
        }
    }
    check_refusals(&model, &batch, &a);
    free(first);
    free_batch(&batch, &a);
    free_model(&model);
}
