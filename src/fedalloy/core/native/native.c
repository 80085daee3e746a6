/* Kernels that are compiled when the wheel is built; fedalloy.core.native calls them, and works without them.
   SOURCES is a fingerprint of the files it was compiled from. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif

#define SHORT 256
#include "draws.c"
#include "numbers.c"

/* A block of clients, as fedalloy.core.blocks.Prepared describes it: index [C, planned, B], mask [S, C, B], seen [S, C];
   weights [C, K, D] and biases [C, K] are what the clients send, and squares their squared lengths, [C] each. */
struct block {
    int64_t clients, steps, planned, batch, features, classes, examples;
    double lr, decay, pull;
    const void *x, *weight, *bias;
    const int64_t *y, *start, *index, *running, *seen;
    const uint8_t *full, *mask;
    void *weights, *biases;
    double *losses, *weight_squares, *bias_squares;
};

#define REAL float
#define LANES 16
#define NAME(name) name##_float
#define EXP exp_float
#define INT int32_t

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
#define LOWEST ((floats){} - 87.0f)

/* exp of numbers up to 0, within two units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. */
static inline __attribute__((always_inline)) floats exp_float(floats x) {
    ints below = x < -87.0f;
    x = (floats)((below & (ints)(LOWEST)) | (~below & (ints)x));
    floats n = x * 1.44269504f + 12582912.0f;
    n -= 12582912.0f;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return p * (floats)power;
}

#include "logistic.c"
#undef REAL
#undef LANES
#undef NAME
#undef EXP
#undef INT

#define REAL double
#define LANES 8
#define NAME(name) name##_double
#define EXP exp_double
#define INT int64_t

typedef double doubles __attribute__((vector_size(64)));

static inline __attribute__((always_inline)) doubles exp_double(doubles x) {
    for (int lane = 0; lane < 8; lane++) x[lane] = exp(x[lane]);
    return x;
}

#include "logistic.c"

const char *sources(void) { return SOURCES; }
