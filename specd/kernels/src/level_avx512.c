/* The kernels for one instruction set; compiled with its flags (setup.py). */
#include <math.h>

#include "internal.h"

#include "simd_avx512.h"

#include "numeric.h"

#include "linear.h"

#include "strips.h"

#include "attention.h"

#include "forward.h"

#include "draw.h"

#include "top.h"

const specd_kernels specd_avx512 = {"avx512", run_forward, run_logits, run_top, run_rows, run_draw, run_exp, run_read};
