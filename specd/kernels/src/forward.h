/* The phases of a forward, each run by every thread of the call; the threads meet between phases.
 *
 * A head's input first (specd_fusion), where another model's is the token's embedding:
 *
 *   rows    quantise the features   (only those that a projection makes H wide)
 *   strips  features
 *   rows    norms, side by side, quantise
 *   strips  projection to H
 *
 * Then each layer:
 *
 *   rows    norm, quantise        (divided by rows)
 *   strips  q, k, v               (by output rows)
 *   rows    rotate, append to KV
 *   items   attention             (whoever is free takes the next)
 *   rows    quantise
 *   strips  output, added to the residual stream
 *   rows    norm, quantise
 *   groups  gate, up, silu, quantise
 *   strips  down, added to the residual stream
 */

static void embed_rows(Job *job, Range rows) {
    const specd_model *model = job->model;
    for (long t = rows.first; t < rows.last; t++) {
        specd_unpack_row(&model->embedding, job->batch->tokens[t], job->x + t * model->hidden);
    }
}

/* Rows of `from`, `width` floats each, into `in`; `which` of them, or NULL: in their own order. */
static void take_rows(const Inputs *in, const float *from, const int64_t *which, int64_t width, int needs, Range rows) {
    for (long t = rows.first; t < rows.last; t++) {
        memcpy(in->x + t * in->columns, from + (which ? which[t] : t) * width, (size_t)width * sizeof(float));
        prepare_row(in, t, width, needs);
    }
}

/* A token's embedding and its state, each normed, as one row of 2H. */
static void join_rows(Job *job, Range rows, const float *states) {
    const specd_model *model = job->model;
    const specd_fusion *fusion = model->fusion;
    int64_t hidden = model->hidden, first = fusion->hidden_first ? hidden : 0;
    int needs = needs_of_linear(&fusion->proj, model->activations);
    for (long t = rows.first; t < rows.last; t++) {
        float *row = job->joined.x + t * job->joined.columns, *embedding = row + first, *state = row + hidden - first;
        specd_unpack_row(&model->embedding, job->batch->tokens[t], embedding);
        rms_norm(embedding, fusion->embedding_norm, hidden, model->eps, embedding);
        rms_norm(states + t * hidden, fusion->state_norm, hidden, model->eps, state);
        prepare_row(&job->joined, t, 2 * hidden, needs);
    }
}

static void fuse_rows(Job *job, Range rows, int thread, int threads) {
    const specd_model *model = job->model;
    const specd_fusion *fusion = model->fusion;
    const float *states = job->batch->states;
    int32_t mode = model->activations;
    if (job->batch->state_width != model->hidden) {
        int needs = needs_of_linear(&fusion->features, mode);
        take_rows(&job->states, states, NULL, job->batch->state_width, needs, rows);
        specd_team_wait(&job->team, threads);
        run_linear(&fusion->features, mode, &job->states, job->num_rows, STORE, job->x, model->hidden, thread, threads);
        specd_team_wait(&job->team, threads);
        states = job->x;
    }
    join_rows(job, rows, states);
    specd_team_wait(&job->team, threads);
    run_linear(&fusion->proj, mode, &job->joined, job->num_rows, STORE, job->x, model->hidden, thread, threads);
    specd_team_wait(&job->team, threads);
}

static void keep_aux(Job *job, Range rows, int64_t layer) {
    const specd_batch *batch = job->batch;
    int64_t hidden = job->model->hidden;
    for (int i = 0; i < batch->num_aux; i++) {
        if (batch->aux_layers[i] != layer) continue;
        for (long t = rows.first; t < rows.last; t++) {
            memcpy(batch->aux + (t * batch->num_aux + i) * hidden, job->x + t * hidden,
                   (size_t)hidden * sizeof(float));
        }
    }
}

static void norm_rows(Job *job, Range rows, const float *weight, int needs) {
    const specd_model *model = job->model;
    const Inputs *in = &job->narrow;
    for (long t = rows.first; t < rows.last; t++) {
        rms_norm(job->x + t * model->hidden, weight, model->hidden, model->eps, in->x + t * in->columns);
        prepare_row(in, t, model->hidden, needs);
    }
}

static void rotate_head(float *x, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cosines[i] - second * sines[i];
        x[i + half] = second * cosines[i] + first * sines[i];
    }
}

static void store_row(int32_t kind, const float *from, int64_t count, uint8_t *to) {
    if (kind == SPECD_F32) {
        memcpy(to, from, (size_t)count * sizeof(float));
        return;
    }
    uint16_t *halves = (uint16_t *)(void *)to;
    if (kind == SPECD_F16) {
        for (int64_t i = 0; i < count; i += W) vf_to_f16(vf_load(from + i), halves + i);
    } else {
        for (int64_t i = 0; i < count; i++) halves[i] = bf16_bits(from[i]);
    }
}

static void rotate_and_append(Job *job, Range rows, int64_t layer) {
    const specd_model *model = job->model;
    const specd_batch *batch = job->batch;
    int64_t width = model->head_dim, kv = model->kv_heads * width, query = model->heads * width;
    int64_t ld = query + 2 * kv, bytes = kv * kind_bytes(batch->kv_kind);
    for (long t = rows.first; t < rows.last; t++) {
        float *row = job->qkv + t * ld;
        int64_t at = batch->positions[t] * (width / 2), slot = batch->write_slots[t];
        for (int64_t head = 0; head < model->heads + model->kv_heads; head++) {
            rotate_head(row + head * width, batch->cosines + at, batch->sines + at, width / 2);
        }
        int64_t page = slot / batch->page_size, offset = slot % batch->page_size;
        uint8_t *keys = (uint8_t *)batch->kv[layer] + (page * 2 * batch->page_size + offset) * bytes;
        store_row(batch->kv_kind, row + query, kv, keys);
        store_row(batch->kv_kind, row + query + kv, kv, keys + batch->page_size * bytes);
    }
}

static const Block *block_of(const Job *job, const Block *from, int64_t item) {
    while (from + 1 < job->blocks + job->num_blocks && from[1].first_item <= item) from++;
    return from;
}

static void attend(Job *job, int64_t layer, int thread, int threads) {
    const specd_model *model = job->model;
    const AttendScratch *scratch = &job->scratch[thread];
    Attend at = {model, job->batch, job->qkv, (model->heads + 2 * model->kv_heads) * model->head_dim, job->heads.x,
                 job->heads.columns, job->partial, job->batch->kv[layer], model->heads / model->kv_heads, job->split};
    const Block *block = job->blocks;
    for (;;) {
        int64_t item = atomic_fetch_add_explicit(&job->next[layer], 1, memory_order_relaxed);
        if (item >= job->num_items) break;
        block = block_of(job, block, item);
        attend_item(&at, block, scratch, item - block->first_item);
    }
    specd_team_wait(&job->team, threads);
    if (!job->split) return;
    Range mine = share(job->num_blocks * model->kv_heads, thread, threads);
    for (long item = mine.first; item < mine.last; item++) {
        merge_item(&at, &job->blocks[item / model->kv_heads], scratch, item % model->kv_heads);
    }
    specd_team_wait(&job->team, threads);
}

/* silu(gate) * up of one strip, into the wide inputs. Rows past the matrices' end have zero weights and give zeros. */
static void gate_strip(Job *job, const specd_layer *layer, int64_t strip) {
    float gates[MAX_ROWS * SPECD_STRIP], ups[MAX_ROWS * SPECD_STRIP];
    float bias[2][SPECD_STRIP] = {{0}, {0}};
    const specd_matrix *sides[2] = {&layer->gate, &layer->up};
    Strip w[2];
    StripKernel kernels[2];
    for (int s = 0; s < 2; s++) {
        strip_layout l = layout_of(sides[s]->kind, sides[s]->cols);
        int64_t first = strip * SPECD_STRIP, left = sides[s]->rows - first;
        w[s] = strip_at(sides[s], &l, strip);
        kernels[s] = strip_kernel(sides[s]->kind, job->model->activations);
        for (int n = 0; sides[s]->bias && n < SPECD_STRIP && n < left; n++) bias[s][n] = sides[s]->bias[first + n];
    }
    for (long row = 0; row < job->num_rows; row += MAX_ROWS) {
        int count = job->num_rows - row < MAX_ROWS ? (int)(job->num_rows - row) : MAX_ROWS;
        kernels[0](&w[0], &job->narrow, row, count, gates);
        kernels[1](&w[1], &job->narrow, row, count, ups);
        w[0].next = w[0].values;
        w[1].next = w[1].values;
        for (int i = 0; i < count; i++) {
            float *out = job->wide.x + (row + i) * job->wide.columns + strip * SPECD_STRIP;
            UNROLL for (int n = 0; n < SPECD_STRIP; n += W) {
                VF gate = vf_add(vf_load(gates + i * SPECD_STRIP + n), vf_load(bias[0] + n));
                VF up = vf_add(vf_load(ups + i * SPECD_STRIP + n), vf_load(bias[1] + n));
                vf_store(out + n, vf_mul(vf_silu(gate), up));
            }
        }
    }
}

static void gate_groups(Job *job, const specd_layer *layer, Range groups) {
    int64_t strips = strips_of(job->model->inner);
    int needs = needs_of_linear(&layer->down, job->model->activations);
    for (long group = groups.first; group < groups.last; group++) {
        int whole = 2 * group + 1 < strips;
        gate_strip(job, layer, 2 * group);
        if (whole) gate_strip(job, layer, 2 * group + 1);
        for (long row = 0; row < job->num_rows; row++) {
            float *out = job->wide.x + row * job->wide.columns + group * SPECD_GROUP;
            if (!whole) memset(out + SPECD_STRIP, 0, SPECD_STRIP * sizeof *out);
            prepare_group(&job->wide, row, group, needs);
        }
    }
}

static void layer_forward(Job *job, int64_t index, int thread, int threads) {
    const specd_model *model = job->model;
    const specd_layer *layer = &model->layers[index];
    int32_t mode = model->activations;
    Range rows = share(job->num_rows, thread, threads);
    int64_t query = model->heads * model->head_dim, ld = query + 2 * model->kv_heads * model->head_dim;
    keep_aux(job, rows, index);
    norm_rows(job, rows, layer->input_norm, needs_of_linear(&layer->qkv, mode));
    specd_team_wait(&job->team, threads);
    run_linear(&layer->qkv, mode, &job->narrow, job->num_rows, STORE, job->qkv, ld, thread, threads);
    specd_team_wait(&job->team, threads);
    rotate_and_append(job, rows, index);
    specd_team_wait(&job->team, threads);
    attend(job, index, thread, threads);
    for (long t = rows.first; t < rows.last; t++) {
        prepare_row(&job->heads, t, query, needs_of_linear(&layer->output, mode));
    }
    specd_team_wait(&job->team, threads);
    run_linear(&layer->output, mode, &job->heads, job->num_rows, ADD, job->x, model->hidden, thread, threads);
    specd_team_wait(&job->team, threads);
    norm_rows(job, rows, layer->mlp_norm, needs_of(&layer->gate, mode) | needs_of(&layer->up, mode));
    specd_team_wait(&job->team, threads);
    gate_groups(job, layer, share(groups_of(model->inner), thread, threads));
    specd_team_wait(&job->team, threads);
    run_linear(&layer->down, mode, &job->wide, job->num_rows, ADD, job->x, model->hidden, thread, threads);
    specd_team_wait(&job->team, threads);
}

static void run_forward(Job *job, int thread, int threads) {
    const specd_model *model = job->model;
    Range rows = share(job->num_rows, thread, threads);
    if (model->fusion) fuse_rows(job, rows, thread, threads);
    else embed_rows(job, rows);
    for (int64_t layer = 0; layer < model->num_layers; layer++) layer_forward(job, layer, thread, threads);
    keep_aux(job, rows, model->num_layers);
    for (long t = rows.first; t < rows.last; t++) {
        rms_norm(job->x + t * model->hidden, model->norm, model->hidden, model->eps,
                 job->batch->hidden + t * model->hidden);
    }
}

static void take_input(Job *job, int64_t width, int needs, int thread, int threads) {
    take_rows(&job->narrow, job->input, job->rows, width, needs, share(job->num_rows, thread, threads));
    specd_team_wait(&job->team, threads);
}

static void run_rows(Job *job, int thread, int threads) {
    int64_t total = 0;
    for (int64_t p = 0; p < job->linear->num_parts; p++) total += job->linear->parts[p].rows;
    int needs = needs_of_linear(job->linear, job->activations);
    take_input(job, job->linear->parts[0].cols, needs, thread, threads);
    run_linear(job->linear, job->activations, &job->narrow, job->num_rows, STORE, job->output, total, thread, threads);
}

static void run_logits(Job *job, int thread, int threads) {
    const specd_model *model = job->model;
    specd_linear head = {{model->head}, 1};
    take_input(job, model->hidden, needs_of(&model->head, model->activations), thread, threads);
    run_linear(&head, model->activations, &job->narrow, job->num_rows, STORE, job->output, model->head.rows, thread,
               threads);
}

static void run_exp(const float *x, int64_t count, float *exp_out, float *silu_out) {
    for (int64_t i = 0; i < count; i += W) {
        float in[W] = {0}, out[W];
        int64_t some = count - i < W ? count - i : W;
        memcpy(in, x + i, (size_t)some * sizeof(float));
        vf_store(out, vf_exp(vf_load(in)));
        memcpy(exp_out + i, out, (size_t)some * sizeof(float));
        vf_store(out, vf_silu(vf_load(in)));
        memcpy(silu_out + i, out, (size_t)some * sizeof(float));
    }
}

static float run_read(const float *data, int64_t first, int64_t last) {
    VF top[64 / W];
    for (int v = 0; v < 64 / W; v++) top[v] = vf_zero();
    for (int64_t at = first; at < last; at += 64) {
        UNROLL for (int i = 0; i < 64; i += 16) __builtin_prefetch(data + at + 1024 + i);
        UNROLL for (int v = 0; v < 64 / W; v++) top[v] = vf_max(top[v], vf_load(data + at + v * W));
    }
    for (int v = 16 / W; v < 64 / W; v++) top[v % (16 / W)] = vf_max(top[v % (16 / W)], top[v]);
    return vf_peak(top);
}
