/* Plain SGD of many clients on one linear layer with cross-entropy: every client's steps one after another, with its
   model and its batch in the first caches. Included twice by native.c, for float and for double:

   REAL    the type of the numbers
   LANES   how many of them a vector holds
   NAME    appends the type to a name
   INT     a whole number of the same size
   EXP     exp of a vector

   Sums over features are added lane by lane, so results differ from torch's in rounding only. NaN and infinity pass
   through, because the server refuses contributions that are not finite. */

typedef REAL NAME(vector) __attribute__((vector_size(LANES * sizeof(REAL))));
typedef INT NAME(mask) __attribute__((vector_size(LANES * sizeof(REAL))));

static inline __attribute__((always_inline)) NAME(vector) NAME(spread)(REAL value) {
    NAME(vector) all;
    for (int lane = 0; lane < LANES; lane++) all[lane] = value;
    return all;
}

static inline __attribute__((always_inline)) REAL NAME(sum)(NAME(vector) values) {
#if LANES == 16
    values += __builtin_shuffle(values, (NAME(mask)){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    values += __builtin_shuffle(values, (NAME(mask)){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    values += __builtin_shuffle(values, (NAME(mask)){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    values += __builtin_shuffle(values, (NAME(mask)){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
#else
    values += __builtin_shuffle(values, (NAME(mask)){4, 5, 6, 7, 0, 1, 2, 3});
    values += __builtin_shuffle(values, (NAME(mask)){2, 3, 0, 1, 6, 7, 4, 5});
    values += __builtin_shuffle(values, (NAME(mask)){1, 0, 3, 2, 5, 4, 7, 6});
#endif
    return values[0];
}

/* out[b][k] = bias[k] + x[b] . w[k], for all examples of a batch; rows are padded to whole vectors. */
FAST static void NAME(forward)(const NAME(vector) *w, const REAL *bias, const NAME(vector) *x, REAL *out,
                               long batch, long classes, long width, long lead) {
    long b = 0;
    for (; b + 2 <= batch; b += 2) {
        const NAME(vector) *x0 = x + b * width, *x1 = x0 + width;
        long k = 0;
        for (; k + 5 <= classes; k += 5) {
            NAME(vector) a[10];
            for (int i = 0; i < 10; i++) a[i] = NAME(spread)(0);
            const NAME(vector) *w0 = w + k * width;
            for (long d = 0; d < width; d++) {
                NAME(vector) p = x0[d], q = x1[d];
                for (int i = 0; i < 5; i++) {
                    NAME(vector) v = w0[i * width + d];
                    a[i] += p * v;
                    a[5 + i] += q * v;
                }
            }
            for (int i = 0; i < 5; i++) {
                out[(k + i) * lead + b] = bias[k + i] + NAME(sum)(a[i]);
                out[(k + i) * lead + b + 1] = bias[k + i] + NAME(sum)(a[5 + i]);
            }
        }
        for (; k < classes; k++) {
            NAME(vector) a = NAME(spread)(0), c = a;
            for (long d = 0; d < width; d++) {
                a += x0[d] * w[k * width + d];
                c += x1[d] * w[k * width + d];
            }
            out[k * lead + b] = bias[k] + NAME(sum)(a);
            out[k * lead + b + 1] = bias[k] + NAME(sum)(c);
        }
    }
    for (; b < batch; b++)
        for (long k = 0; k < classes; k++) {
            NAME(vector) a = NAME(spread)(0);
            for (long d = 0; d < width; d++) a += x[b * width + d] * w[k * width + d];
            out[k * lead + b] = bias[k] + NAME(sum)(a);
        }
}

/* w[k] <- keep w[k] + pull w0[k] - sum_b grad[k][b] x[b]; the gradient already has step size and mean in it. */
FAST static void NAME(backward)(NAME(vector) *w, const NAME(vector) *received, REAL *bias, const REAL *first_bias,
                                const NAME(vector) *x, const REAL *grad, long batch, long classes, long width,
                                long lead, REAL keep, REAL pull) {
    for (long k = 0; k < classes; k += 5) {
        int some = classes - k < 5 ? (int)(classes - k) : 5;
        const REAL *g = grad + k * lead;
        for (long d = 0; d < width; d++) {
            NAME(vector) a[5];
            for (int i = 0; i < some; i++) a[i] = w[(k + i) * width + d];
            if (keep != 1 || pull != 0)
                for (int i = 0; i < some; i++) a[i] = keep * a[i] + pull * received[(k + i) * width + d];
            if (some == 5)
                for (long b = 0; b < batch; b++) {
                    NAME(vector) v = x[b * width + d];
                    for (int i = 0; i < 5; i++) a[i] -= g[i * lead + b] * v;
                }
            else
                for (long b = 0; b < batch; b++)
                    for (int i = 0; i < some; i++) a[i] -= g[i * lead + b] * x[b * width + d];
            for (int i = 0; i < some; i++) w[(k + i) * width + d] = a[i];
        }
    }
    if (first_bias)
        for (long k = 0; k < classes; k++) {
            REAL total = 0;
            for (long b = 0; b < batch; b++) total += grad[k * lead + b];
            bias[k] = keep * bias[k] + pull * first_bias[k] - total;
        }
}

/* Softmax over classes of all examples of a batch, whose losses are returned as a sum; out becomes the gradient. */
FAST static double NAME(losses)(REAL *out, const int64_t *labels, const uint8_t *used, long batch, long classes,
                                long lead, REAL scale) {
    NAME(vector) *o = (NAME(vector) *)out;
    long lanes = lead / LANES;
    double total = 0;
    for (long v = 0; v < lanes; v++) {
        NAME(vector) most = o[v], all = NAME(spread)(0);
        for (long k = 1; k < classes; k++) {
            NAME(vector) next = o[k * lanes + v];
            NAME(mask) larger = (next > most) | (next != next);
            most = (NAME(vector))((larger & (NAME(mask))next) | (~larger & (NAME(mask))most));
        }
        REAL right[LANES];
        long here = batch - v * LANES < LANES ? batch - v * LANES : LANES;
        for (long i = 0; i < here; i++) right[i] = out[labels[v * LANES + i] * lead + v * LANES + i] - most[i];
        for (long k = 0; k < classes; k++) all += o[k * lanes + v] = EXP(o[k * lanes + v] - most);
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

/* One client: copies its model, takes its steps, and writes the difference from the received model. Returns 2 if a
   row or a label is out of range. */
static int NAME(client)(const struct block *job, long client, REAL *memory) {
    long width = (job->features + LANES - 1) / LANES, padded = width * LANES;
    long lead = (job->batch + LANES - 1) / LANES * LANES;
    REAL *received = memory, *w = received + job->classes * padded, *x = w + job->classes * padded;
    REAL *out = x + job->batch * padded, *bias = out + job->classes * lead;
    const REAL *first = job->weight, *first_bias = job->bias, *pool = job->x;
    memcpy(w, received, job->classes * padded * sizeof(REAL));
    for (long k = 0; k < job->classes; k++) bias[k] = first_bias ? first_bias[k] : 0;
    double by_example = 0, by_batch = 0;
    for (long step = 0; step < job->steps && client < job->running[step]; step++) {
        long place = (step * job->clients + client) * job->batch;
        const uint8_t *used = job->full[step] ? 0 : job->mask + place;
        long seen = job->full[step] ? job->batch : job->seen[step * job->clients + client];
        int64_t labels[job->batch];
        for (long b = 0; b < job->batch; b++) {
            int64_t row = job->start[client] + job->index[(client * job->planned + step) * job->batch + b];
            if (used && !used[b] && row >= job->examples) row = job->examples - 1;  /* any will do in an unused slot */
            if (row < 0 || row >= job->examples) return 2;
            memcpy(x + b * padded, pool + row * job->features, job->features * sizeof(REAL));
            labels[b] = job->y[row];
            if (labels[b] < 0 || labels[b] >= job->classes) return 2;
        }
        NAME(forward)((NAME(vector) *)w, bias, (NAME(vector) *)x, out, job->batch, job->classes, width, lead);
        double loss = NAME(losses)(out, labels, used, job->batch, job->classes, lead, job->lr / seen);
        by_example += loss;
        by_batch += loss / seen;
        NAME(backward)((NAME(vector) *)w, (NAME(vector) *)received, bias, first_bias, (NAME(vector) *)x, out,
                       job->batch, job->classes, width, lead, 1 - job->lr * (job->decay + job->pull),
                       job->lr * job->pull);
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
int NAME(logistic)(const struct block *job) {
    long padded = (job->features + LANES - 1) / LANES * LANES, lead = (job->batch + LANES - 1) / LANES * LANES;
    size_t numbers = (2 * job->classes + job->batch) * padded + job->classes * (lead + 1) + LANES;
    void *held = 0;
    if (posix_memalign(&held, 64, numbers * sizeof(REAL))) return 1;
    REAL *memory = memset(held, 0, numbers * sizeof(REAL));
    for (long k = 0; k < job->classes; k++)
        memcpy(memory + k * padded, (REAL *)job->weight + k * job->features, job->features * sizeof(REAL));
    int wrong = 0;
    for (long client = 0; client < job->clients && !wrong; client++) wrong = NAME(client)(job, client, memory);
    free(held);
    double squares = 0;
    for (long client = 0; client < job->clients && !wrong; client++)
        squares += job->weight_squares[client] + (job->bias ? job->bias_squares[client] : 0);
    return wrong ? wrong : isfinite(squares) ? 0 : 3;
}
