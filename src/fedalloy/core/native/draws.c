/* Keyed draws, as fedalloy.core.keys defines them: the same bits as there, in one call per batch of keys. */

#define GOLDEN 0x9E3779B97F4A7C15u

static inline __attribute__((always_inline)) uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

/* out[i] = the key below key i with this label. */
void folded(const uint64_t *keys, long count, uint64_t label, uint64_t *out) {
    for (long i = 0; i < count; i++) out[i] = mix(keys[i] ^ label);
}

/* out[i][j] = the key below key i with the integer label j. */
void keyed(const uint64_t *keys, long count, const uint64_t *labels, long many, uint64_t *out) {
    for (long j = 0; j < many; j++) {
        uint64_t label = mix(labels[j] * GOLDEN + 1);
        for (long i = 0; i < count; i++) out[i * many + j] = mix(keys[i] ^ label);
    }
}

/* out[i][j] = draw j of key i. */
void drawn(const uint64_t *keys, long count, long many, uint64_t *out) {
    for (long i = 0; i < count; i++)
        for (long j = 0; j < many; j++) out[i * many + j] = mix(keys[i] + (j + 1) * GOLDEN);
}

/* The places of numbers in ascending order, ties in their own order: short lists are compared pair by pair, which needs
   no branches. */
FAST static void order(const int64_t *numbers, long count, int64_t *out) {
    for (long i = 0; i < count; i++) {
        int64_t rank = 0;
        for (long j = 0; j < i; j++) rank += numbers[j] <= numbers[i];
        for (long j = i + 1; j < count; j++) rank += numbers[j] < numbers[i];
        out[rank] = i;
    }
}

/* The same for many numbers that are spread evenly, as draws are: about one falls into each bucket of first bits, so
   that after putting them there few must still change places. `sorted` has space for them, `begin` for 1 << bits + 1. */
static void order_many(const uint64_t *numbers, long count, int bits, uint64_t *sorted, int64_t *begin, int64_t *out) {
    memset(begin, 0, ((1L << bits) + 1) * sizeof *begin);
    for (long i = 0; i < count; i++) begin[(numbers[i] >> (64 - bits)) + 1]++;
    for (long i = 0; i < 1L << bits; i++) begin[i + 1] += begin[i];
    for (long i = 0; i < count; i++) {
        long place = begin[numbers[i] >> (64 - bits)]++;
        sorted[place] = numbers[i], out[place] = i;
    }
    for (long i = 1; i < count; i++) {
        uint64_t number = sorted[i];
        int64_t which = out[i];
        long place = i;
        for (; place && sorted[place - 1] > number; place--)
            sorted[place] = sorted[place - 1], out[place] = out[place - 1];
        sorted[place] = number, out[place] = which;
    }
}

static void ordered_few(const uint64_t *keys, long count, long many, const int64_t *valid, int64_t *out) {
    int64_t numbers[FEW];
    for (long i = 0; i < count; i++) {
        long used = valid ? valid[i] : many;
        for (long j = 0; j < many; j++)
            numbers[j] = j < used ? (int64_t)mix(keys[i] + (j + 1) * GOLDEN) : INT64_MAX;
        order(numbers, many, out + i * many);
    }
}

/* out[i] = the permutation of key i, of length many; of valid[i] numbers and then the rest if valid is given. 1 if there
   is no memory for it. */
int ordered(const uint64_t *keys, long count, long many, const int64_t *valid, int64_t *out) {
    if (many <= FEW) return ordered_few(keys, count, many, valid, out), 0;
    int bits = 64 - __builtin_clzl(many - 1);
    uint64_t *numbers = malloc((2 * many + (1L << bits) + 1) * sizeof *numbers), *sorted = numbers + many;
    if (!numbers) return 1;
    for (long i = 0; i < count; i++) {
        long used = valid && valid[i] < many ? (valid[i] > 0 ? valid[i] : 0) : many;
        for (long j = 0; j < used; j++) /* draws are signed numbers, and these have the same order */
            numbers[j] = mix(keys[i] + (j + 1) * GOLDEN) ^ (uint64_t)1 << 63;
        order_many(numbers, used, bits, sorted, (int64_t *)(sorted + many), out + i * many);
        for (long j = used; j < many; j++) out[i * many + j] = j;
    }
    free(numbers);
    return 0;
}

/* Distinct members of 0 .. population - 1, sorted (Floyd's sampling); 1 if there are too many for this way. */
int chosen(uint64_t key, int64_t population, long size, int64_t *out) {
    int64_t picks[SHORT], places[SHORT];
    if (size > SHORT) return 1;
    for (long i = 0; i < size; i++) {
        int64_t top = population - size + i, pick = (mix(key + (i + 1) * GOLDEN) & INT64_MAX) % (uint64_t)(top + 1);
        int taken = 0;
        for (long j = 0; j < i; j++) taken |= picks[j] == pick;
        picks[i] = taken ? top : pick;
    }
    order(picks, size, places);
    for (long i = 0; i < size; i++) out[i] = picks[places[i]];
    return 0;
}
