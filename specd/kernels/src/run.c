/* The entry points: memory, the parallel region, and which levels the machine can run. */
#include <sched.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#include "internal.h"
#include "valid.h"

/* Some 50 us of looking, then the core is offered to others: on a busy machine the one waited for may need it. */
enum { SPINS = 1000, SMALL_BATCH_ITEMS = 4 };

struct specd_workspace {
    uint8_t *data;
    size_t size;
};

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

static int reserve(specd_workspace *workspace, size_t size) {
    if (workspace->size >= size) return SPECD_OK;
    free(workspace->data);
    workspace->size = 0;
    workspace->data = aligned_alloc(64, (size + 63) / 64 * 64);
    if (workspace->data == NULL) return SPECD_NO_MEMORY;
    workspace->size = size;
    return SPECD_OK;
}

int specd_abi(void) { return SPECD_ABI; }

int specd_threaded(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

specd_workspace *specd_workspace_new(void) { return calloc(1, sizeof(specd_workspace)); }

void specd_workspace_free(specd_workspace *workspace) {
    if (workspace == NULL) return;
    free(workspace->data);
    free(workspace);
}

/* Levels -------------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
static int has_avx2(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C)) return 0;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

const char *specd_levels(void) {
#if defined(__x86_64__)
    if (has_avx512()) return "avx512 avx2 portable";
    if (has_avx2()) return "avx2 portable";
#endif
    return "portable";
}

const specd_kernels *specd_level(const char *name) {
#if defined(__x86_64__)
    if (strcmp(name, "avx512") == 0) return has_avx512() ? &specd_avx512 : NULL;
    if (strcmp(name, "avx2") == 0) return has_avx2() ? &specd_avx2 : NULL;
#endif
    return strcmp(name, "portable") == 0 ? &specd_portable : NULL;
}

/* Threads ------------------------------------------------------------------------------------------------------- */

static void rest(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void specd_team_wait(Team *team, int threads) {
    if (threads == 1) return;
    unsigned generation = atomic_load_explicit(&team->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) + 1 == threads) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&team->generation, 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->generation, memory_order_acquire) == generation; spins++) {
        if (spins < SPINS) rest();
        else sched_yield();
    }
}

static void run_team(Job *job, Phase phase, int threads) {
    atomic_init(&job->team.arrived, 0);
    atomic_init(&job->team.generation, 0);
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        phase(job, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#else
    (void)threads;
#endif
    phase(job, 0, 1);
}

static int usable_threads(int32_t threads) { return threads < 1 || !specd_threaded() ? 1 : threads; }

/* Planning ------------------------------------------------------------------------------------------------------ */

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

int specd_forward(const specd_kernels *kernels, const specd_model *model, const specd_batch *batch,
                  specd_workspace *workspace, int32_t wanted) {
    Job job = {.model = model, .batch = batch};
    int threads = usable_threads(wanted);
    if (!valid_batch(model, batch)) return SPECD_BAD_ARGUMENT;
    Arena arena = {NULL, 0};
    plan_forward(&arena, &job, threads);
    /* The blocks are needed to size the partial results: a first reservation for all else. */
    if (reserve(workspace, arena.used) != SPECD_OK) return SPECD_NO_MEMORY;
    arena = (Arena){workspace->data, 0};
    plan_forward(&arena, &job, threads);
    size_t fixed = arena.used;
    int64_t partial = plan_blocks(&job, block_tokens(model, batch));
    if (workspace->size < fixed + (size_t)partial * sizeof(float)) {
        if (reserve(workspace, (fixed + (size_t)partial * sizeof(float)) * 5 / 4) != SPECD_OK) return SPECD_NO_MEMORY;
        arena = (Arena){workspace->data, 0};
        plan_forward(&arena, &job, threads);
        plan_blocks(&job, block_tokens(model, batch));
    }
    job.partial = take(&arena, partial, sizeof(float));
    for (int64_t i = 0; i < model->num_layers; i++) atomic_init(&job.next[i], 0);
    if (batch->num_tokens > 0) run_team(&job, kernels->forward, threads);
    return SPECD_OK;
}

static int run_rows(Phase phase, Job *job, int64_t width, specd_workspace *workspace, int threads) {
    for (int pass = 0; pass < 2; pass++) {
        Arena arena = {pass ? workspace->data : NULL, 0};
        plan_inputs(&arena, &job->narrow, job->num_rows, width);
        if (!pass && reserve(workspace, arena.used) != SPECD_OK) return SPECD_NO_MEMORY;
    }
    if (job->num_rows > 0) run_team(job, phase, threads);
    return SPECD_OK;
}

int specd_logits(const specd_kernels *kernels, const specd_model *model, const float *hidden, int64_t num_rows,
                 float *logits, specd_workspace *workspace, int32_t threads) {
    Job job = {.model = model, .num_rows = num_rows, .input = hidden, .output = logits};
    return run_rows(kernels->logits, &job, model->hidden, workspace, usable_threads(threads));
}

int specd_argmax(const specd_kernels *kernels, const specd_model *model, const float *hidden, int64_t num_rows,
                 float *values, int64_t *places, specd_workspace *workspace, int32_t threads) {
    specd_tops tops = {values, places, NULL, 1};
    return specd_top(kernels, model, hidden, num_rows, &tops, workspace, threads);
}

static int run_tops(const specd_kernels *kernels, Job *job, specd_workspace *workspace, int threads) {
    int64_t rows = job->num_rows, k = job->tops->k, lists = threads * rows;
    int64_t segments = (job->vocabulary + SPECD_TOP_SEGMENT - 1) / SPECD_TOP_SEGMENT;
    if (k < 1 || k > job->vocabulary) return SPECD_BAD_ARGUMENT;
    for (int pass = 0; pass < 2; pass++) {
        Arena arena = {pass ? workspace->data : NULL, 0};
        if (!job->given) {
            plan_inputs(&arena, &job->narrow, rows, job->model->hidden);
            job->tiles = take(&arena, lists * SPECD_TOP_SEGMENT, sizeof(float));
        }
        job->peaks = take(&arena, rows * segments, sizeof(float));
        job->sums = take(&arena, rows * segments, sizeof(float));
        job->top_values = take(&arena, lists * k, sizeof(float));
        job->top_places = take(&arena, lists * k, sizeof(int64_t));
        job->top_counts = take(&arena, lists, sizeof(int64_t));
        if (!pass && reserve(workspace, arena.used) != SPECD_OK) return SPECD_NO_MEMORY;
    }
    if (rows > 0) run_team(job, kernels->top, threads);
    return SPECD_OK;
}

int specd_top(const specd_kernels *kernels, const specd_model *model, const float *hidden, int64_t num_rows,
              const specd_tops *tops, specd_workspace *workspace, int32_t threads) {
    Job job = {.model = model, .num_rows = num_rows, .input = hidden, .tops = tops, .vocabulary = model->head.rows};
    return run_tops(kernels, &job, workspace, usable_threads(threads));
}

int specd_top_rows(const specd_kernels *kernels, const specd_logits_rows *given, const specd_tops *tops,
                   specd_workspace *workspace, int32_t threads) {
    Job job = {.given = given, .num_rows = given->num_rows, .tops = tops, .vocabulary = given->vocabulary};
    return run_tops(kernels, &job, workspace, usable_threads(threads));
}

int specd_linear_rows(const specd_kernels *kernels, const specd_linear *linear, int32_t activations, const float *x,
                      int64_t num_rows, float *y, specd_workspace *workspace, int32_t threads) {
    Job job = {.linear = linear, .num_rows = num_rows, .input = x, .output = y, .activations = activations};
    return run_rows(kernels->linear, &job, linear->parts[0].cols, workspace, usable_threads(threads));
}

int specd_draw(const specd_kernels *kernels, const specd_draws *draws, specd_workspace *workspace, int32_t wanted) {
    Job job = {.draws = draws};
    int threads = usable_threads(wanted);
    int64_t blocks = (draws->vocabulary + 63) / 64;
    if (draws->num_rows < threads) threads = draws->num_rows < 1 ? 1 : (int)draws->num_rows;
    for (int64_t row = 0; draws->temperature && row < draws->num_rows; row++) {
        if (!(draws->temperature[row] > 0.0f) || !(draws->top_p[row] > 0.0f) || draws->top_k[row] < 1 ||
            !(draws->min_p[row] >= 0.0f && draws->min_p[row] <= 1.0f)) {
            return SPECD_BAD_ARGUMENT;
        }
    }
    if (draws->vocabulary < 1) return SPECD_BAD_ARGUMENT;
    for (int pass = 0; pass < 2; pass++) {
        Arena arena = {pass ? workspace->data : NULL, 0};
        job.scratch_floats = take(&arena, threads * blocks * (3 * 64 + 2), sizeof(float));
        if (!pass && reserve(workspace, arena.used) != SPECD_OK) return SPECD_NO_MEMORY;
    }
    if (draws->num_rows > 0) run_team(&job, kernels->draw, threads);
    return SPECD_OK;
}

void specd_exp(const specd_kernels *kernels, const float *x, int64_t count, float *exp_out, float *silu_out) {
    kernels->exp(x, count, exp_out, silu_out);
}

float specd_read(const specd_kernels *kernels, const float *data, int64_t count, int32_t wanted) {
    float largest = 0.0f;
    int threads = usable_threads(wanted);
    int64_t lines = count / 256; /* of a kilobyte */
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) reduction(max : largest)
    {
        int t = omp_get_thread_num(), n = omp_get_num_threads();
        largest = kernels->read(data, lines * t / n * 256, lines * (t + 1) / n * 256);
    }
#else
    largest = kernels->read(data, 0, lines * 256);
#endif
    return largest;
}
