/* Plain SGD of many clients on one linear layer with cross-entropy: every client's steps one after another, with its
   model and its batch in the first caches. Sums over features are added lane by lane, so results differ from torch's in
   rounding only. NaN and infinity pass through, because the server refuses contributions that are not finite. */

/* exp of numbers up to 0; for float within two units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. */
static INLINE NAME(vector) NAME(exp)(NAME(vector) x) {
    if (sizeof(REAL) == sizeof(double)) {
        for (int lane = 0; lane < LANES; lane++) x[lane] = exp(x[lane]);
        return x;
    }
    const NAME(mask) lowest = (NAME(mask))((NAME(vector)){} - 87.0f), infinite = (NAME(mask)){} + 0x7f800000;
    NAME(mask) size = (NAME(mask))x & 0x7fffffff;  /* magnitudes have the order of their bits, and NaN comes last */
    NAME(mask) below = (((lowest & 0x7fffffff) - size) >> 31) & ~((infinite - size) >> 31);
    x = (NAME(vector))((below & lowest) | (~below & (NAME(mask))x));
    NAME(vector) n = x * 1.44269504f + 12582912.0f;
    n -= 12582912.0f;
    NAME(vector) r = x - n * 0.693359375f + n * 2.12194440e-4f;
    NAME(vector) p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    NAME(mask) power = (__builtin_convertvector(n, NAME(mask)) + 127) << 23;
    return p * (NAME(vector))power;
}

/* Two vectors of partial sums as one: every other run of lanes comes from the first or the second, and each run has the
   run beside it added. MINE picks runs of the first and the second, OTHERS the rest, and SWAP exchanges neighbours. */
#if LANES == 16
#define RUNS(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) ((NAME(mask)){a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p})
#define MINE_1 RUNS(0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31)
#define SWAP_1 RUNS(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define MINE_2 RUNS(0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31)
#define SWAP_2 RUNS(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define MINE_4 RUNS(0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31)
#define SWAP_4 RUNS(4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define MINE_8 RUNS(0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31)
#define SWAP_8 RUNS(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#elif LANES == 8
#define RUNS(a, b, c, d, e, f, g, h) ((NAME(mask)){a, b, c, d, e, f, g, h})
#define MINE_1 RUNS(0, 9, 2, 11, 4, 13, 6, 15)
#define SWAP_1 RUNS(1, 0, 3, 2, 5, 4, 7, 6)
#define MINE_2 RUNS(0, 1, 10, 11, 4, 5, 14, 15)
#define SWAP_2 RUNS(2, 3, 0, 1, 6, 7, 4, 5)
#define MINE_4 RUNS(0, 1, 2, 3, 12, 13, 14, 15)
#define SWAP_4 RUNS(4, 5, 6, 7, 0, 1, 2, 3)
#elif LANES == 4
#define RUNS(a, b, c, d) ((NAME(mask)){a, b, c, d})
#define MINE_1 RUNS(0, 5, 2, 7)
#define SWAP_1 RUNS(1, 0, 3, 2)
#define MINE_2 RUNS(0, 1, 6, 7)
#define SWAP_2 RUNS(2, 3, 0, 1)
#elif LANES == 2
#define MINE_1 ((NAME(mask)){0, 3})
#define SWAP_1 ((NAME(mask)){1, 0})
#endif
#define JOIN(run)                                                                                            \
    UNROLL for (int i = 0; i < (left + 1) / 2; i++) {                                                               \
        NAME(vector) p = a[2 * i], q = 2 * i + 1 < left ? a[2 * i + 1] : NAME(spread)(0);                    \
        a[i] = __builtin_shuffle(p, q, MINE_##run) +                                                         \
               __builtin_shuffle(__builtin_shuffle(q, p, MINE_##run), SWAP_##run);                           \
    }                                                                                                        \
    left = (left + 1) / 2;

/* Lane i of the result is the sum over the lanes of a[i], for up to LANES vectors. */
static INLINE NAME(vector) NAME(sums)(NAME(vector) *a, int left) {
    JOIN(1)
#if LANES >= 4
    JOIN(2)
#endif
#if LANES >= 8
    JOIN(4)
#endif
#if LANES == 16
    JOIN(8)
#endif
    return a[0];
}

/* out[k][b] = bias[k] + x[b] . w[k], for `some` examples and `many` classes, both known to the compiler. Writes whole
   vectors: what lies behind the last example is overwritten later, or not used. */
static INLINE void NAME(tile)(const NAME(vector) *w, const REAL *bias, const NAME(vector) *const *x, REAL *out, long width,
                              long lead, const int some, const int many) {
    NAME(vector) a[2 * SOME];
    UNROLL
    for (int i = 0; i < some * many; i++) a[i] = NAME(spread)(0);
    for (long d = 0; d < width; d++)
        UNROLL
        for (int b = 0; b < some; b++) {
            NAME(vector) p = x[b][d];
            UNROLL
            for (int k = 0; k < many; k++) a[k * some + b] += p * w[k * width + d];
        }
    UNROLL
    for (int k = 0; k < many; k++)
        *(NAME(vector) *)(out + k * lead) = NAME(sums)(a + k * some, some) + bias[k];
}

#define TILES(some)                                                                                      \
    if (left_over >= some) {                                                                             \
        long k = 0;                                                                                      \
        for (; k + 2 <= classes; k += 2)                                                                 \
            NAME(tile)(w + k * width, bias + k, x + b, out + k * lead + b, width, lead, some, 2);        \
        for (; k < classes; k++)                                                                         \
            NAME(tile)(w + k * width, bias + k, x + b, out + k * lead + b, width, lead, some, 1);        \
        b += some;                                                                                       \
        continue;                                                                                        \
    }

/* The same for all examples of a batch and all classes; rows are padded to whole vectors. */
FAST static void NAME(forward)(const NAME(vector) *w, const REAL *bias, const NAME(vector) *const *x, REAL *out,
                               long batch, long classes, long width, long lead) {
    for (long b = 0; b < batch;) {
        long left_over = batch - b;
        if (left_over % SOME == 0) TILES(SOME)
        TILES(FEWER)
        TILES(2)
        TILES(1)
    }
}

/* w[k] <- keep w[k] + pull w0[k] - shift[k] - sum_b grad[k][b] x[b], for `many` classes and `wide` vectors of features.
   With momentum this sum is the next speed, to which momentum times the last one is added, and w moves by it. */
static INLINE void NAME(moved)(NAME(vector) *w, const NAME(vector) *received, const NAME(vector) *shift,
                               NAME(vector) *speed, const NAME(vector) *const *x, const REAL *grad, long batch,
                               long width, long lead, REAL keep, REAL pull, REAL momentum, long d, const int many,
                               const int wide) {
    NAME(vector) a[5 * ACROSS];
    UNROLL
    for (int i = 0; i < many; i++)
        UNROLL
        for (int j = 0; j < wide; j++) a[i * wide + j] = w[i * width + d + j];
    if (keep != 1 || pull != 0)
        UNROLL
        for (int i = 0; i < many; i++)
            UNROLL
            for (int j = 0; j < wide; j++)
                a[i * wide + j] = keep * a[i * wide + j] + pull * received[i * width + d + j];
    if (shift)
        UNROLL
        for (int i = 0; i < many; i++)
            UNROLL
            for (int j = 0; j < wide; j++) a[i * wide + j] -= shift[i * width + d + j];
    if (speed)
        UNROLL
        for (int i = 0; i < many; i++)
            UNROLL
            for (int j = 0; j < wide; j++) a[i * wide + j] += momentum * speed[i * width + d + j];
    for (long b = 0; b < batch; b++) {
        NAME(vector) v[ACROSS];
        UNROLL
        for (int j = 0; j < wide; j++) v[j] = x[b][d + j];
        UNROLL
        for (int i = 0; i < many; i++) {
            REAL g = grad[i * lead + b];
            UNROLL
            for (int j = 0; j < wide; j++) a[i * wide + j] -= g * v[j];
        }
    }
    if (speed)
        UNROLL
        for (int i = 0; i < many; i++)
            UNROLL
            for (int j = 0; j < wide; j++) {
                speed[i * width + d + j] = a[i * wide + j];
                a[i * wide + j] += w[i * width + d + j];
            }
    UNROLL
    for (int i = 0; i < many; i++)
        UNROLL
        for (int j = 0; j < wide; j++) w[i * width + d + j] = a[i * wide + j];
}

#define MOVE(many, wide)                                                                                       \
    for (; d + wide <= width; d += wide)                                                                       \
        NAME(moved)(w + k * width, received + k * width, shift ? shift + k * width : 0,                        \
                    speed ? speed + k * width : 0, x, grad + k * lead, batch, width, lead, keep, pull,         \
                    momentum, d, many, wide);

/* The same for all classes and features, and for the bias; the gradient already has step size and mean in it. */
FAST static void NAME(backward)(NAME(vector) *w, const NAME(vector) *received, const NAME(vector) *shift,
                                NAME(vector) *speed, REAL *bias, const REAL *first_bias, const REAL *bias_shift,
                                REAL *bias_speed, const NAME(vector) *const *x, const REAL *grad, long batch,
                                long classes, long width, long lead, REAL keep, REAL pull, REAL momentum) {
    long k = 0;
    for (; k + 5 <= classes; k += 5) {
        long d = 0;
        MOVE(5, ACROSS)
        MOVE(5, 1)
    }
    for (; k < classes; k++) {
        long d = 0;
        MOVE(1, ACROSS)
        MOVE(1, 1)
    }
    if (first_bias)
        for (k = 0; k < classes; k++) {
            REAL total = 0;
            for (long b = 0; b < batch; b++) total += grad[k * lead + b];
            REAL moved = keep * bias[k] + pull * first_bias[k] - total;
            if (shift) moved -= bias_shift[k];
            if (speed) moved = bias[k] + (bias_speed[k] = momentum * bias_speed[k] + moved);
            bias[k] = moved;
        }
}

/* Softmax over classes of all examples of a batch, whose losses are returned as a sum; out becomes the gradient. */
FAST static double NAME(losses)(REAL *out, const int64_t *labels, const uint8_t *used, long batch, long classes,
                                long lead, REAL scale) {
    NAME(vector) *o = (NAME(vector) *)out;
    long lanes = lead / LANES, groups = (batch + LANES - 1) / LANES;
    double total = 0;
    for (long v = 0; v < groups; v++) {
        NAME(vector) most = o[v], all = NAME(spread)(0);
        for (long k = 1; k < classes; k++) {
            /* By the sign of the difference, because gcc compares wide vectors number by number. A NaN may be passed over
               here: it comes back from exp. */
            NAME(vector) next = o[k * lanes + v];
            NAME(mask) larger = (NAME(mask))(most - next) >> (8 * sizeof(REAL) - 1);
            most = (NAME(vector))((larger & (NAME(mask))next) | (~larger & (NAME(mask))most));
        }
        REAL right[LANES];
        long here = batch - v * LANES < LANES ? batch - v * LANES : LANES;
        for (long i = 0; i < here; i++) right[i] = out[labels[v * LANES + i] * lead + v * LANES + i] - most[i];
        for (long k = 0; k < classes; k++) all += o[k * lanes + v] = NAME(exp)(o[k * lanes + v] - most);
        NAME(vector) factor = scale / all;
        for (long k = 0; k < classes; k++) o[k * lanes + v] *= factor;
        double product = 1;  /* of sums between 1 and the number of classes: one logarithm for all of them */
        for (long i = 0; i < here; i++) {
            long b = v * LANES + i;
            out[labels[b] * lead + b] -= scale;
            if (used && !used[b]) continue;
            product *= all[i];
            total -= right[i];
        }
        total += log(product);
    }
    if (used)
        for (long k = 0; k < classes; k++)
            for (long b = 0; b < batch; b++)
                if (!used[b]) out[k * lead + b] = 0;
    return total;
}

/* out = one - other; returns the sum of squares. */
FAST static double NAME(difference)(const REAL *one, const REAL *other, REAL *out, long count) {
    double total[8] = {0};
    long at = 0;
    for (; at + 8 <= count; at += 8)
        for (int i = 0; i < 8; i++) {
            REAL apart = out[at + i] = one[at + i] - other[at + i];
            total[i] += (double)apart * apart;
        }
    for (; at < count; at++) {
        REAL apart = out[at] = one[at] - other[at];
        total[0] += (double)apart * apart;
    }
    for (int i = 1; i < 8; i++) total[0] += total[i];
    return total[0];
}

/* The row of the pool in a slot of a client's step; -1 if there is none. */
static INLINE int64_t NAME(row)(const struct block *job, long client, long step, long b, const uint8_t *used) {
    int64_t row = job->start[client] + job->index[(client * job->planned + step) * job->batch + b];
    if (used && !used[b] && row >= job->examples) row = job->examples - 1;  /* any will do in an unused slot */
    return row < 0 || row >= job->examples ? -1 : row;
}

/* Ask for the examples of a step before they are needed: clients lie anywhere in memory. */
static INLINE void NAME(fetch)(const struct block *job, long client, long step) {
    if (client >= job->clients || step >= job->steps || client >= job->running[step]) return;
    long bytes = job->features * sizeof(REAL);
    for (long b = 0; b < job->batch; b++) {
        int64_t row = NAME(row)(job, client, step, b, 0);
        if (row < 0) continue;
        const char *at = (const char *)((const REAL *)job->x + row * job->features);
        for (long byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at + byte, 0, 3);
        __builtin_prefetch(job->y + row);
    }
}

/* One client: copies its model, takes its steps, and writes the difference from the received model. Returns 2 if a
   row or a label is out of range. */
static int NAME(client)(const struct block *job, long client, REAL *memory, int64_t *labels, const NAME(vector) **rows) {
    long width = (job->features + LANES - 1) / LANES, padded = width * LANES;
    long lead = (job->batch + LANES - 1) / LANES * LANES + LANES;
    REAL *received = memory, *w = received + job->classes * padded, *x = w + job->classes * padded;
    REAL *out = x + job->batch * padded, *bias = out + job->classes * lead, *bias_speed = bias + job->classes;
    REAL *speed = bias_speed + job->classes, *bias_shift = speed + job->classes * padded;
    REAL *shift = bias_shift + job->classes;
    const REAL *first = job->weight, *first_bias = job->bias, *pool = job->x;
    memcpy(w, received, job->classes * padded * sizeof(REAL));
    for (long k = 0; k < job->classes; k++) bias[k] = first_bias ? first_bias[k] : 0;
    memset(bias_speed, 0, job->classes * (1 + padded) * sizeof(REAL));
    if (!job->momentum) speed = 0;
    if (job->shift)  /* its rows are padded with the zeros that are there */
        for (long k = 0; k < job->classes; k++) {
            const REAL *row = (const REAL *)job->shift + (client * job->classes + k) * job->features;
            for (long d = 0; d < job->features; d++) shift[k * padded + d] = job->lr * row[d];
            if (first_bias) bias_shift[k] = job->lr * ((const REAL *)job->bias_shift)[client * job->classes + k];
        }
    else
        shift = 0;
    double less = job->lr * (job->decay + job->pull);
    double by_example = 0, by_batch = 0;
    for (long step = 0; step < job->steps && client < job->running[step]; step++) {
        long place = (step * job->clients + client) * job->batch;
        const uint8_t *used = job->full[step] ? 0 : job->mask + place;
        long seen = job->full[step] ? job->batch : job->seen[step * job->clients + client];
        for (long b = 0; b < job->batch; b++) {
            int64_t row = NAME(row)(job, client, step, b, used);
            if (row < 0) return 2;
            labels[b] = job->y[row];
            if (labels[b] < 0 || labels[b] >= job->classes) return 2;
            rows[b] = (NAME(vector) *)(pool + row * job->features);
            if (padded == job->features) continue;  /* whole vectors: read where they are */
            memcpy(x + b * padded, pool + row * job->features, job->features * sizeof(REAL));
            rows[b] = (NAME(vector) *)(x + b * padded);
        }
        int more = step + 1 < job->steps && client < job->running[step + 1];
        NAME(fetch)(job, more ? client : client + 1, more ? step + 1 : 0);
        NAME(forward)((NAME(vector) *)w, bias, rows, out, job->batch, job->classes, width, lead);
        double loss = NAME(losses)(out, labels, used, job->batch, job->classes, lead, job->lr / seen);
        by_example += loss;
        by_batch += loss / seen;
        NAME(backward)((NAME(vector) *)w, (NAME(vector) *)received, (NAME(vector) *)shift, (NAME(vector) *)speed, bias,
                       first_bias, bias_shift, bias_speed, rows, out, job->batch, job->classes, width, lead,
                       speed ? -less : 1 - less, job->lr * job->pull, job->momentum);
    }
    REAL *weights = (REAL *)job->weights + client * job->classes * job->features;
    double squares = 0, bias_squares = 0;
    for (long k = 0; k < job->classes; k++)
        squares += NAME(difference)(w + k * padded, first + k * job->features, weights + k * job->features, job->features);
    if (first_bias)
        bias_squares = NAME(difference)(bias, first_bias, (REAL *)job->biases + client * job->classes, job->classes);
    job->weight_squares[client] = squares;
    if (first_bias) job->bias_squares[client] = bias_squares;
    job->losses[2 * client] = by_example;
    job->losses[2 * client + 1] = by_batch;
    return 0;
}

/* All clients; returns 1 without memory, 2 as above, and 3 if all was done but some number is not finite. */
int NAME(steps)(const struct block *job) {
    long padded = (job->features + LANES - 1) / LANES * LANES, lead = (job->batch + LANES - 1) / LANES * LANES + LANES;
    size_t numbers = (4 * job->classes + job->batch) * padded + job->classes * (lead + 3) + LANES;
    size_t bytes = numbers * sizeof(REAL), slots = (bytes + 63) / 64 * 64;
    void *held = 0;
    if (posix_memalign(&held, 64, slots + job->batch * (sizeof(int64_t) + sizeof(void *)))) return 1;
    REAL *memory = memset(held, 0, bytes);
    int64_t *labels = (int64_t *)((char *)held + slots);
    const NAME(vector) **rows = (const NAME(vector) **)(labels + job->batch);
    for (long k = 0; k < job->classes; k++)
        memcpy(memory + k * padded, (REAL *)job->weight + k * job->features, job->features * sizeof(REAL));
    int wrong = 0;
    for (long client = 0; client < job->clients && !wrong; client++)
        wrong = NAME(client)(job, client, memory, labels, rows);
    free(held);
    double squares = 0;
    for (long client = 0; client < job->clients && !wrong; client++)
        squares += job->weight_squares[client] + (job->bias ? job->bias_squares[client] : 0);
    return wrong ? wrong : isfinite(squares) ? 0 : 3;
}

#undef RUNS
#undef MINE_1
#undef SWAP_1
#undef MINE_2
#undef SWAP_2
#undef MINE_4
#undef SWAP_4
#undef MINE_8
#undef SWAP_8
#undef JOIN
#undef TILES
#undef MOVE
