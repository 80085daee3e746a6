/* Kernels that are compiled when the wheel is built; fedalloy.core.native calls them, and works without them.
   SOURCES is a fingerprint of the files it was compiled from. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define X86
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#define FAST CLONES
#define SHORT 256
#define FEW 32
#include "draws.c"
#include "numbers.c"
#include "elements.c"

/* A block of clients, as fedalloy.core.blocks.Prepared describes it: index [C, planned, B], mask [S, C, B], seen [S, C];
   weights [C, K, D] and biases [C, K] are what the clients send, and squares their squared lengths, [C] each. shift and
   bias_shift, of the same shapes, are added to every gradient of a client; they may be missing. */
struct block {
    int64_t clients, steps, planned, batch, features, classes, examples;
    double lr, decay, pull, momentum;
    const void *x, *weight, *bias, *shift, *bias_shift;
    const int64_t *y, *start, *index, *running, *seen;
    const uint8_t *full, *mask;
    void *weights, *biases;
    double *losses, *weight_squares, *bias_squares;
};

/* One step of a federated model f and a local model l of every client, a row of `columns` numbers each, with their
   velocities, the gradient at the mixture of both, and one received model for all. Columns from begin[i] to end[i] are
   mixed by number place[i] of a client's `shares`, which lie `stride` numbers apart; `next` are those of the next step.
   dots are |f|^2, |l|^2 and f . l, [C, 3]. */
struct pair {
    int64_t clients, columns, spans, stride;
    double momentum, decay, pull, angle, lr, scale;
    const int64_t *begin, *end, *place;
    const void *received, *gradient, *shares, *next;
    void *federated, *local, *velocity, *local_velocity, *mixed;
    double *dots;
};

/* Vectors of 16 bytes for every machine, of 32 and 64 bytes for those that have them. */
#undef FAST
#define FAST
#define REAL float
#define INT int32_t
#define LANES 4
#define NAME(name) name##_float_16
#define SOME 4
#define FEWER 2
#define ACROSS 1
#include "width.c"

#define REAL double
#define INT int64_t
#define LANES 2
#define NAME(name) name##_double_16
#define SOME 2
#define FEWER 2
#define ACROSS 1
#include "width.c"

#ifdef X86
#undef FAST
#define FAST __attribute__((target("arch=x86-64-v3")))
#define REAL float
#define INT int32_t
#define LANES 8
#define NAME(name) name##_float_32
#define SOME 5
#define FEWER 4
#define ACROSS 2
#include "width.c"

#define REAL double
#define INT int64_t
#define LANES 4
#define NAME(name) name##_double_32
#define SOME 4
#define FEWER 2
#define ACROSS 2
#include "width.c"

#undef FAST
#define FAST __attribute__((target("arch=x86-64-v4")))
#define REAL float
#define INT int32_t
#define LANES 16
#define NAME(name) name##_float_64
#define SOME 10
#define FEWER 8
#define ACROSS 4
#include "width.c"

#define REAL double
#define INT int64_t
#define LANES 8
#define NAME(name) name##_double_64
#define SOME 8
#define FEWER 4
#define ACROSS 4
#include "width.c"

#define CHOSEN(what, kind, job)                                                \
    (__builtin_cpu_supports("x86-64-v4")   ? what##_##kind##_64(job)           \
     : __builtin_cpu_supports("x86-64-v3") ? what##_##kind##_32(job)           \
                                           : what##_##kind##_16(job))
#else
#define CHOSEN(what, kind, job) what##_##kind##_16(job)
#endif

/* pair.c */
void pair_float(const struct pair *job) { CHOSEN(pair, float, job); }
void pair_double(const struct pair *job) { CHOSEN(pair, double, job); }

/* The local steps of a block; logistic.c says what is returned. */
int logistic_float(const struct block *job) { return CHOSEN(steps, float, job); }
int logistic_double(const struct block *job) { return CHOSEN(steps, double, job); }

const char *sources(void) { return SOURCES; }
