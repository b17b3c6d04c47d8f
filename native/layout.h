/* The shared layout, version 1. The one file that knows where anything lies; shm/layout.py reads its numbers from here.
 *
 * control memfd: one line of 128 bytes each (Kunpeng and Apple cache lines; x86 prefetches lines in pairs)
 *
 *   0        128      256       384          512
 *   | header | fate   | writer  | writer     | reader 0 | reader 1 | ... | reader N-1 |
 *   |        |        | line    | event line |
 *
 * data memfd: K slots of slot_bytes each
 *
 *   | descriptor | field 0 | ... | field F-1 | field data, each aligned to 128 | blob | (free) |
 *     256 B        128 B each
 *
 * All integers little-endian. Changing anything below means a new HR_LAYOUT_VERSION.
 */
#ifndef HEADRACE_LAYOUT_H
#define HEADRACE_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the layout is little-endian"
#endif
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "the ring needs lock-free 64 and 32 bit atomics");
_Static_assert(sizeof(_Atomic uint64_t) == 8 && sizeof(_Atomic uint32_t) == 4, "atomics must have no hidden lock");

#define HR_MAGIC 0x4543415244414548ull /* "HEADRACE" */
#define HR_LAYOUT_VERSION 1u
#define HR_LINE 128
#define HR_MAX_READERS 128
#define HR_MAX_SLOTS 1024
#define HR_NUM_COUNTS 8
#define HR_MAX_RAGGED 16
#define HR_NAME_BYTES 40
#define HR_DTYPE_BYTES 16
#define HR_MAX_DIMENSIONS 6
#define HR_LEFT UINT64_MAX /* `released` of a reader that closed, or took the last version: it holds nobody up any more */

/* What became of the ring: HR_RUNNING, HR_WRITER_LEFT, or HR_READER_GONE + index of the reader. Set once, never reset;
 * one word, so that nobody reads the state of one death with the culprit of another. */
enum { HR_RUNNING = 0, HR_WRITER_LEFT = 1, HR_READER_GONE = 2 };

/* What a version holds. */
enum { HR_DATA = 0, HR_END = 1, HR_ERROR = 2, HR_RESIZE = 3 };

typedef struct { /* written by the creator before any descriptor is handed over; constant from then on */
    uint64_t magic;
    uint32_t layout_version;
    uint32_t num_slots;
    uint32_t num_readers;
    uint32_t hold;
    uint64_t generation; /* random: a late process of an earlier run cannot mistake this ring for its own */
    int64_t writer_pid;
    uint64_t writer_start_time;
    uint8_t unused[HR_LINE - 48];
} hr_header;

typedef struct {
    _Atomic uint32_t state;
    uint8_t unused[HR_LINE - 4];
} hr_fate;

typedef struct { /* versions published so far; version v may be read once published > v. Its low half is the readers' futex word */
    _Atomic uint64_t published;
    uint8_t unused[HR_LINE - 8];
} hr_writer_line;

typedef struct { /* the writer sleeps on `event` until min(released) >= wanted; wanted is HR_LEFT while it does not wait */
    _Atomic uint32_t event;
    uint32_t unused_word;
    _Atomic uint64_t wanted;
    uint8_t unused[HR_LINE - 16];
} hr_event_line;

typedef struct { /* released: versions below it are no longer read by this reader */
    _Atomic uint64_t released;
    _Atomic uint32_t claimed; /* 0 until a process takes this line, 1 from then on: no line has two readers, ever */
    uint32_t unused_word;
    int64_t pid; /* of the claimant, as it sees itself: for people who debug, since it means nothing in another namespace */
    uint64_t start_time;
    uint8_t unused[HR_LINE - 32];
} hr_reader_line;

typedef struct {
    hr_header header;
    hr_fate fate;
    hr_writer_line writer;
    hr_event_line event;
    hr_reader_line readers[]; /* num_readers lines */
} hr_control;

typedef struct { /* what a slot holds; written before `published` passes its version */
    uint64_t version;
    uint32_t kind;
    uint32_t layout_id;  /* changes whenever the field table of this slot changes: readers rebuild their views then */
    uint64_t used_bytes; /* descriptor, table and fields: what a copy of the whole batch must move */
    uint64_t blob_offset;
    uint64_t blob_bytes; /* extra metadata, encoded by the feed */
    uint32_t num_fields;
    uint32_t num_ragged;
    int64_t counts[HR_NUM_COUNTS];  /* host integers of the batch; the feed names them */
    int64_t lengths[HR_MAX_RAGGED]; /* first dimension of each ragged field in this version */
    uint8_t unused[256 - 48 - 8 * HR_NUM_COUNTS - 8 * HR_MAX_RAGGED];
} hr_descriptor;

typedef struct {
    char name[HR_NAME_BYTES];   /* UTF-8, zero padded */
    char dtype[HR_DTYPE_BYTES]; /* NumPy's type string, such as "<i8" */
    uint64_t offset;            /* from the start of the slot */
    int64_t shape[HR_MAX_DIMENSIONS];
    uint32_t num_dimensions;
    int32_t ragged_index; /* which entry of `lengths` replaces shape[0]; -1: none */
    uint8_t unused[8];
} hr_field;

_Static_assert(sizeof(hr_header) == HR_LINE && sizeof(hr_fate) == HR_LINE && sizeof(hr_writer_line) == HR_LINE, "one line each");
_Static_assert(sizeof(hr_event_line) == HR_LINE && sizeof(hr_reader_line) == HR_LINE, "one line each");
_Static_assert(offsetof(hr_control, readers) == 4 * HR_LINE, "control layout, version 1");
_Static_assert(offsetof(hr_header, generation) == 24 && offsetof(hr_event_line, wanted) == 8, "control layout, version 1");
_Static_assert(offsetof(hr_reader_line, claimed) == 8 && offsetof(hr_reader_line, pid) == 16, "control layout, version 1");
_Static_assert(sizeof(hr_descriptor) == 256 && sizeof(hr_field) == 128, "slot layout, version 1");
_Static_assert(offsetof(hr_descriptor, counts) == 48 && offsetof(hr_descriptor, lengths) == 112, "slot layout, version 1");
_Static_assert(offsetof(hr_field, offset) == 56 && offsetof(hr_field, shape) == 64, "slot layout, version 1");

static inline size_t hr_control_bytes(uint32_t num_readers) {
    return sizeof(hr_control) + (size_t)num_readers * sizeof(hr_reader_line);
}

#endif
