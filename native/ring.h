/* The protocol: one writer, N readers, K slots. Plain C11 without Python, so that it also compiles alone under the
 * sanitizers. Every function is safe to call from one writer process and N reader processes at once.
 *
 * Note [Memory order]
 *   published   store release / load acquire: a reader that sees version v sees everything written into its slot before.
 *   released    store seq_cst / load seq_cst, and the same for wanted. Two pairs of "store mine, then look at yours" meet
 *   wanted      there, and each needs one total order:
 *                 writer: wanted := w;     read every released   -- else it sleeps on a slot that has just become free
 *                 reader: released := r;   read wanted           -- else nobody wakes it
 *                 reader: released := r;   read every released   -- else the two last readers each miss the other's store
 *                                                                   and each leaves the wake-up to the other
 *               seq_cst on released is also the release that ends a reader's reads before the writer's next store.
 *   No stand-alone fences: thread sanitizers do not model them.
 *
 * Note [Wake-ups decide the latency]
 *   The writer is woken only by the reader whose release makes `watermark` slots free for everybody, not by each reader
 *   of each version. Measured on two cores, 3.7 MB batches, 5 ms steps: 570 us per batch with the naive wake, 106 us with
 *   this one, since a writer woken early preempts the rank on its own core and copies there.
 *
 * Note [Futex words]
 *   Readers sleep on the low half of `published`. The kernel compares it under its own lock and the writer stores before
 *   it wakes, so no wake-up is lost; the word wraps after 2^32 versions, but no reader can be that far behind. Shared, not
 *   private, futexes: the word is in several address spaces.
 *   A change of fate does not change that word: its wake-up can fall between a reader's look and its sleep. Nothing hangs
 *   on it: a reader looks at the fate and at its peers' lives after every bounded sleep, as it must for deaths anyway.
 *
 * native/model/ring.pml is this file for SPIN, native/stress/ runs it under the sanitizers. Change them together.
 */
#ifndef HEADRACE_RING_H
#define HEADRACE_RING_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "layout.h"

/* Test builds die at the n-th point of the protocol (HEADRACE_CRASHPOINT=n), so that the tests can kill at each of them,
 * and begin at any version (HEADRACE_FIRST_VERSION=v), so that they come to the end of the futex word. */
#ifdef HEADRACE_CRASHPOINTS
#include <signal.h>
#include <stdlib.h>
static inline void hr_point(int point) {
    const char *chosen = getenv("HEADRACE_CRASHPOINT");
    if (chosen != NULL && atoi(chosen) == point) raise(SIGKILL);
}
static inline uint64_t hr_first_version(void) {
    const char *chosen = getenv("HEADRACE_FIRST_VERSION");
    return chosen == NULL ? 0 : strtoull(chosen, NULL, 10);
}
#else
#define hr_point(point) ((void)0)
static inline uint64_t hr_first_version(void) { return 0; }
#endif

static inline uint32_t *hr_low_half(_Atomic uint64_t *word) { return (uint32_t *)word; }

/* Sleep until woken, until the word differs from `seen`, or for timeout_ns. Returns early on signals. */
static inline void hr_futex_wait(uint32_t *word, uint32_t seen, int64_t timeout_ns) {
    struct timespec timeout = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, NULL, 0);
}

static inline void hr_futex_wake(uint32_t *word, int count) { syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0); }

static inline void hr_init(hr_control *control, uint32_t num_slots, uint32_t num_readers, uint32_t hold, uint64_t generation,
                           int64_t writer_pid, uint64_t writer_start_time) {
    /* The memory is fresh from memfd, hence zero; only what is not zero is set. */
    control->header.layout_version = HR_LAYOUT_VERSION;
    control->header.num_slots = num_slots;
    control->header.num_readers = num_readers;
    control->header.hold = hold;
    control->header.generation = generation;
    control->header.writer_pid = writer_pid;
    control->header.writer_start_time = writer_start_time;
    atomic_store(&control->event.wanted, HR_LEFT);
    atomic_store(&control->writer.published, hr_first_version());
    for (uint32_t i = 0; i < num_readers; i++) atomic_store(&control->readers[i].released, hr_first_version());
    control->header.magic = HR_MAGIC;
}

/* ---- writer ------------------------------------------------------------------------------------------------------ */

/* The version that the slowest reader still needs; HR_LEFT when every reader has left. */
static inline uint64_t hr_min_released(hr_control *control) {
    uint64_t least = HR_LEFT;
    for (uint32_t i = 0; i < control->header.num_readers; i++) {
        uint64_t released = atomic_load(&control->readers[i].released);
        if (released < least) least = released;
    }
    return least;
}

/* How many slots must be free before the writer is woken: more than one so that it works in bursts, never more than can
 * become free while every reader keeps its `hold` last batches. */
static inline uint32_t hr_watermark(const hr_header *header) {
    uint32_t half = header->num_slots / 2, reachable = header->num_slots - header->hold;
    uint32_t least = half < reachable ? half : reachable;
    return least > 1 ? least : 1;
}

/* May version `next` be written? Its slot was last used by version next - K, which every reader must have released. */
static inline bool hr_slot_is_free(hr_control *control, uint64_t next) {
    uint64_t num_slots = control->header.num_slots;
    return next < num_slots || hr_min_released(control) >= next - num_slots + 1;
}

/* One bounded sleep until every reader has released `wanted` versions, a signal comes, or the time is over. */
static inline void hr_wait_for_release(hr_control *control, uint64_t wanted, int64_t timeout_ns) {
    uint32_t seen = atomic_load(&control->event.event);
    atomic_store(&control->event.wanted, wanted);
    hr_point(4);
    /* Look again after announcing: a reader that released before it saw `wanted` does not wake us, and whoever changed the
     * fate before we read `event` has woken nobody. */
    if (hr_min_released(control) < wanted && atomic_load(&control->fate.state) == HR_RUNNING)
        hr_futex_wait((uint32_t *)&control->event.event, seen, timeout_ns);
    hr_point(5);
    atomic_store(&control->event.wanted, HR_LEFT);
}

/* One bounded sleep for a free slot for version `next`, which is not free yet (so next >= num_slots). True: the slot is
 * free. False: timeout, signal or early wake. */
static inline bool hr_wait_for_slot(hr_control *control, uint64_t next, int64_t timeout_ns) {
    hr_wait_for_release(control, next - control->header.num_slots + hr_watermark(&control->header), timeout_ns);
    return hr_slot_is_free(control, next);
}

static inline void hr_publish(hr_control *control, uint64_t next) {
    hr_point(2);
    atomic_store_explicit(&control->writer.published, next + 1, memory_order_release);
    hr_point(3);
    /* Always wake: 0.5 us when nobody sleeps, once per batch, and no flag that could be missed. */
    hr_futex_wake(hr_low_half(&control->writer.published), INT_MAX);
}

/* ---- reader ------------------------------------------------------------------------------------------------------ */

/* Take reader line `reader` for good. False: somebody has it. */
static inline bool hr_claim(hr_control *control, uint32_t reader, int64_t pid, uint64_t start_time) {
    uint32_t free_line = 0;
    if (!atomic_compare_exchange_strong(&control->readers[reader].claimed, &free_line, 1)) return false;
    control->readers[reader].pid = pid;
    control->readers[reader].start_time = start_time;
    return true;
}

static inline bool hr_is_published(hr_control *control, uint64_t version) {
    return atomic_load_explicit(&control->writer.published, memory_order_acquire) > version;
}

/* One bounded sleep for version `version`. True: it may be read. False: timeout, signal or early wake. */
static inline bool hr_wait_for_version(hr_control *control, uint64_t version, int64_t timeout_ns) {
    uint64_t published = atomic_load_explicit(&control->writer.published, memory_order_acquire);
    if (published <= version) hr_futex_wait(hr_low_half(&control->writer.published), (uint32_t)published, timeout_ns);
    return hr_is_published(control, version);
}

static inline void hr_wake_writer(hr_control *control) {
    hr_point(7);
    atomic_fetch_add(&control->event.event, 1);
    hr_point(8);
    hr_futex_wake((uint32_t *)&control->event.event, 1);
}

/* This reader no longer reads versions below `count`. Wakes the writer if that was what it waited for. */
static inline void hr_release(hr_control *control, uint32_t reader, uint64_t count) {
    atomic_store(&control->readers[reader].released, count);
    hr_point(6);
    uint64_t wanted = atomic_load(&control->event.wanted);
    if (count >= wanted && hr_min_released(control) >= wanted) hr_wake_writer(control);
}

/* This reader reads nothing any more: it closed, or took the last version. */
static inline void hr_leave(hr_control *control, uint32_t reader) {
    atomic_store(&control->readers[reader].released, HR_LEFT);
    hr_point(10);
    hr_wake_writer(control);
}

/* ---- the end ----------------------------------------------------------------------------------------------------- */

/* Tell everybody what became of the ring. The first to say so wins; returns whether this call did. */
static inline bool hr_set_fate(hr_control *control, uint32_t state) {
    uint32_t running = HR_RUNNING;
    bool first = atomic_compare_exchange_strong(&control->fate.state, &running, state);
    hr_point(11);
    hr_futex_wake(hr_low_half(&control->writer.published), INT_MAX);
    hr_wake_writer(control);
    return first;
}

#endif
