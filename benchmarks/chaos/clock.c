/* Moves the wall clock of a program by the seconds in the file CHAOS_CLOCK, and no other clock.
   Debian's faketime 0.9.10 moves the monotonic clock as well, by which Python's locks and sleeps wait: they then fail or
   never end. Compiled and preloaded by benchmarks.chaos.services. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
    static volatile long kept, looked;
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    if (now.tv_sec != looked) {
        const char *path = getenv("CHAOS_CLOCK");
        FILE *file = path ? fopen(path, "r") : NULL;
        long found = 0;
        if (file && fscanf(file, "%ld", &found) == 1) kept = found;
        if (file) fclose(file);
        looked = now.tv_sec;
    }
    return kept;
}

int clock_gettime(clockid_t clock, struct timespec *told) {
    int failed = syscall(SYS_clock_gettime, clock, told);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *restrict told, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    told->tv_sec = now.tv_sec;
    told->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
