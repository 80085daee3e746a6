/* SGD on a federated model f and a local model l at the mixture of both (`struct pair` in native.c), with momentum, weight
   decay, a pull of f towards the received model and a penalty `angle cos^2(f, l)`. One pass over memory takes the step,
   makes the next mixture and adds up the products that the next step's angle needs. */

/* Columns with the same share of a client's row; `to` are the sums |f|^2, |l|^2 and f . l. */
FAST static void NAME(columns)(const struct pair *job, long row, long from, long until, REAL share, REAL next,
                               const REAL *along, double *to) {
    const REAL momentum = job->momentum, pull = job->pull, lr = job->lr;
    const REAL by_f = (1 - share) * job->scale, by_l = share * job->scale, cross = along[2];
    const REAL *first = job->received, *g = (const REAL *)job->gradient + row;
    REAL *f = (REAL *)job->federated + row, *l = (REAL *)job->local + row, *mixed = (REAL *)job->mixed + row;
    REAL *u = (REAL *)job->velocity + row, *v = (REAL *)job->local_velocity + row;
    NAME(vector) ff = NAME(spread)(0), ll = ff, fl = ff;
    long at = from;
    for (; at + LANES <= until; at += LANES) {
#define OF(array) (*(NAME(vector) *)(array + at))
        NAME(vector) a = OF(f), b = OF(l), gradient = OF(g);
        NAME(vector) p = momentum * OF(u) + along[0] * a + cross * b - pull * OF(first) + by_f * gradient;
        NAME(vector) q = momentum * OF(v) + along[1] * b + cross * a + by_l * gradient;
        OF(u) = p;
        OF(v) = q;
        OF(f) = a -= lr * p;
        OF(l) = b -= lr * q;
        OF(mixed) = a + next * (b - a);
        ff += a * a;
        ll += b * b;
        fl += a * b;
#undef OF
    }
    for (; at < until; at++) {
        REAL a = f[at], b = l[at];
        u[at] = momentum * u[at] + along[0] * a + cross * b - pull * first[at] + by_f * g[at];
        v[at] = momentum * v[at] + along[1] * b + cross * a + by_l * g[at];
        f[at] = a -= lr * u[at];
        l[at] = b -= lr * v[at];
        mixed[at] = a + next * (b - a);
        ff[0] += a * a;
        ll[0] += b * b;
        fl[0] += a * b;
    }
    for (int lane = 0; lane < LANES; lane++) {
        to[0] += ff[lane];
        to[1] += ll[lane];
        to[2] += fl[lane];
    }
}

/* The gradient of the angle's penalty is cross l - along_f f for f, and cross f - along_l l for l. */
void NAME(pair)(const struct pair *job) {
    const double least = sizeof(REAL) == 4 ? 1.17549435e-38 : 2.2250738585072014e-308;
    for (long client = 0; client < job->clients; client++) {
        double *dots = job->dots + 3 * client, sums[3] = {0};
        REAL along[3] = {job->decay + job->pull, job->decay, 0};
        if (job->angle > 0) {
            double ff = dots[0] > least ? dots[0] : least, ll = dots[1] > least ? dots[1] : least;
            double lengths = sqrt(ff) * sqrt(ll), cosine = dots[2] / lengths, twice = 2 * job->angle * cosine * cosine;
            along[0] -= twice / ff;
            along[1] -= twice / ll;
            along[2] = 2 * job->angle * cosine / lengths;
        }
        for (long span = 0; span < job->spans; span++) {
            long share = client * job->stride + job->place[span];
            NAME(columns)(job, client * job->columns, job->begin[span], job->end[span], ((REAL *)job->shares)[share],
                          job->next ? ((REAL *)job->next)[share] : 0, along, sums);
        }
        for (int i = 0; i < 3; i++) dots[i] = sums[i];
    }
}
