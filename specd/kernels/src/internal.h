/* Records that run.c fills and the levels compute with. */
#ifndef SPECD_INTERNAL_H
#define SPECD_INTERNAL_H

#include <stdatomic.h>

#include "common.h"

/* Queries that share one reading of a segment: at most this many, unless a single token's heads are more. */
enum { BLOCK_QUERIES = 48 };

/* What a projection reads of its input rows. Rows `columns` floats apart, padded to whole groups.
 * Exact: x and the sum of each group. Fast: one scale a row and group of 32, so no row depends on another. */
typedef struct {
    float *x;       /* [rows, columns] */
    float *sums;    /* [rows, groups] of x */
    int8_t *q;      /* [rows, columns] x / scale, |q| <= 127 */
    float *scales;  /* [rows, groups] */
    float *scaled;  /* [rows, groups] scale times the group's sum of q */
    int32_t *minus; /* [rows, groups, 2] minus the sum of q over each half of a group */
    int64_t columns;
    int64_t groups;
} Inputs;

/* Up to `count` neighbouring tokens of one sequence whose attention is computed together. */
typedef struct {
    int32_t sequence;
    int32_t count;
    int64_t token;    /* packed index of the first */
    int64_t position; /* where the first stands in its context; in a tree, the number of the node */
    int64_t prefix;   /* context before the tree; INT64_MAX for a chain */
    int64_t segments;
    int64_t first_item;
    int64_t partial; /* offset of the block's partial results, in floats */
} Block;

/* One thread's scratch for attention. Q: most queries of a block. */
typedef struct {
    float *keys;             /* [D, SEGMENT] */
    float *queries;          /* [Q, D] */
    float *scores;           /* [Q, SEGMENT] */
    float *segment;          /* [Q, D + 2] value sums, maximum, sum of the current segment */
    float *merged;           /* [Q, D + 2] */
    float *factors;          /* [2, Q padded to 16] of the running and of the segment's sums */
    const uint8_t **columns; /* [D] rows of `keys` */
    int32_t *path;           /* [tree nodes] nodes from the root to the query */
} AttendScratch;

/* Where the threads of one call meet. */
typedef struct {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_uint generation;
} Team;

typedef struct Job Job;

struct Job {
    const specd_kernels *kernels; /* of a forward */
    const specd_model *model;
    const specd_batch *batch;
    const specd_linear *linear; /* of specd_linear_rows */
    int64_t num_rows;           /* T, or the rows of logits, top and linear */
    Inputs narrow;              /* H columns: normed rows */
    Inputs heads;               /* the same memory: attention's output */
    Inputs wide;                /* I columns: the MLP's inside */
    Inputs joined;              /* the same memory, 2H columns: an embedding and a state */
    Inputs states;              /* the same memory: states as wide as they came */
    float *x;                   /* [T, H] residual stream */
    float *qkv;                 /* [T, (heads + 2 kv_heads) D] */
    Block *blocks;
    int64_t num_blocks;
    int64_t num_items; /* of attention, a layer */
    int split;         /* items are single segments */
    float *partial;
    AttendScratch *scratch; /* [threads] */
    atomic_llong *next;     /* [layers] next item of attention nobody has taken */
    const float *input;     /* logits, top, linear: [rows, columns] */
    const int64_t *rows;    /* [R] which of them, NULL: the first R */
    Job *after;             /* of a forward: what is asked of its rows at once, or NULL */
    float *output;
    int32_t activations; /* of specd_linear_rows */
    const specd_tops *tops;
    const specd_logits_rows *given; /* of top: NULL where lm_head makes them */
    int64_t vocabulary;             /* of top */
    float *tiles;                   /* [threads, rows, TOP_SEGMENT] */
    float *peaks;                   /* [rows, segments] */
    float *sums;                    /* [rows, segments] */
    float *top_values;              /* [threads, rows, k] */
    int64_t *top_places;            /* [threads, rows, k] */
    int64_t *top_counts;            /* [threads, rows] */
    const specd_draws *draws;
    float *scratch_floats; /* of drawing, all threads' */
    Team team;
};

typedef void (*Phase)(Job *job, int thread, int threads);

/* One level's functions, run by every thread of a call. */
struct specd_kernels {
    const char *name;
    Phase forward;
    Phase logits;
    Phase top;
    Phase linear;
    Phase draw;
    void (*exp)(const float *x, int64_t count, float *exp_out, float *silu_out);
    float (*read)(const float *data, int64_t first, int64_t last); /* whole kilobytes */
};

extern const specd_kernels specd_portable;
#if defined(__x86_64__)
extern const specd_kernels specd_avx2;
extern const specd_kernels specd_avx512;
#endif

/* Waits for the other threads of the call: spins for a bounded time, then gives its core away between looks. */
void specd_team_wait(Team *team, int threads);

#endif
