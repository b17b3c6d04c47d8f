/* What both ends of the ring share as Python objects: their mappings, their checks, and how they wait. For ring.c only. */
#ifndef HEADRACE_RING_END_H
#define HEADRACE_RING_END_H

#include "ring.h"

#include <poll.h>
#include <string.h>

#include "module.h"

#define TICK_NS 100000000 /* the longest single sleep: a death is known within it */
/* A tick that seems longer was spent stopped (a batch system may suspend a whole job for hours) or starved: such time says
 * nothing about the others, and counts as this much. */
#define LONGEST_TICK_NS 2000000000

typedef struct {
    PyObject_HEAD
    Py_buffer control_view;
    Py_buffer data_view;
    hr_control *control;
    uint8_t *data;
    uint64_t slot_bytes;
    uint64_t next; /* writer: version to publish next; reader: version to take next */
    uint64_t num_waits;
    uint64_t wait_ns;
    uint64_t released; /* reader only */
    uint32_t index;    /* reader only */
    int left;          /* reader only: it has said that it reads nothing any more */
    int num_peers;
    struct pollfd peers[HR_MAX_READERS + 1]; /* pidfds: readable once the process has ended; not ours to close */
    int busy;          /* a call waits, or makes Python objects of what it reads: then garbage may be collected */
    int closing;       /* this end was closed meanwhile, by another thread or a finalizer: the mappings go after the call */
} Ring;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int check_control(const Py_buffer *view) {
    const hr_control *control = view->buf;
    if ((size_t)view->len < sizeof(hr_control) || control->header.magic != HR_MAGIC) {
        PyErr_SetString(PyExc_ValueError, "these are not the control bytes of a headrace ring");
        return -1;
    }
    if (control->header.layout_version != HR_LAYOUT_VERSION) {
        PyErr_Format(PyExc_ValueError, "the ring has layout version %u, this headrace knows version %u",
                     control->header.layout_version, HR_LAYOUT_VERSION);
        return -1;
    }
    const hr_header *header = &control->header;
    if (header->num_slots < 2 || header->num_slots > HR_MAX_SLOTS || header->num_readers < 1 ||
        header->num_readers > HR_MAX_READERS || header->hold < 1 || header->hold >= header->num_slots ||
        (size_t)view->len < hr_control_bytes(header->num_readers)) {
        PyErr_SetString(PyExc_ValueError, "the control bytes contradict themselves");
        return -1;
    }
    return 0;
}

static PyObject *ring_new(PyTypeObject *type, PyObject *control_object, uint32_t index) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Ring *self = (Ring *)allocate(type, 0);
    if (self == NULL) return NULL;
    if (PyObject_GetBuffer(control_object, &self->control_view, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->control = self->control_view.buf;
    self->next = self->released = hr_first_version();
    self->index = index;
    if (check_control(&self->control_view) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (index >= self->control->header.num_readers) {
        PyErr_Format(PyExc_ValueError, "reader %u of %u does not exist", index, self->control->header.num_readers);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void let_go(Ring *self) {
    self->control = NULL;
    self->data = NULL;
    if (self->control_view.obj != NULL) PyBuffer_Release(&self->control_view);
    if (self->data_view.obj != NULL) PyBuffer_Release(&self->data_view);
}

static void ring_dealloc(Ring *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    let_go(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static int check_open(Ring *self) {
    if (self->control == NULL) {
        PyErr_SetString(PyExc_ValueError, "this end of the ring is closed");
        return -1;
    }
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread of this process waits in this end of the ring");
        return -1;
    }
    return 0;
}

static PyObject *ring_close(Ring *self, PyObject *unused) {
    (void)unused;
    self->closing = 1;
    if (!self->busy) let_go(self);
    Py_RETURN_NONE;
}

static PyObject *ring_use_data(Ring *self, PyObject *args) {
    PyObject *object;
    unsigned long long slot_bytes;
    if (!PyArg_ParseTuple(args, "OK", &object, &slot_bytes) || check_open(self) < 0) return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) return NULL;
    uint64_t num_slots = self->control->header.num_slots;
    if (slot_bytes < sizeof(hr_descriptor) || slot_bytes % HR_LINE != 0 || (uint64_t)view.len / num_slots < slot_bytes) {
        PyErr_Format(PyExc_ValueError, "%llu slots of %llu bytes do not fit into %zd bytes of data",
                     (unsigned long long)num_slots, slot_bytes, view.len);
        PyBuffer_Release(&view);
        return NULL;
    }
    if (self->data_view.obj != NULL) PyBuffer_Release(&self->data_view);
    self->data_view = view;
    self->data = view.buf;
    self->slot_bytes = slot_bytes;
    Py_RETURN_NONE;
}

static PyObject *ring_set_fate(Ring *self, PyObject *args) {
    unsigned int state;
    if (!PyArg_ParseTuple(args, "I", &state)) return NULL;
    if (self->control == NULL) return check_open(self), NULL;
    return PyBool_FromLong(hr_set_fate(self->control, state));
}

static PyObject *ring_watch(Ring *self, PyObject *pidfds) {
    if (!PyTuple_Check(pidfds) || PyTuple_Size(pidfds) > HR_MAX_READERS + 1) {
        PyErr_Format(PyExc_ValueError, "watch takes a tuple of at most %d pidfds", HR_MAX_READERS + 1);
        return NULL;
    }
    self->num_peers = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(pidfds); i++) {
        long fd = PyLong_AsLong(PyTuple_GetItem(pidfds, i));
        if (fd == -1 && PyErr_Occurred()) return NULL;
        self->peers[self->num_peers++] = (struct pollfd){.fd = (int)fd, .events = POLLIN};
    }
    Py_RETURN_NONE;
}

static bool wait_for_slot(Ring *self, int64_t timeout_ns) { return hr_wait_for_slot(self->control, self->next, timeout_ns); }

static bool wait_for_version(Ring *self, int64_t timeout_ns) {
    return hr_wait_for_version(self->control, self->next, timeout_ns);
}

static bool is_running(Ring *self) {
    return atomic_load_explicit(&self->control->fate.state, memory_order_acquire) == HR_RUNNING;
}

/* Sleep in ticks until `wait` says that it is ready (1), or something is to be thought about (0): a peer has ended, the
 * ring has a fate, this end left or closed, or timeout_s are over. -1: a signal's handler raised.
 * A tick costs some 40 us of CPU, to take the interpreter's lock after it another 15: so that is done for a signal that ended
 * a sleep, and after every second tick for one that came between two. */
static int wait_in_ticks(Ring *self, double timeout_s, bool (*wait)(Ring *, int64_t)) {
    int64_t left_ns = timeout_s < 9e9 ? (int64_t)(timeout_s * 1e9) : INT64_MAX, before = now_ns(); /* 9e9 s: for ever */
    bool ready = false, peer_ended = false;
    int status = 0;
    if (left_ns <= 0) return 0;
    self->busy = 1;
    while (!ready && !peer_ended && status == 0 && left_ns > 0 && !self->left && !self->closing && is_running(self)) {
        int64_t began_with_ns = left_ns;
        bool interrupted;
        int ticks = 0;
        Py_BEGIN_ALLOW_THREADS
        do {
            errno = 0;
            ready = wait(self, left_ns < TICK_NS ? left_ns : TICK_NS);
            interrupted = errno == EINTR;
            peer_ended = !ready && self->num_peers > 0 && poll(self->peers, (nfds_t)self->num_peers, 0) > 0;
            int64_t now = now_ns();
            left_ns -= now - before < LONGEST_TICK_NS ? now - before : LONGEST_TICK_NS;
            before = now;
        } while (!ready && !peer_ended && !interrupted && left_ns > 0 && is_running(self) && ++ticks < 2);
        Py_END_ALLOW_THREADS
        self->wait_ns += (uint64_t)(began_with_ns - left_ns);
        status = PyErr_CheckSignals();
    }
    self->busy = 0;
    self->num_waits++;
    if (self->closing) let_go(self);
    return status < 0 ? -1 : ready && !self->closing;
}

static hr_descriptor *descriptor_of(Ring *self, uint64_t version) {
    return (hr_descriptor *)(self->data + version % self->control->header.num_slots * self->slot_bytes);
}

#endif
