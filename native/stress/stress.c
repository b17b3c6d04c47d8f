/* The protocol of ring.h alone, with threads over one buffer, for the sanitizers (they cannot see two processes):
 *
 *   gcc -std=c11 -D_GNU_SOURCE -g -O1 -fsanitize=thread    -I.. stress.c -o stress -lpthread && ./stress
 *   gcc -std=c11 -D_GNU_SOURCE -g -O1 -fsanitize=address,undefined  ...
 *
 *   ./stress [num_versions [num_readers [num_slots [hold [first_version]]]]]
 *
 * Each slot's payload is plain memory: if one of the ring's promises were broken, the thread sanitizer would see two
 * threads in one slot, and the check below a wrong word. Ends with "good" and 0, or says what it saw and 1.
 *
 * -DMISTAKE=1 publishes before it writes, 2 releases before it has read, 3 takes a slot one version too early, 4 relaxes
 * the order of `published`: each must fail.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef MISTAKE
#define MISTAKE 0
#endif
#if MISTAKE == 4
#include <stdatomic.h>
#undef atomic_store_explicit
#undef atomic_load_explicit
#define atomic_store_explicit(object, value, order) __atomic_store_n((object), (value), __ATOMIC_RELAXED)
#define atomic_load_explicit(object, order) __atomic_load_n((object), __ATOMIC_RELAXED)
#endif
#include "ring.h"

#define WORDS 64
#define TICK_NS 100000000
#define MAX_LATE_TICKS 50 /* five seconds without a wake-up or news: lost, or the machine is not running us */

static hr_control *control;
static uint64_t (*slots)[WORDS];
static uint64_t first, end;
static atomic_int failures;

static void fail(const char *what, uint64_t version, uint64_t saw) {
    if (atomic_fetch_add(&failures, 1) < 5)
        fprintf(stderr, "%s at version %llu: %llu\n", what, (unsigned long long)version, (unsigned long long)saw);
}

/* A little work of a length that nobody can predict, so that every side of every race is met. */
static void dawdle(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    for (volatile uint32_t i = 0; i < (*seed >> 24); i++) {}
    if ((*seed & 0xfff00) == 0) {
        struct timespec pause = {.tv_nsec = 20000};
        nanosleep(&pause, NULL);
    }
}

static bool slot_is_free(uint64_t next) {
#if MISTAKE == 3
    return next - first < control->header.num_slots || hr_min_released(control) + control->header.num_slots >= next;
#else
    return next - first < control->header.num_slots || hr_slot_is_free(control, next);
#endif
}

static void *write_all(void *unused) {
    uint32_t seed = 1;
    for (uint64_t next = first; next < end; next++) {
        for (int late = 0; !slot_is_free(next); late++) {
            if (late == MAX_LATE_TICKS) {
                fail("the writer was not woken", next, hr_min_released(control));
                return NULL;
            }
            hr_wait_for_slot(control, next, TICK_NS);
        }
#if MISTAKE == 1
        hr_publish(control, next);
#endif
        uint64_t *payload = slots[next % control->header.num_slots];
        for (int i = 0; i < WORDS; i++) payload[i] = next ^ (uint64_t)i;
        dawdle(&seed);
#if MISTAKE != 1
        hr_publish(control, next);
#endif
    }
    return unused;
}

static void check(uint64_t version) {
    const uint64_t *payload = slots[version % control->header.num_slots];
    for (int i = 0; i < WORDS; i++)
        if (payload[i] != (version ^ (uint64_t)i)) {
            fail("a torn or overwritten slot", version, payload[i]);
            return;
        }
}

static void *read_all(void *argument) {
    uint32_t index = (uint32_t)(uintptr_t)argument, seed = index + 2;
    uint64_t hold = control->header.hold;
    for (uint64_t next = first; next < end; next++) {
        for (int late = 0; !hr_is_published(control, next); late++) {
            if (late == MAX_LATE_TICKS) {
                fail("a reader was not woken", next, atomic_load(&control->writer.published));
                return NULL;
            }
            hr_wait_for_version(control, next, TICK_NS);
        }
#if MISTAKE == 2
        hr_release(control, index, next + 1);
#endif
        check(next);
        dawdle(&seed);
        /* What is held is still what it was. */
        if (next - first >= hold - 1) check(next - (hold - 1));
#if MISTAKE != 2
        if (next - first >= hold - 1) hr_release(control, index, next - (hold - 1) + 1);
#endif
    }
    hr_leave(control, index);
    return NULL;
}

static uint64_t argument(int argc, char **argv, int which, uint64_t otherwise) {
    return argc > which ? strtoull(argv[which], NULL, 10) : otherwise;
}

int main(int argc, char **argv) {
    uint64_t num_versions = argument(argc, argv, 1, 20000);
    uint32_t num_readers = (uint32_t)argument(argc, argv, 2, 3), num_slots = (uint32_t)argument(argc, argv, 3, 3);
    uint32_t hold = (uint32_t)argument(argc, argv, 4, 1);
    first = argument(argc, argv, 5, 0xffffffffull - num_versions / 2); /* over the end of the futex word */
    end = first + num_versions;
    control = aligned_alloc(HR_LINE, hr_control_bytes(num_readers));
    slots = calloc(num_slots, sizeof *slots);
    pthread_t *threads = calloc(num_readers + 1, sizeof *threads);
    if (control == NULL || slots == NULL || threads == NULL) return 2;
    memset(control, 0, hr_control_bytes(num_readers));
    hr_init(control, num_slots, num_readers, hold, 1, 1, 1);
    atomic_store(&control->writer.published, first);
    for (uint32_t i = 0; i < num_readers; i++) {
        if (!hr_claim(control, i, i, i) || hr_claim(control, i, i, i)) fail("a line was claimed twice, or never", i, i);
        atomic_store(&control->readers[i].released, first);
    }
    pthread_create(&threads[num_readers], NULL, write_all, NULL);
    for (uint32_t i = 0; i < num_readers; i++) pthread_create(&threads[i], NULL, read_all, (void *)(uintptr_t)i);
    for (uint32_t i = 0; i <= num_readers; i++) pthread_join(threads[i], NULL);
    if (hr_min_released(control) != HR_LEFT) fail("somebody did not leave", end, hr_min_released(control));
    if (!hr_set_fate(control, HR_READER_GONE + 1) || hr_set_fate(control, HR_WRITER_LEFT)) fail("fate was set twice", end, 0);
    int failed = atomic_load(&failures);
    printf("%s: %llu versions from %llu, %u readers, %u slots, hold %u\n", failed ? "FAILED" : "good",
           (unsigned long long)num_versions, (unsigned long long)first, num_readers, num_slots, hold);
    free(threads);
    free(slots);
    free(control);
    return failed ? 1 : 0;
}
