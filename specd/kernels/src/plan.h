/* The memory of a call, counted first and then given out; and how attention is cut up. Included by run.c. */

enum { SMALL_BATCH_ITEMS = 4 };

/* Memory of one call: first counted with data == NULL, then given out. */
typedef struct {
    uint8_t *data;
    size_t used;
} Arena;

static void *take(Arena *arena, int64_t count, size_t size) {
    void *at = arena->data ? arena->data + arena->used : NULL;
    arena->used += ((size_t)count * size + 63) / 64 * 64;
    return at;
}

static void plan_inputs(Arena *arena, Inputs *in, int64_t rows, int64_t width) {
    in->groups = groups_of(width);
    in->columns = in->groups * SPECD_GROUP;
    in->x = take(arena, rows * in->columns, sizeof(float));
    in->q = take(arena, rows * in->columns, 1);
    in->sums = take(arena, rows * in->groups, sizeof(float));
    in->scales = take(arena, rows * in->groups, sizeof(float));
    in->scaled = take(arena, rows * in->groups, sizeof(float));
    in->minus = take(arena, rows * in->groups * 2, sizeof(int32_t));
}

/* The same memory read as rows of another width. */
static Inputs as_width(const Inputs *in, int64_t width) {
    Inputs other = *in;
    other.groups = groups_of(width);
    other.columns = other.groups * SPECD_GROUP;
    return other;
}

static int64_t block_tokens(const specd_model *model, const specd_batch *batch) {
    int64_t group = model->heads / model->kv_heads;
    return batch->parents != NULL || group >= BLOCK_QUERIES ? 1 : BLOCK_QUERIES / group;
}

static int64_t count_blocks(const specd_batch *batch, int64_t tokens) {
    int64_t count = 0;
    for (int64_t b = 0; b < batch->num_sequences; b++) count += (batch->query_lens[b] + tokens - 1) / tokens;
    return count;
}

static int64_t depth_of(const int64_t *parents, int64_t node) {
    int64_t depth = 0;
    for (; node >= 0; node = parents[node]) depth++;
    return depth;
}

/* Fills the blocks; returns how many partial results they need when split. */
static int64_t plan_blocks(Job *job, int64_t tokens) {
    const specd_batch *batch = job->batch;
    int64_t group = job->model->heads / job->model->kv_heads, token = 0, n = 0, partial = 0, item = 0;
    for (int64_t b = 0; b < batch->num_sequences; b++) {
        for (int64_t i = 0; i < batch->query_lens[b]; i += tokens, n++) {
            Block *block = &job->blocks[n];
            int64_t left = batch->query_lens[b] - i, start = batch->kv_lens[b] - batch->query_lens[b];
            block->sequence = (int32_t)b;
            block->count = (int32_t)(left < tokens ? left : tokens);
            block->token = token + i;
            block->position = batch->parents ? i : start + i;
            block->prefix = batch->parents ? start : INT64_MAX;
            int64_t length = batch->parents ? start + depth_of(batch->parents + b * batch->tree_nodes, i)
                                            : block->position + block->count;
            block->segments = (length + SPECD_SEGMENT - 1) / SPECD_SEGMENT;
            block->first_item = item;
            block->partial = partial;
            item += job->model->kv_heads * (job->split ? block->segments : 1);
            partial += job->model->kv_heads * block->segments * block->count * group * (job->model->head_dim + 2);
        }
        token += batch->query_lens[b];
    }
    job->num_items = item;
    return job->split ? partial : 0;
}

static void plan_scratch(Arena *arena, AttendScratch *s, const specd_model *model, const specd_batch *batch) {
    int64_t width = model->head_dim, queries = block_tokens(model, batch) * (model->heads / model->kv_heads);
    s->keys = take(arena, width * SPECD_SEGMENT, sizeof(float));
    s->queries = take(arena, queries * width, sizeof(float));
    s->scores = take(arena, queries * SPECD_SEGMENT, sizeof(float));
    s->segment = take(arena, queries * (width + 2), sizeof(float));
    s->merged = take(arena, queries * (width + 2), sizeof(float));
    s->factors = take(arena, 2 * queries + 32, sizeof(float)); /* two halves, each padded to a multiple of 16 */
    s->columns = take(arena, width, sizeof *s->columns);
    s->path = take(arena, batch->tree_nodes + 1, sizeof *s->path);
}

/* The MLP's inside; a head's fusion is over before it and lies in the same memory. */
static void plan_wide(Arena *arena, Job *job) {
    const specd_model *model = job->model;
    int64_t joined = model->fusion ? 2 * model->hidden : 0, states = model->fusion ? job->batch->state_width : 0;
    int64_t width = model->inner;
    if (joined > width) width = joined;
    if (states > width) width = states;
    plan_inputs(arena, &job->wide, job->num_rows, width);
    job->joined = as_width(&job->wide, joined);
    job->states = as_width(&job->wide, states);
    job->wide = as_width(&job->wide, model->inner);
}

static void plan_forward(Arena *arena, Job *job, int threads) {
    const specd_model *model = job->model;
    const specd_batch *batch = job->batch;
    int64_t rows = batch->num_tokens, query = model->heads * model->head_dim, tokens = block_tokens(model, batch);
    AttendScratch spare;
    job->num_rows = rows;
    job->num_blocks = count_blocks(batch, tokens);
    job->split = threads > 1 && job->num_blocks * model->kv_heads < (int64_t)threads * SMALL_BATCH_ITEMS;
    job->blocks = take(arena, job->num_blocks, sizeof *job->blocks);
    job->next = take(arena, model->num_layers, sizeof *job->next);
    job->scratch = take(arena, threads, sizeof *job->scratch);
    for (int t = 0; t < threads; t++) plan_scratch(arena, arena->data ? &job->scratch[t] : &spare, model, batch);
    plan_inputs(arena, &job->narrow, rows, query > model->hidden ? query : model->hidden);
    job->heads = as_width(&job->narrow, query);
    job->narrow = as_width(&job->narrow, model->hidden);
    plan_wide(arena, job);
    job->x = take(arena, rows * model->hidden, sizeof(float));
    job->qkv = take(arena, rows * (query + 2 * model->kv_heads * model->head_dim), sizeof(float));
}

static void plan_tops(Arena *arena, Job *job, int threads) {
    int64_t rows = job->num_rows, k = job->tops->k, lists = threads * rows;
    int64_t segments = (job->vocabulary + SPECD_TOP_SEGMENT - 1) / SPECD_TOP_SEGMENT;
    if (!job->given) {
        plan_inputs(arena, &job->narrow, rows, job->model->hidden);
        job->tiles = take(arena, lists * SPECD_TOP_SEGMENT, sizeof(float));
    }
    job->peaks = take(arena, rows * segments, sizeof(float));
    job->sums = take(arena, rows * segments, sizeof(float));
    job->top_values = take(arena, lists * k, sizeof(float));
    job->top_places = take(arena, lists * k, sizeof(int64_t));
    job->top_counts = take(arena, lists, sizeof(int64_t));
}

/* Whatever does not depend on the batch's blocks. */
static void plan_fixed(Arena *arena, Job *job, int threads) {
    plan_forward(arena, job, threads);
    if (job->after) plan_tops(arena, job->after, threads);
}
