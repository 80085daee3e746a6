/* Whether all statistics of a round are in order, in one pass each (where one is not, the caller looks closer), and
   weighted sums over clients and the places of some clients' examples. */

/* Bit 1: every size is between 0 and most, and whole if that is wanted; bit 2: none differs from the known one, NaN
   where there is none; bit 4: all are known. */
int sizes(const double *told, const double *known, long clients, double most, int whole) {
    int usable = 1, same = 1, all = known != 0;
    for (long i = 0; i < clients; i++) {
        usable &= told[i] >= 0 && told[i] <= most && (!whole || told[i] == floor(told[i]));
        if (!known) continue;
        all &= told[i] == known[i];
        same &= told[i] == known[i] || known[i] != known[i] || told[i] != told[i];
    }
    return usable | same << 1 | all << 2;
}

/* Whether every number of every statistic is finite, between low and high, not between 0 and least, and whole if that
   is wanted. */
int in_range(const double *const *values, long statistics, long clients, const double *low, const double *high,
             const double *least, const uint8_t *whole) {
    int good = 1;
    for (long s = 0; s < statistics; s++)
        for (long i = 0; i < clients; i++) {
            double value = values[s][i];
            good &= value >= low[s] && value <= high[s] && !(value > 0 && value < least[s]);
            good &= !whole[s] || value == floor(value);
        }
    return good;
}

/* out[j] = sum_i weights[i] rows[i][j], added in double; from one row to the next there are `stride` numbers. */
FAST void combined(const double *weights, const float *rows, long clients, long columns, long stride, float *out) {
    double sums[512];
    for (long from = 0; from < columns; from += 512) {
        long here = columns - from < 512 ? columns - from : 512;
        for (long j = 0; j < here; j++) sums[j] = 0;
        for (long i = 0; i < clients; i++) {
            double weight = weights[i];
            const float *row = rows + i * stride + from;
            for (long j = 0; j < here; j++) sums[j] += weight * row[j];
        }
        for (long j = 0; j < here; j++) out[from + j] = (float)sums[j];
    }
}

/* start and size of some clients; 1 if one does not exist. */
int clients_of(const int64_t *ids, long count, int64_t population, const int64_t *start, const int64_t *size,
               int64_t *starts, int64_t *sizes) {
    for (long i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= population) return 1;
        starts[i] = start[ids[i]];
        sizes[i] = size[ids[i]];
    }
    return 0;
}
