/* What the tests of the kernels share; test_kernels.c has the definitions.
 *
 * Memory is allocated to the byte, so that a read or write past any end is found by the sanitizers.
 */
#ifndef SPECD_TEST_KERNELS_H
#define SPECD_TEST_KERNELS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "specd_kernels.h"

enum { HIDDEN = 256, STATES = 3 * HIDDEN }; /* of the model, and of a head's states from three layers */

unsigned next_random(void);
/* Says what and ends the program. */
void fail(const char *what);
/* Aligned to 64 bytes. */
void *get(size_t size);
/* Uniform in -size .. size. */
float *floats(int64_t count, float size);
/* Random weights in any format. */
specd_matrix matrix(int32_t kind, int64_t rows, int64_t cols);
void free_matrix(const specd_matrix *m);

/* test_forward.c: a whole model on every level. state_width: 0, or of the states that a head reads. */
void check_forward(int32_t activations, int32_t kv_kind, int tree, int64_t state_width);

#endif
