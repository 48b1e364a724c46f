/* The entry points: memory, the parallel region, and which levels the machine can run. */
#include <fenv.h>
#include <sched.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#include <pthread.h>
#endif

#include "internal.h"
#include "plan.h"
#include "valid.h"

/* Some 50 us of looking, then the core is offered to others: on a busy machine the one waited for may need it. */
enum { SPINS = 1000 };

struct specd_workspace {
    uint8_t *data;
    size_t size;
};

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

static void begin_team(Team *team) {
    atomic_init(&team->arrived, 0);
    atomic_init(&team->generation, 0);
}

/* Rounding to nearest and denormals as they are, whatever this thread was set to: results depend on both. */
static void run_phase(Job *job, Phase phase, int thread, int threads) {
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    phase(job, thread, threads);
    fesetenv(&before);
}

static void run_team(Job *job, Phase phase, int threads) {
    begin_team(&job->team);
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        run_phase(job, phase, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#else
    (void)threads;
#endif
    run_phase(job, phase, 0, 1);
}

static int valid_tops(const Job *job) { return job->tops->k >= 1 && job->tops->k <= job->vocabulary; }

/* A child of fork has its parent's record of OpenMP's threads and none of the threads: it would wait for them. */
static atomic_int forked;

#ifdef _OPENMP
static void note_fork(void) { atomic_store(&forked, 1); }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }
#endif

static int usable_threads(int32_t threads) {
    return threads < 1 || !specd_threaded() || atomic_load(&forked) ? 1 : threads;
}

/* A forward ----------------------------------------------------------------------------------------------------- */

static int reserve_forward(Job *job, specd_workspace *workspace, int threads) {
    Arena arena = {NULL, 0};
    plan_fixed(&arena, job, threads);
    /* The blocks are needed to size the partial results: a first reservation for all else. */
    if (reserve(workspace, arena.used) != SPECD_OK) return SPECD_NO_MEMORY;
    arena = (Arena){workspace->data, 0};
    plan_fixed(&arena, job, threads);
    size_t fixed = arena.used;
    int64_t partial = plan_blocks(job, block_tokens(job->model, job->batch));
    if (workspace->size < fixed + (size_t)partial * sizeof(float)) {
        if (reserve(workspace, (fixed + (size_t)partial * sizeof(float)) * 5 / 4) != SPECD_OK) return SPECD_NO_MEMORY;
        arena = (Arena){workspace->data, 0};
        plan_fixed(&arena, job, threads);
        plan_blocks(job, block_tokens(job->model, job->batch));
    }
    job->partial = take(&arena, partial, sizeof(float));
    return SPECD_OK;
}

static void forward_and_top(Job *job, int thread, int threads) {
    job->kernels->forward(job, thread, threads);
    specd_team_wait(&job->team, threads);
    job->kernels->top(job->after, thread, threads);
}

static int run_forward(Job *job, specd_workspace *workspace, int threads) {
    int status = reserve_forward(job, workspace, threads);
    if (status != SPECD_OK) return status;
    for (int64_t i = 0; i < job->model->num_layers; i++) atomic_init(&job->next[i], 0);
    if (job->batch->num_tokens > 0) run_team(job, job->after ? forward_and_top : job->kernels->forward, threads);
    return SPECD_OK;
}

int specd_forward(const specd_kernels *kernels, const specd_model *model, const specd_batch *batch,
                  specd_workspace *workspace, int32_t threads) {
    Job job = {.kernels = kernels, .model = model, .batch = batch};
    if (!valid_batch(model, batch)) return SPECD_BAD_ARGUMENT;
    return run_forward(&job, workspace, usable_threads(threads));
}

int specd_forward_top(const specd_kernels *kernels, const specd_model *model, const specd_batch *batch,
                      const int64_t *rows, int64_t num_rows, const specd_tops *tops, specd_workspace *workspace,
                      int32_t threads) {
    Job after = {.model = model, .num_rows = num_rows, .input = batch->hidden, .rows = rows, .tops = tops,
                 .vocabulary = model->head.rows};
    Job job = {.kernels = kernels, .model = model, .batch = batch, .after = num_rows > 0 ? &after : NULL};
    if (!valid_batch(model, batch) || !valid_tops(&after)) return SPECD_BAD_ARGUMENT;
    for (int64_t i = 0; i < num_rows; i++) {
        if (rows[i] < 0 || rows[i] >= batch->num_tokens) return SPECD_BAD_ARGUMENT;
    }
    begin_team(&after.team);
    return run_forward(&job, workspace, usable_threads(threads));
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
    if (!valid_tops(job)) return SPECD_BAD_ARGUMENT;
    for (int pass = 0; pass < 2; pass++) {
        Arena arena = {pass ? workspace->data : NULL, 0};
        plan_tops(&arena, job, threads);
        if (!pass && reserve(workspace, arena.used) != SPECD_OK) return SPECD_NO_MEMORY;
    }
    if (job->num_rows > 0) run_team(job, kernels->top, threads);
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
