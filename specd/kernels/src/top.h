/* The largest logits of rows, and the log of the sum of e^logit over all of them: of rows that exist, or of lm_head
 * times hidden states, a segment of 256 columns at a time and never written as a whole.
 *
 * A row's result is a function of that row alone: threads divide segments, which are cut by absolute column. Each
 * gives its maximum and the sum of e^(logit - maximum) in one written order; both are merged in the order of the
 * segments, in double precision. What is largest is exact, so it may be found in any order.
 */

enum { TOP_SEGMENT = SPECD_TOP_SEGMENT, TOP_STRIPS = TOP_SEGMENT / SPECD_STRIP };

/* The largest logits found so far, (logit descending, place ascending). */
typedef struct {
    float *values; /* [k] */
    int64_t *places;
    int64_t *count; /* how many there are yet */
    int64_t k;
} TopList;

/* Places come in ascending order, so an equal of what is there goes behind it. */
INLINE int enters(const TopList *list, float value) {
    return *list->count < list->k || value > list->values[list->k - 1];
}

static void insert_top(const TopList *list, float value, int64_t place) {
    int64_t at = *list->count < list->k ? (*list->count)++ : list->k - 1;
    for (; at > 0 && list->values[at - 1] < value; at--) {
        list->values[at] = list->values[at - 1];
        list->places[at] = list->places[at - 1];
    }
    list->values[at] = value;
    list->places[at] = place;
}

/* This thread's list of a row. */
INLINE TopList list_of(const Job *job, int thread, int64_t row) {
    int64_t at = thread * job->num_rows + row, k = job->tops->k;
    return (TopList){job->top_values + at * k, job->top_places + at * k, job->top_counts + at, k};
}

/* The largest of a segment; NaN when it has any. */
static float segment_peak(const float *x) {
    VF top[16 / W];
    int bad = 0;
    UNROLL for (int v = 0; v < 16 / W; v++) top[v] = vf_load(x + v * W);
    UNROLL for (int i = 16; i < TOP_SEGMENT; i += W) {
        top[i / W % (16 / W)] = vf_max(vf_load(x + i), top[i / W % (16 / W)]);
    }
    for (int i = 0; i < TOP_SEGMENT; i++) bad |= x[i] != x[i];
    return bad ? NAN : vf_peak(top);
}

/* The sum of e^(x - peak): element i goes to lane i mod 16. */
static float segment_sum(const float *x, float peak) {
    VF total[16 / W], top = vf_set1(peak);
    if (peak == -INFINITY) return 0.0f;
    UNROLL for (int v = 0; v < 16 / W; v++) total[v] = vf_zero();
    UNROLL for (int i = 0; i < TOP_SEGMENT; i += W) {
        total[i / W % (16 / W)] = vf_add(total[i / W % (16 / W)], vf_exp(vf_sub(vf_load(x + i), top)));
    }
    return vf_total(total);
}

/* The first `real` logits of a segment, into the list. */
static void scan_segment(const float *x, int real, float peak, int64_t first, const TopList *list) {
    if (!enters(list, peak)) return;
    for (int i = 0; i < real; i += SPECD_STRIP) {
        int width = real - i < SPECD_STRIP ? real - i : SPECD_STRIP, some = *list->count < list->k;
        if (!some && width == SPECD_STRIP) {
            float least = list->values[list->k - 1];
            for (int n = 0; n < SPECD_STRIP; n++) some |= x[i + n] > least;
            if (!some) continue;
        }
        for (int n = i; n < i + width; n++) {
            if (enters(list, x[n])) insert_top(list, x[n], first + n);
        }
    }
}

/* One segment of a row, -infinity past its `real` logits. */
static void take_segment(const Job *job, const float *x, int real, int64_t segment, int64_t row, int thread) {
    int64_t segments = (job->vocabulary + TOP_SEGMENT - 1) / TOP_SEGMENT;
    TopList list = list_of(job, thread, row);
    float peak = segment_peak(x);
    job->peaks[row * segments + segment] = peak;
    if (job->tops->lse) job->sums[row * segments + segment] = segment_sum(x, peak);
    scan_segment(x, real, peak, segment * TOP_SEGMENT, &list);
}

/* A segment of all rows: computed, or copied where the rows exist and it is their last, incomplete one. */
static void run_segment(Job *job, int64_t segment, StripKernel kernel, const strip_layout *l, float *tile,
                        int thread) {
    const specd_matrix *head = &job->model->head;
    int64_t first = segment * TOP_SEGMENT, left = job->vocabulary - first;
    int real = left < TOP_SEGMENT ? (int)left : TOP_SEGMENT, strips = (real + SPECD_STRIP - 1) / SPECD_STRIP;
    for (int s = 0; s < strips; s++) {
        run_strip(head, l, kernel, segment * TOP_STRIPS + s, &job->narrow, job->num_rows, STORE,
                  tile + s * SPECD_STRIP, TOP_SEGMENT);
    }
    for (int64_t row = 0; row < job->num_rows; row++) {
        float *x = tile + row * TOP_SEGMENT;
        for (int i = real; i < TOP_SEGMENT; i++) x[i] = -INFINITY;
        take_segment(job, x, real, segment, row, thread);
    }
}

static void read_segment(const Job *job, int64_t segment, int thread) {
    const specd_logits_rows *from = job->given;
    int64_t first = segment * TOP_SEGMENT, left = job->vocabulary - first;
    int real = left < TOP_SEGMENT ? (int)left : TOP_SEGMENT;
    float copy[TOP_SEGMENT];
    for (int64_t row = 0; row < job->num_rows; row++) {
        const float *x = from->logits + (from->rows ? from->rows[row] : row) * from->stride + first;
        if (real < TOP_SEGMENT) {
            for (int i = 0; i < TOP_SEGMENT; i++) copy[i] = i < real ? x[i] : -INFINITY;
            x = copy;
        }
        take_segment(job, x, real, segment, row, thread);
    }
}

/* log(sum of e^logit) of a row whose largest logit is `peak`. */
static double merge_sums(const float *peaks, const float *sums, int64_t segments, float peak) {
    double total = 0.0;
    for (int64_t s = 0; s < segments; s++) {
        if (sums[s] != 0.0f) total += (double)sums[s] * exp((double)peaks[s] - (double)peak);
    }
    return (double)peak + log(total);
}

static void finish_row(const Job *job, int64_t row, int threads) {
    const specd_tops *out = job->tops;
    int64_t segments = (job->vocabulary + TOP_SEGMENT - 1) / TOP_SEGMENT, count = 0;
    TopList merged = {out->values + row * out->k, out->places + row * out->k, &count, out->k};
    const float *peaks = job->peaks + row * segments;
    int bad = 0;
    for (int t = 0; t < threads; t++) { /* threads hold ascending places */
        TopList list = list_of(job, t, row);
        for (int64_t i = 0; i < *list.count && enters(&merged, list.values[i]); i++) {
            insert_top(&merged, list.values[i], list.places[i]);
        }
    }
    for (int64_t s = 0; s < segments; s++) bad |= peaks[s] != peaks[s];
    if (bad) {
        for (int64_t i = 0; i < out->k; i++) merged.values[i] = NAN;
    }
    if (out->lse) out->lse[row] = merge_sums(peaks, job->sums + row * segments, segments, merged.values[0]);
}

static void run_top(Job *job, int thread, int threads) {
    Range mine = share((job->vocabulary + TOP_SEGMENT - 1) / TOP_SEGMENT, thread, threads);
    for (int64_t row = 0; row < job->num_rows; row++) *list_of(job, thread, row).count = 0;
    if (job->given) {
        for (long segment = mine.first; segment < mine.last; segment++) read_segment(job, segment, thread);
    } else {
        const specd_matrix *head = &job->model->head;
        int32_t mode = job->model->activations;
        strip_layout l = layout_of(head->kind, head->cols);
        float *tile = job->tiles + thread * job->num_rows * TOP_SEGMENT;
        take_input(job, job->model->hidden, needs_of(head, mode), thread, threads);
        for (long segment = mine.first; segment < mine.last; segment++) {
            run_segment(job, segment, strip_kernel(head->kind, mode), &l, tile, thread);
        }
    }
    specd_team_wait(&job->team, threads);
    Range rows = share(job->num_rows, thread, threads);
    for (long row = rows.first; row < rows.last; row++) finish_row(job, row, threads);
}
