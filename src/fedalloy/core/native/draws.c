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

/* out[i] = the permutation of key i, of length many; of valid[i] numbers and then the rest if valid is given. */
int ordered(const uint64_t *keys, long count, long many, const int64_t *valid, int64_t *out) {
    int64_t numbers[SHORT];
    if (many > SHORT) return 1;
    for (long i = 0; i < count; i++) {
        long used = valid ? valid[i] : many;
        for (long j = 0; j < many; j++)
            numbers[j] = j < used ? (int64_t)mix(keys[i] + (j + 1) * GOLDEN) : INT64_MAX;
        order(numbers, many, out + i * many);
    }
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
