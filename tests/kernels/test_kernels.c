/* The kernels on odd sizes and every format, to be run under the address and undefined-behaviour sanitizers.
 *
 * Prints one line and returns 0 when every level gives the same results whatever the number of threads.
 */
#include "test_kernels.h"

static unsigned seed = 1;
unsigned next_random(void) { return (seed = seed * 1664525u + 1013904223u) >> 8; }
static float uniform(void) { return (float)(next_random() % 2001) / 1000.0f - 1.0f; }

void fail(const char *what) {
    fprintf(stderr, "failed: %s\n", what);
    exit(1);
}

void *get(size_t size) {
    void *p = aligned_alloc(64, (size + 63) / 64 * 64);
    if (p == NULL) fail("memory");
    return p;
}

float *floats(int64_t count, float size) {
    float *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = size * uniform();
    return x;
}

/* Random blocks whose f16 scales are small: their exponents are cut. */
specd_matrix matrix(int32_t kind, int64_t rows, int64_t cols) {
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

void free_matrix(const specd_matrix *m) {
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
    specd_draws d = {logits, rows, temperature, top_k, top_p, min_p,
                     keys, tokens, usable, DRAWS, vocabulary, vocabulary};
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
