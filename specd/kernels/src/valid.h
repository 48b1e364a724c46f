/* Every index that a batch reaches memory by is looked at before anything is computed. Included by run.c. */

static int valid_tree(const specd_batch *batch, int64_t sequence) {
    if (batch->query_lens[sequence] != batch->tree_nodes) return 0;
    for (int64_t n = 0; n < batch->tree_nodes; n++) {
        if (batch->parents[sequence * batch->tree_nodes + n] >= n) return 0;
    }
    return 1;
}

static int valid_sequence(const specd_batch *batch, int64_t sequence) {
    int64_t length = batch->kv_lens[sequence], first = batch->kv_indptr[sequence];
    int64_t pages = batch->kv_indptr[sequence + 1] - first;
    if (batch->query_lens[sequence] < 0 || batch->query_lens[sequence] > length) return 0;
    if (pages * batch->page_size < length) return 0;
    for (int64_t p = 0; p < pages; p++) {
        if (batch->kv_indices[first + p] < 0 || batch->kv_indices[first + p] >= batch->num_pages) return 0;
    }
    return batch->parents == NULL || valid_tree(batch, sequence);
}

/* States are read as wide as the batch says, and written H wide. */
static int valid_states(const specd_model *model, const specd_batch *batch) {
    const specd_linear *features = model->fusion ? &model->fusion->features : NULL;
    if (features == NULL) return batch->states == NULL;
    if (batch->num_tokens > 0 && batch->states == NULL) return 0;
    if (batch->state_width == model->hidden) return 1;
    return features->num_parts > 0 && batch->state_width == features->parts[0].cols;
}

/* Every index that memory is reached by. */
static int valid_batch(const specd_model *model, const specd_batch *batch) {
    int64_t tokens = 0, slots = batch->num_pages * batch->page_size;
    if (batch->page_size < 1 || batch->num_aux > SPECD_MAX_AUX || model->head_dim % SPECD_STRIP) return 0;
    if (!valid_states(model, batch)) return 0;
    for (int64_t b = 0; b < batch->num_sequences; b++) {
        if (!valid_sequence(batch, b)) return 0;
        tokens += batch->query_lens[b];
    }
    for (int64_t t = 0; t < batch->num_tokens; t++) {
        if (batch->tokens[t] < 0 || batch->tokens[t] >= model->embedding.rows) return 0;
        if (batch->positions[t] < 0 || batch->positions[t] >= batch->num_positions) return 0;
        if (batch->write_slots[t] < 0 || batch->write_slots[t] >= slots) return 0;
    }
    return tokens == batch->num_tokens;
}
