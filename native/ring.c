/* RingWriter and RingReader: the protocol of ring.h for Python.
 *
 * A call that waits sleeps in ticks, looks at signals and at the peers' pidfds after each, and returns None when it should
 * be thought about: the time is over, a peer ended, the ring has a fate. Deadlines and what to say about it are Python's
 * (shm/ring_writer.py, ring_reader.py), as seldom as it can: a tick in Python cost 200 us of CPU, here it is a quarter.
 * The ready case is one call that never drops the GIL (a busy Python thread turned a 47 us wait into 5.2 ms when it did). */
#include "ring_end.h"

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

/* The descriptor of the next version, once all but the last hold - 1 versions are handed back and it may be read; it is not
 * taken yet. NULL: not there within timeout_s, or something is to be thought about; or an exception is set. */
static const hr_descriptor *next_descriptor(Ring *self, double timeout_s) {
    uint64_t kept = self->control->header.hold - 1;
    if (self->next > kept) release_to(self, self->next - kept);
    int ready = hr_is_published(self->control, self->next);
    if (!ready) ready = wait_in_ticks(self, timeout_s, wait_for_version);
    /* A dead writer's batches are drained first, so that all readers stop at one version; a dead reader stops all at once. */
    if (ready <= 0 || atomic_load_explicit(&self->control->fate.state, memory_order_acquire) >= HR_READER_GONE) return NULL;
    return descriptor_of(self, self->next);
}

bool headrace_take(PyObject *reader, bool is_wanted) {
    Ring *self = (Ring *)reader;
    self->busy = 0;
    if (self->closing) let_go(self);
    if (!is_wanted || self->closing || self->left) return false;
    hr_point(9);
    self->next++;
    return true;
}

static PyObject *left_meanwhile(void) {
    PyErr_SetString(PyExc_ValueError, "this end of the ring has left");
    return NULL;
}

static PyObject *reader_next(Ring *self, PyObject *argument) {
    double timeout_s = PyFloat_AsDouble(argument);
    if ((timeout_s == -1.0 && PyErr_Occurred()) || check_open(self) < 0) return NULL;
    if (self->data == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "no data mapping: call use_data first");
        return NULL;
    }
    const hr_descriptor *descriptor = next_descriptor(self, timeout_s);
    if (descriptor == NULL) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    if (descriptor->version != self->next || descriptor->num_ragged > HR_MAX_RAGGED) {
        PyErr_Format(PyExc_RuntimeError, "slot holds version %llu where %llu was published: shared memory was overwritten",
                     (unsigned long long)descriptor->version, (unsigned long long)self->next);
        return NULL;
    }
    uint32_t kind = descriptor->kind;
    self->busy = 1;
    PyObject *result = delivery(self, descriptor);
    /* Nothing comes after these, so this call will only ever give them again. */
    bool is_last = kind == HR_END || kind == HR_ERROR;
    if (!headrace_take((PyObject *)self, result != NULL && !is_last) && !is_last) Py_CLEAR(result);
    if (result == NULL) return PyErr_Occurred() || check_open(self) < 0 ? NULL : left_meanwhile();
    if (is_last && self->control != NULL) {
        /* Nobody needs this reader: when its process exits now, no slower one calls it dead. */
        hr_point(9);
        self->left = 1;
        hr_leave(self->control, self->index);
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

static PyObject *reader_disown(Ring *self, PyObject *unused) {
    (void)unused;
    self->left = 1;
    Py_RETURN_NONE;
}

/* ---- the short way, for batch.c ---------------------------------------------------------------------------------- */

int headrace_is_reader(PyObject *object) { return headrace_is_made_by(Py_TYPE(object), reader_new); }

const hr_descriptor *headrace_peek(PyObject *reader, double timeout_s, unsigned long *slot) {
    Ring *self = (Ring *)reader;
    if (self->control == NULL || self->data == NULL || self->left || self->busy) return NULL;
    const hr_descriptor *descriptor = next_descriptor(self, timeout_s);
    if (descriptor == NULL || descriptor->version != self->next || descriptor->kind != HR_DATA) return NULL;
    if (descriptor->num_ragged > HR_MAX_RAGGED) return NULL;
    *slot = self->next % self->control->header.num_slots;
    self->busy = 1;
    return descriptor;
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
    uint64_t released[HR_MAX_READERS];
    uint32_t num_readers = self->control->header.num_readers;
    for (uint32_t i = 0; i < num_readers; i++) released[i] = atomic_load(&self->control->readers[i].released);
    PyObject *result = PyTuple_New(num_readers); /* garbage may be collected here, and this end be closed */
    for (uint32_t i = 0; result != NULL && i < num_readers; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(released[i]);
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
    {"close", (PyCFunction)ring_close, METH_NOARGS, "Let go of the mappings; where another thread waits, as soon as it has ended."},
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
    {"disown", (PyCFunction)reader_disown, METH_NOARGS, "Take and release nothing any more; the shared memory is not touched."},
    {"set_fate", (PyCFunction)ring_set_fate, METH_VARARGS, "set_fate(state): tell everybody; the first to say so wins."},
    {"close", (PyCFunction)ring_close, METH_NOARGS, "Let go of the mappings; where another thread waits, as soon as it has ended."},
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
