/* Weights on elements: rows of columns, one row per client, with `stride` numbers from one row to the next. */

/* weights[i][j] is `share` where values[i][j] lies from low[j] to high[j], and 0 elsewhere; inside[j] counts those. */
FAST void between(const float *values, long clients, long columns, long stride, const float *low, const float *high,
                  float share, float *weights, int32_t *inside) {
    for (long from = 0; from < columns; from += 1024) {
        long here = columns - from < 1024 ? columns - from : 1024;
        const float *least = low + from, *most = high + from;
        int32_t *count = inside + from;
        for (long j = 0; j < here; j++) count[j] = 0;
        for (long i = 0; i < clients; i++) {
            const float *row = values + i * stride + from;
            float *out = weights + i * columns + from;
            for (long j = 0; j < here; j++) {
                int32_t one = (row[j] >= least[j]) & (row[j] <= most[j]);
                out[j] = one ? share : 0;
                count[j] += one;
            }
        }
    }
}

/* out[j] = sum_i weights[i][j] values[i][j], every product rounded once and added in double. */
FAST void weighed(const float *values, const float *weights, long clients, long columns, long stride,
                  long weight_stride, float *out) {
    double sums[512];
    for (long from = 0; from < columns; from += 512) {
        long here = columns - from < 512 ? columns - from : 512;
        for (long j = 0; j < here; j++) sums[j] = 0;
        for (long i = 0; i < clients; i++) {
            const float *row = values + i * stride + from, *weight = weights + i * weight_stride + from;
            for (long j = 0; j < here; j++) sums[j] += (double)(weight[j] * row[j]);
        }
        for (long j = 0; j < here; j++) out[from + j] = (float)sums[j];
    }
}

/* totals[i] = sum_j rows[i][j], added in double. */
FAST void row_sums(const float *rows, long clients, long columns, long stride, double *totals) {
    for (long i = 0; i < clients; i++) {
        const float *row = rows + i * stride;
        double lanes[16] = {0}, total = 0;
        long j = 0;
        for (; j + 16 <= columns; j += 16)
            for (long lane = 0; lane < 16; lane++) lanes[lane] += row[j + lane];
        for (; j < columns; j++) total += row[j];
        for (long lane = 0; lane < 16; lane++) total += lanes[lane];
        totals[i] = total;
    }
}
