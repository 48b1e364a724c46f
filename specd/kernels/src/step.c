/* The small work between two forwards: which drafts are kept, and a head's tokens from its target's. One row of a step
 * at a time, no threads: these arrays have a few hundred entries at most. */
#include <math.h>
#include <stddef.h>

#include "specd_kernels.h"

/* A row's leading drafts that equal what the target says after the token before them. */
static int64_t kept_drafts(const specd_acceptance *step, int64_t row) {
    const int64_t *places = step->row_index + row * (step->max_drafts + 1);
    const int64_t *drafts = step->drafts + row * step->max_drafts;
    int64_t kept = 0;
    while (kept < step->num_drafts[row] && drafts[kept] == step->best[places[kept]]) kept++;
    return kept;
}

static int usable(const specd_acceptance *step, const int64_t *places, int64_t kept) {
    for (int64_t i = 0; i <= kept; i++)
        if (!isfinite(step->values[places[i]])) return 0;
    return 1;
}

static int valid_acceptance(const specd_acceptance *step) {
    const int64_t width = step->max_drafts + 1;
    for (int64_t row = 0; row < step->num_sequences; row++) {
        if (step->num_drafts[row] < 0 || step->num_drafts[row] > step->max_drafts) return 0;
        for (int64_t i = 0; i < width; i++)
            if (step->row_index[row * width + i] < 0 || step->row_index[row * width + i] >= step->num_rows) return 0;
    }
    return 1;
}

int specd_accept(const specd_acceptance *step) {
    const int64_t width = step->max_drafts + 1;
    if (!valid_acceptance(step)) return SPECD_BAD_ARGUMENT;
    for (int64_t row = 0; row < step->num_sequences; row++) {
        const int64_t *places = step->row_index + row * width;
        int64_t *tokens = step->tokens + row * width;
        int64_t kept = kept_drafts(step, row);
        const int failed = step->emits[row] && !usable(step, places, kept);
        const int silent = failed || !step->emits[row];
        if (silent) kept = 0;
        for (int64_t i = 0; i < width; i++) tokens[i] = silent || i > kept ? -1 : step->best[places[i]];
        step->num_accepted[row] = kept;
        step->next_token[row] = silent ? 0 : tokens[kept];
        step->last_row[row] = step->offsets[row] + step->root_offset[row] + kept;
        step->failed[row] = (uint8_t)failed;
    }
    return SPECD_OK;
}

int specd_shift(const specd_shifts *step) {
    for (int64_t row = 0; row < step->num_sequences; row++) {
        const int64_t begin = step->offsets[row], end = step->offsets[row + 1];
        const int64_t last = step->emits[row] ? step->last_row[row] : end - 1;
        if (begin < 0 || end > step->num_tokens || last < begin || last >= end) return SPECD_BAD_ARGUMENT;
        for (int64_t i = begin; i < end; i++)
            step->shifted[i] = step->tokens[i + 1 < step->num_tokens ? i + 1 : i];
        step->shifted[last] = step->emits[row] ? step->next_token[row] : step->next_prompt[row];
        step->last_rows[row] = last;
    }
    return SPECD_OK;
}
