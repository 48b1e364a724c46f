/* The C interface of specd's CPU kernels: what Python calls through ctypes, and what the levels of this library share.
 *
 * A forward is one call and one parallel region. A row's result is a function of its own inputs alone: threads divide
 * output rows and never a sum, prefill loops the kernels of decoding, attention is cut into segments by absolute
 * position and merged in order. Every instruction set (a "level") gives the same bits: sums have one written order,
 * multiply-adds are explicit and fused everywhere.
 *
 * Legend: T packed tokens, B sequences, H hidden, D head size, I inner size of the MLP, V vocabulary. Strip: 16 rows
 * of a weight matrix, interleaved. Group: 32 neighbouring columns.
 */
#ifndef SPECD_KERNELS_H
#define SPECD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define SPECD_ABI 5

enum { SPECD_STRIP = 16, SPECD_GROUP = 32, SPECD_SEGMENT = 64, SPECD_TOP_SEGMENT = 256, SPECD_MAX_AUX = 8 };

/* Weight formats: the numbers of ggml. */
enum specd_kind {
    SPECD_F32 = 0,
    SPECD_F16 = 1,
    SPECD_Q4_0 = 2,
    SPECD_Q4_1 = 3,
    SPECD_Q8_0 = 8,
    SPECD_Q4_K = 12,
    SPECD_Q6_K = 14,
    SPECD_BF16 = 30
};

enum specd_activations { SPECD_EXACT = 0, SPECD_FAST = 1 };

enum specd_status { SPECD_OK = 0, SPECD_NO_MEMORY = 1, SPECD_BAD_ARGUMENT = 2 };

/* Packed rows [rows, cols]: ceil(rows / 16) strips, each specd_strip_bytes(kind, cols) long, 64-byte aligned. */
typedef struct {
    const uint8_t *data;
    const float *bias; /* [rows] or NULL */
    int64_t rows;
    int64_t cols;
    int64_t strip_bytes;
    int32_t kind;
    int32_t reserved;
} specd_matrix;

/* One projection made of up to three matrices with the same input, their outputs one behind the other. */
typedef struct {
    specd_matrix parts[3];
    int64_t num_parts;
} specd_linear;

typedef struct {
    const float *input_norm; /* [H]; NULL: the identity */
    const float *mlp_norm;   /* [H] */
    specd_linear qkv;        /* [(heads + 2 kv_heads) D, H] */
    specd_linear output;     /* [H, heads D] */
    specd_matrix gate;       /* [I, H] */
    specd_matrix up;         /* [I, H] */
    specd_linear down;       /* [H, I] */
} specd_layer;

/* How a head makes its first layer's input of a token and of a state: proj([norm(embedding) ; norm(state)]). */
typedef struct {
    const float *embedding_norm; /* [H]; NULL: the identity */
    const float *state_norm;     /* [H]; NULL: the identity */
    specd_linear proj;           /* [H, 2H] */
    specd_linear features;       /* [H, F]: states that are F wide go through it first; no parts: there are none */
    int64_t hidden_first;        /* the state's half before the embedding's */
} specd_fusion;

typedef struct {
    const specd_layer *layers;
    const float *norm; /* [H]; NULL: the identity */
    specd_matrix embedding;
    specd_matrix head;
    int64_t num_layers;
    int64_t hidden;
    int64_t inner;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim; /* a multiple of 16 */
    float eps;
    int32_t activations;        /* enum specd_activations */
    const specd_fusion *fusion; /* NULL: a token's embedding is the first layer's input */
} specd_model;

typedef struct {
    const int64_t *tokens;      /* [T] */
    const int64_t *positions;   /* [T] rotary position */
    const int64_t *write_slots; /* [T] page * page_size + offset */
    const int32_t *query_lens;  /* [B] */
    const int32_t *kv_lens;     /* [B] query rows counted */
    const int32_t *kv_indptr;   /* [B + 1] */
    const int32_t *kv_indices;
    const int64_t *parents;     /* [B, tree_nodes] parents first, -1 the root; NULL: every sequence is a chain */
    void *const *kv;            /* per layer [pages, 2, page_size, kv_heads, D] */
    const float *cosines;       /* [positions, D / 2] */
    const float *sines;
    int64_t num_tokens;
    int64_t num_sequences;
    int64_t tree_nodes;
    int64_t page_size;
    int64_t num_pages;     /* of each layer's KV: ids and slots beyond it are refused */
    int64_t num_positions; /* rows of the rotary tables */
    int32_t kv_kind; /* SPECD_F32, SPECD_F16 or SPECD_BF16 */
    int32_t num_aux;
    int64_t aux_layers[SPECD_MAX_AUX]; /* the residual stream entering these layers goes to `aux`; num_layers: the
                                          stream that the final norm reads */
    float *hidden;                     /* out [T, H] after the final norm */
    float *aux;                        /* out [T, num_aux * H] or NULL */
    const float *states;               /* [T, state_width] for a model with a fusion */
    int64_t state_width;               /* H, or the columns of fusion->features */
} specd_batch;

/* Tokens to be drawn, a row each; see draw.h. */
typedef struct {
    const float *logits;        /* rows of V, `stride` apart; weights >= 0 where temperature is NULL */
    const int64_t *rows;        /* [R] which of them, NULL: the first R */
    const float *temperature;   /* [R] > 0; NULL: a race of the given weights, and the next three are not read */
    const int64_t *top_k;       /* [R] >= 1; V or more: off */
    const float *top_p;         /* [R] > 0; infinite: off */
    const float *min_p;         /* [R] 0: off */
    const int64_t *keys;        /* [R] of the noise */
    int64_t *tokens;            /* out [R] 0 where the row cannot be used */
    uint8_t *usable;            /* out [R] 0: NaN, +inf, or nothing that may be drawn */
    int64_t num_rows;
    int64_t vocabulary;
    int64_t stride;
} specd_draws;

/* Rows of logits that exist. */
typedef struct {
    const float *logits; /* rows of V, `stride` apart */
    const int64_t *rows; /* [R] which of them, NULL: the first R */
    int64_t num_rows;
    int64_t vocabulary;
    int64_t stride;
} specd_logits_rows;

/* The k largest logits of each row, (logit descending, place ascending), and log(sum of e^logit) over the whole row;
 * see top.h. A row with a NaN has NaN in all of its values and in its sum. */
typedef struct {
    float *values;   /* out [R, k] */
    int64_t *places; /* out [R, k] */
    double *lse;     /* out [R]; NULL: not wanted */
    int64_t k;       /* 1 .. V */
} specd_tops;

/* Greedy acceptance of B chains (specd/sampling/chain.py: keep_best). */
typedef struct {
    const float *values;        /* [R] the largest logit of each logits row */
    const int64_t *best;        /* [R] its token */
    const int64_t *drafts;      /* [B, K] */
    const int64_t *row_index;   /* [B, K + 1] the logits row of each block row */
    const int64_t *num_drafts;  /* [B] */
    const uint8_t *emits;       /* [B] */
    const int64_t *root_offset; /* [B] the root among the row's query tokens */
    const int32_t *offsets;     /* [B + 1] query tokens */
    int64_t num_sequences;      /* B */
    int64_t num_rows;           /* R */
    int64_t max_drafts;         /* K */
    int64_t *tokens;            /* [B, K + 1] out, padded with -1 */
    int64_t *num_accepted;      /* [B] out */
    int64_t *next_token;        /* [B] out */
    int64_t *last_row;          /* [B] out */
    uint8_t *failed;            /* [B] out */
} specd_acceptance;

/* A head's tokens (specd/pipeline/refill.py: shift_left). */
typedef struct {
    const int64_t *tokens;      /* [T] what the target computed */
    const int32_t *offsets;     /* [B + 1] */
    const uint8_t *emits;       /* [B] */
    const int64_t *last_row;    /* [B] where the newest token was drawn, of rows that emit */
    const int64_t *next_token;  /* [B] the newest token */
    const int64_t *next_prompt; /* [B] the prompt's next token, of rows that do not emit */
    int64_t num_sequences;
    int64_t num_tokens;         /* T */
    int64_t *shifted;           /* [T] out */
    int64_t *last_rows;         /* [B] out */
} specd_shifts;

/* Scratch of one model: grows, is reused by every call, and serves one call at a time. */
typedef struct specd_workspace specd_workspace;

typedef struct specd_kernels specd_kernels; /* one level's functions */

#ifdef __cplusplus
extern "C" {
#endif

int specd_abi(void);

/* Space-separated names of the levels this machine can run, the best first. */
const char *specd_levels(void);
/* The level by its name, NULL when the machine cannot run it. */
const specd_kernels *specd_level(const char *name);
/* 1 when built with OpenMP: without it every call computes on the caller's thread. */
int specd_threaded(void);

/* Bytes of one strip; 0 for a format that does not exist or cols that are not whole blocks of it. */
int64_t specd_strip_bytes(int32_t kind, int64_t cols);
/* Interleaves plain rows (GGUF blocks, or a plain array for the float formats) into out, zero rows filling up the last
 * strip. out: ceil(rows / 16) strips. */
int specd_pack(int32_t kind, const uint8_t *rows, int64_t num_rows, int64_t cols, uint8_t *out);
/* Some rows of a packed matrix as another one, in the order of `rows`. out: ceil(count / 16) strips. */
int specd_pick(const specd_matrix *matrix, const int64_t *rows, int64_t count, uint8_t *out);
/* Dequantises one row: out f32[cols]. */
void specd_unpack_row(const specd_matrix *matrix, int64_t row, float *out);

specd_workspace *specd_workspace_new(void);
void specd_workspace_free(specd_workspace *workspace);

/* Every layer over the batch; writes keys and values, then batch->hidden and batch->aux. */
int specd_forward(const specd_kernels *kernels, const specd_model *model, const specd_batch *batch,
                  specd_workspace *workspace, int32_t threads);
/* The same, and in the same parallel region what specd_top gives of the hidden rows `rows` [num_rows]. */
int specd_forward_top(const specd_kernels *kernels, const specd_model *model, const specd_batch *batch,
                      const int64_t *rows, int64_t num_rows, const specd_tops *tops, specd_workspace *workspace,
                      int32_t threads);
/* hidden [num_rows, H] -> logits [num_rows, V]. */
int specd_logits(const specd_kernels *kernels, const specd_model *model, const float *hidden, int64_t num_rows,
                 float *logits, specd_workspace *workspace, int32_t threads);
/* The largest logit of each row and its place, the lowest on ties. A row with a NaN gives NaN. */
int specd_argmax(const specd_kernels *kernels, const specd_model *model, const float *hidden, int64_t num_rows,
                 float *values, int64_t *places, specd_workspace *workspace, int32_t threads);
/* Of the rows that specd_logits would give, bit for bit. */
int specd_top(const specd_kernels *kernels, const specd_model *model, const float *hidden, int64_t num_rows,
              const specd_tops *tops, specd_workspace *workspace, int32_t threads);
/* The same of rows that exist: equal rows give equal bits. */
int specd_top_rows(const specd_kernels *kernels, const specd_logits_rows *given, const specd_tops *tops,
                   specd_workspace *workspace, int32_t threads);
int specd_draw(const specd_kernels *kernels, const specd_draws *draws, specd_workspace *workspace, int32_t threads);
int specd_accept(const specd_acceptance *step);
int specd_shift(const specd_shifts *step);
/* One projection alone: x [num_rows, cols] -> y [num_rows, sum of rows]. For tests and benchmarks. */
int specd_linear_rows(const specd_kernels *kernels, const specd_linear *linear, int32_t activations, const float *x,
                      int64_t num_rows, float *y, specd_workspace *workspace, int32_t threads);
/* out[i] = the library's exp(x[i]), its silu(x[i]): for tests. */
void specd_exp(const specd_kernels *kernels, const float *x, int64_t count, float *exp_out, float *silu_out);
/* Reads memory as a forward reads weights, for the largest float there: how fast can that be? */
float specd_read(const specd_kernels *kernels, const float *data, int64_t count, int32_t threads);

#ifdef __cplusplus
}
#endif
#endif
