/* RingWriter and RingReader: the protocol of ring.h for Python.
 *
 * A call that waits sleeps in ticks, looks at signals and at the peers' pidfds after each, and returns None when it should
 * be thought about: the time is over, a peer ended, the ring has a fate. Deadlines and what to say about it are Python's
 * (shm/ring_writer.py, ring_reader.py), twice a second; a tick in Python cost 200 us of CPU, here it is a tenth.
 * The ready case is one call that never drops the GIL (a busy Python thread turned a 47 us wait into 5.2 ms when it did). */
#include "ring.h"

#include <poll.h>
#include <string.h>

#include "module.h"

#define TICK_NS 100000000 /* the longest single sleep: a death is known within it */

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
    int busy;          /* a thread of this process is inside a wait */
} Ring;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* ---- what both ends share ---------------------------------------------------------------------------------------- */

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
    PyTypeObject *type = Py_TYPE(self);
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
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread of this process waits in this end of the ring");
        return NULL;
    }
    let_go(self);
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

/* Sleep in ticks until `wait` says that it is ready (1), or something is to be thought about (0), or a signal's handler
 * raised (-1). */
static int wait_in_ticks(Ring *self, double timeout_s, bool (*wait)(Ring *, int64_t)) {
    int64_t start = now_ns(), left_ns = (int64_t)(timeout_s * 1e9);
    bool ready = false, peer_ended = false;
    int status = 0;
    self->busy = 1;
    while (!ready && !peer_ended && status == 0 && left_ns > 0 && !self->left &&
           atomic_load_explicit(&self->control->fate.state, memory_order_acquire) == HR_RUNNING) {
        Py_BEGIN_ALLOW_THREADS
        ready = wait(self, left_ns < TICK_NS ? left_ns : TICK_NS);
        peer_ended = !ready && self->num_peers > 0 && poll(self->peers, (nfds_t)self->num_peers, 0) > 0;
        Py_END_ALLOW_THREADS
        status = PyErr_CheckSignals();
        left_ns = start + (int64_t)(timeout_s * 1e9) - now_ns();
    }
    self->busy = 0;
    self->num_waits++;
    self->wait_ns += (uint64_t)(now_ns() - start);
    return status < 0 ? -1 : ready;
}

static hr_descriptor *descriptor_of(Ring *self, uint64_t version) {
    return (hr_descriptor *)(self->data + version % self->control->header.num_slots * self->slot_bytes);
}

/* ---- writer ------------------------------------------------------------------------------------------------------ */

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"control", "num_slots", "num_readers", "hold", "generation", "writer_pid", "writer_start_time", NULL};
    PyObject *control;
    unsigned int num_slots, num_readers, hold;
    unsigned long long generation, start_time;
    long long pid;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OIIIKLK", names, &control, &num_slots, &num_readers, &hold, &generation, &pid,
                                     &start_time))
        return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(control, &view, PyBUF_WRITABLE) < 0) return NULL;
    int fits = num_readers <= HR_MAX_READERS && (size_t)view.len >= hr_control_bytes(num_readers);
    if (fits) hr_init(view.buf, num_slots, num_readers, hold, generation, pid, start_time);
    PyBuffer_Release(&view);
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "%u readers do not fit: at most %d, and into the control bytes", num_readers, HR_MAX_READERS);
        return NULL;
    }
    return ring_new(type, control, 0);
}

static PyObject *writer_begin(Ring *self, PyObject *argument) {
    double timeout_s = PyFloat_AsDouble(argument);
    if ((timeout_s == -1.0 && PyErr_Occurred()) || check_open(self) < 0) return NULL;
    hr_control *control = self->control;
    int ready = hr_slot_is_free(control, self->next);
    if (!ready) ready = wait_in_ticks(self, timeout_s, wait_for_slot);
    if (ready < 0) return NULL;
    if (!ready || hr_min_released(control) == HR_LEFT || atomic_load(&control->fate.state) != HR_RUNNING) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(self->next % control->header.num_slots);
}

static int copy_integers(PyObject *tuple, int64_t *target, Py_ssize_t limit, const char *what) {
    Py_ssize_t length = PyTuple_Size(tuple);
    if (length > limit) {
        PyErr_Format(PyExc_ValueError, "at most %zd %s fit into a descriptor, got %zd", limit, what, length);
        return -1;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        int64_t value = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (value == -1 && PyErr_Occurred()) return -1;
        target[i] = value;
    }
    return (int)length;
}

static PyObject *writer_publish(Ring *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"kind", "layout_id", "num_fields", "used_bytes", "blob_offset", "blob_bytes", "counts", "lengths", NULL};
    unsigned int kind, layout_id, num_fields;
    unsigned long long used_bytes, blob_offset, blob_bytes;
    PyObject *counts, *lengths;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IIIKKKO!O!", names, &kind, &layout_id, &num_fields, &used_bytes, &blob_offset,
                                     &blob_bytes, &PyTuple_Type, &counts, &PyTuple_Type, &lengths) ||
        check_open(self) < 0)
        return NULL;
    if (self->data == NULL || !hr_slot_is_free(self->control, self->next)) {
        PyErr_SetString(PyExc_RuntimeError, "publish without a slot: call begin first");
        return NULL;
    }
    hr_descriptor descriptor = {
        .version = self->next,
        .kind = kind,
        .layout_id = layout_id,
        .used_bytes = used_bytes,
        .blob_offset = blob_offset,
        .blob_bytes = blob_bytes,
        .num_fields = num_fields,
    };
    if (copy_integers(counts, descriptor.counts, HR_NUM_COUNTS, "counts") < 0) return NULL;
    int num_ragged = copy_integers(lengths, descriptor.lengths, HR_MAX_RAGGED, "ragged lengths");
    if (num_ragged < 0) return NULL;
    descriptor.num_ragged = (uint32_t)num_ragged;
    hr_point(1);
    memcpy(descriptor_of(self, self->next), &descriptor, sizeof descriptor);
    hr_publish(self->control, self->next);
    return PyLong_FromUnsignedLongLong(self->next++);
}

/* ---- reader ------------------------------------------------------------------------------------------------------ */

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"control", "index", "pid", "start_time", NULL};
    PyObject *control;
    unsigned int index;
    long long pid;
    unsigned long long start_time;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OILK", names, &control, &index, &pid, &start_time)) return NULL;
    Ring *self = (Ring *)ring_new(type, control, index);
    if (self != NULL && !hr_claim(self->control, index, pid, start_time)) {
        PyErr_Format(PyExc_ValueError, "reader %u is taken by process %lld: a line of the ring has one reader", index,
                     (long long)self->control->readers[index].pid);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void release_to(Ring *self, uint64_t count) {
    if (count <= self->released || self->left) return;
    self->released = count;
    hr_release(self->control, self->index, count);
}

static PyObject *tuple_of(const int64_t *values, uint32_t length) {
    PyObject *tuple = PyTuple_New(length);
    for (uint32_t i = 0; tuple != NULL && i < length; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL || PyTuple_SetItem(tuple, i, value) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

/* (version, slot, kind, layout_id, counts, lengths), every number a Python int: no NumPy or torch call is needed to learn
 * max_seqlen or the number of documents, which costs 20-80 us after an idle gap. */
static PyObject *delivery(Ring *self, const hr_descriptor *descriptor) {
    PyObject *counts = tuple_of(descriptor->counts, HR_NUM_COUNTS);
    PyObject *lengths = tuple_of(descriptor->lengths, descriptor->num_ragged);
    PyObject *version = PyLong_FromUnsignedLongLong(descriptor->version);
    PyObject *slot = PyLong_FromUnsignedLongLong(descriptor->version % self->control->header.num_slots);
    PyObject *kind = PyLong_FromUnsignedLong(descriptor->kind);
    PyObject *layout_id = PyLong_FromUnsignedLong(descriptor->layout_id);
    PyObject *result = NULL;
    if (counts != NULL && lengths != NULL && version != NULL && slot != NULL && kind != NULL && layout_id != NULL)
        result = PyTuple_Pack(6, version, slot, kind, layout_id, counts, lengths);
    Py_XDECREF(counts);
    Py_XDECREF(lengths);
    Py_XDECREF(version);
    Py_XDECREF(slot);
    Py_XDECREF(kind);
    Py_XDECREF(layout_id);
    return result;
}

static PyObject *reader_next(Ring *self, PyObject *argument) {
    double timeout_s = PyFloat_AsDouble(argument);
    if ((timeout_s == -1.0 && PyErr_Occurred()) || check_open(self) < 0) return NULL;
    if (self->data == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "no data mapping: call use_data first");
        return NULL;
    }
    uint64_t kept = self->control->header.hold - 1;
    if (self->next > kept) release_to(self, self->next - kept);
    int ready = hr_is_published(self->control, self->next);
    if (!ready) ready = wait_in_ticks(self, timeout_s, wait_for_version);
    if (ready < 0) return NULL;
    /* A dead writer's batches are drained first, so that all readers stop at one version; a dead reader stops all at once. */
    if (!ready || atomic_load_explicit(&self->control->fate.state, memory_order_acquire) >= HR_READER_GONE) Py_RETURN_NONE;
    const hr_descriptor *descriptor = descriptor_of(self, self->next);
    if (descriptor->version != self->next || descriptor->num_ragged > HR_MAX_RAGGED) {
        PyErr_Format(PyExc_RuntimeError, "slot holds version %llu where %llu was published: shared memory was overwritten",
                     (unsigned long long)descriptor->version, (unsigned long long)self->next);
        return NULL;
    }
    PyObject *result = delivery(self, descriptor);
    if (result == NULL) return NULL;
    hr_point(9);
    if (descriptor->kind == HR_END || descriptor->kind == HR_ERROR) {
        /* Nothing comes after it, so this call will only ever give it again, and nobody needs this reader: when its process
         * exits now, no slower one calls it dead. */
        self->left = 1;
        hr_leave(self->control, self->index);
    } else {
        self->next++;
    }
    return result;
}

static PyObject *reader_release(Ring *self, PyObject *argument) {
    unsigned long long count = PyLong_AsUnsignedLongLong(argument);
    if ((count == (unsigned long long)-1 && PyErr_Occurred()) || check_open(self) < 0) return NULL;
    if (count > self->next) {
        PyErr_Format(PyExc_ValueError, "cannot release %llu versions: only %llu were taken", count, (unsigned long long)self->next);
        return NULL;
    }
    release_to(self, count);
    Py_RETURN_NONE;
}

static PyObject *reader_leave(Ring *self, PyObject *unused) {
    (void)unused;
    if (self->control == NULL) return check_open(self), NULL; /* allowed while another thread waits */
    self->left = 1;
    hr_leave(self->control, self->index);
    Py_RETURN_NONE;
}

/* ---- types ------------------------------------------------------------------------------------------------------- */

#define GETTER(name, needs_ring, expression)                                   \
    static PyObject *get_##name(Ring *self, void *unused) {                    \
        (void)unused;                                                          \
        if (needs_ring && self->control == NULL) return check_open(self), NULL; \
        return PyLong_FromUnsignedLongLong(expression);                        \
    }

GETTER(published, 1, atomic_load(&self->control->writer.published))
GETTER(state, 1, atomic_load(&self->control->fate.state))
GETTER(generation, 1, self->control->header.generation)
GETTER(position, 0, self->next)
GETTER(num_waits, 0, self->num_waits)
GETTER(wait_ns, 0, self->wait_ns)

static PyObject *get_released(Ring *self, void *unused) {
    (void)unused;
    if (self->control == NULL) return check_open(self), NULL;
    PyObject *result = PyTuple_New(self->control->header.num_readers);
    for (uint32_t i = 0; result != NULL && i < self->control->header.num_readers; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(atomic_load(&self->control->readers[i].released));
        if (value == NULL || PyTuple_SetItem(result, i, value) < 0) Py_CLEAR(result);
    }
    return result;
}

static PyGetSetDef properties[] = {
    {"published", (getter)get_published, NULL, "Versions published so far.", NULL},
    {"released", (getter)get_released, NULL, "Per reader: versions handed back; LEFT once it left.", NULL},
    {"state", (getter)get_state, NULL, "RUNNING, WRITER_LEFT or READER_GONE + index.", NULL},
    {"generation", (getter)get_generation, NULL, "Random number of this ring.", NULL},
    {"position", (getter)get_position, NULL, "The version this end publishes or takes next.", NULL},
    {"num_waits", (getter)get_num_waits, NULL, "Waits of this end.", NULL},
    {"wait_ns", (getter)get_wait_ns, NULL, "Time of this end spent in them.", NULL},
    {0},
};

static PyMethodDef writer_methods[] = {
    {"use_data", (PyCFunction)ring_use_data, METH_VARARGS, "use_data(mapping, slot_bytes): write into these slots from now on."},
    {"watch", (PyCFunction)ring_watch, METH_O, "watch(pidfds): waits end early, with None, when one of these processes has ended."},
    {"begin", (PyCFunction)writer_begin, METH_O, "begin(timeout_s) -> slot of the next version, or None: not free yet, or nobody reads."},
    {"publish", (PyCFunction)(void (*)(void))writer_publish, METH_VARARGS | METH_KEYWORDS, "Publish the slot of begin; returns its version."},
    {"set_fate", (PyCFunction)ring_set_fate, METH_VARARGS, "set_fate(state): tell everybody; the first to say so wins."},
    {"close", (PyCFunction)ring_close, METH_NOARGS, "Let go of the mappings."},
    {0},
};

static PyMethodDef reader_methods[] = {
    {"use_data", (PyCFunction)ring_use_data, METH_VARARGS, "use_data(mapping, slot_bytes): read these slots from now on."},
    {"watch", (PyCFunction)ring_watch, METH_O, "watch(pidfds): waits end early, with None, when one of these processes has ended."},
    {"next", (PyCFunction)reader_next, METH_O,
     "next(timeout_s) -> (version, slot, kind, layout_id, counts, lengths) or None: hand back all but the last hold - 1 "
     "versions, then take the next one. END and ERROR leave the ring, and come again with every further call."},
    {"release", (PyCFunction)reader_release, METH_O, "release(count): versions below count are no longer read."},
    {"leave", (PyCFunction)reader_leave, METH_NOARGS, "Hold the writer up no more."},
    {"set_fate", (PyCFunction)ring_set_fate, METH_VARARGS, "set_fate(state): tell everybody; the first to say so wins."},
    {"close", (PyCFunction)ring_close, METH_NOARGS, "Let go of the mappings."},
    {0},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "The one writing end of a ring; initialises the control bytes."},
    {Py_tp_new, writer_new},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "One reading end of a ring."},
    {Py_tp_new, reader_new},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, reader_methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec writer_spec = {
    .name = "headrace._native.RingWriter",
    .basicsize = sizeof(Ring),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = writer_slots,
};

static PyType_Spec reader_spec = {
    .name = "headrace._native.RingReader",
    .basicsize = sizeof(Ring),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = reader_slots,
};

static int add_type(PyObject *module, PyType_Spec *spec, const char *name) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL) return -1;
    int status = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return status;
}

int headrace_add_ring(PyObject *module) {
    if (add_type(module, &writer_spec, "RingWriter") < 0 || add_type(module, &reader_spec, "RingReader") < 0) return -1;
    static const struct { const char *name; long value; } constants[] = {
        {"LAYOUT_VERSION", HR_LAYOUT_VERSION}, {"LINE_BYTES", HR_LINE}, {"MAX_READERS", HR_MAX_READERS}, {"MAX_SLOTS", HR_MAX_SLOTS},
        {"NUM_COUNTS", HR_NUM_COUNTS}, {"MAX_RAGGED", HR_MAX_RAGGED}, {"CONTROL_BYTES", sizeof(hr_control)},
        {"DESCRIPTOR_BYTES", sizeof(hr_descriptor)}, {"FIELD_BYTES", sizeof(hr_field)},
        {"RUNNING", HR_RUNNING}, {"WRITER_LEFT", HR_WRITER_LEFT}, {"READER_GONE", HR_READER_GONE},
        {"DATA", HR_DATA}, {"END", HR_END}, {"ERROR", HR_ERROR}, {"RESIZE", HR_RESIZE},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) return -1;
    PyObject *left = PyLong_FromUnsignedLongLong(HR_LEFT);
    if (left == NULL) return -1;
    int status = PyModule_AddObjectRef(module, "LEFT", left);
    Py_DECREF(left);
    return status;
}
