/* Batch and Lender: taking a batch that is ready, without a line of Python.
 *
 * After an idle gap code and data have left the caches: each Python frame, object and attribute on the way of a batch costs
 * a microsecond or more. So next(feed) is one C call as long as the next version is a plain batch whose arrays are known
 * already, and so is each key of the batch. Everything else is Lender's Python subclass's: `_next_slowly`. */
#include "module.h"

#include <string.h>
#include <structmember.h>

/* What the counts of a descriptor mean; feed/production.py writes them in this order. */
enum { CONSUMED_SAMPLES, MAX_SEQLEN, NUM_DOCUMENTS, NUM_LOSS_TOKENS, NUM_VALID_TOKENS, HAS_STATE };

typedef struct {
    PyObject_HEAD
    PyObject *reader; /* a RingReader, or NULL: nothing is lent without Python */
    PyObject *known;  /* dict: (slot, layout id, *lengths) -> (arrays, memory of the slot) */
    PyTypeObject *batch_type;
    allocfunc allocate; /* of batch_type */
    double timeout_s;
    long long hold;
    long long num_delivered;
    long long oldest_valid;
    long long consumed_samples;
} Lender;

typedef struct {
    PyObject_HEAD
    PyObject *arrays; /* dict */
    PyObject *memory; /* of the slot, or None */
    PyObject *lender; /* a Lender, or None: these arrays are the caller's */
    PyObject *metadata, *ends; /* Python's, once they are known */
    long long index;
    int64_t counts[HR_NUM_COUNTS];
} Batch;

/* ---- batch ------------------------------------------------------------------------------------------------------- */

static PyObject *lender_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);

static int is_lender(PyObject *object) { return headrace_is_made_by(Py_TYPE(object), lender_new); }

static PyObject *batch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"arrays", "index", "counts", "lender", "memory", "metadata", "ends", NULL};
    PyObject *arrays, *counts, *lender, *memory, *metadata = Py_None, *ends = Py_None;
    long long index;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!LO!OO|OO", names, &PyDict_Type, &arrays, &index, &PyTuple_Type, &counts,
                                     &lender, &memory, &metadata, &ends))
        return NULL;
    if (lender != Py_None && !is_lender(lender)) {
        PyErr_SetString(PyExc_TypeError, "lender must be a Lender or None");
        return NULL;
    }
    Batch *self = (Batch *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->arrays = Py_NewRef(arrays);
    self->lender = Py_NewRef(lender);
    self->memory = Py_NewRef(memory);
    self->metadata = Py_NewRef(metadata);
    self->ends = Py_NewRef(ends);
    self->index = index;
    for (Py_ssize_t i = 0; i < HR_NUM_COUNTS && i < PyTuple_Size(counts); i++)
        self->counts[i] = PyLong_AsLongLong(PyTuple_GetItem(counts, i));
    if (PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

static int batch_traverse(Batch *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->arrays);
    Py_VISIT(self->lender);
    Py_VISIT(self->memory);
    Py_VISIT(self->metadata);
    Py_VISIT(self->ends);
    return 0;
}

static int batch_clear(Batch *self) {
    Py_CLEAR(self->arrays);
    Py_CLEAR(self->lender);
    Py_CLEAR(self->memory);
    Py_CLEAR(self->metadata);
    Py_CLEAR(self->ends);
    return 0;
}

static void batch_dealloc(Batch *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    batch_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int is_valid(const Batch *self) {
    return self->lender == Py_None || self->index >= ((Lender *)self->lender)->oldest_valid;
}

static PyObject *batch_getitem(Batch *self, PyObject *name) {
    if (!is_valid(self)) return PyObject_CallMethod((PyObject *)self, "_raise_stale", NULL);
    PyObject *array = PyDict_GetItemWithError(self->arrays, name);
    if (array != NULL) return Py_NewRef(array);
    return PyErr_Occurred() ? NULL : PyObject_CallMethod((PyObject *)self, "__missing__", "O", name);
}

static PyObject *batch_is_valid(Batch *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(is_valid(self));
}

static PyObject *batch_counts(Batch *self, void *unused) {
    (void)unused;
    PyObject *counts = PyTuple_New(HR_NUM_COUNTS);
    for (int i = 0; counts != NULL && i < HR_NUM_COUNTS; i++) {
        PyObject *value = PyLong_FromLongLong(self->counts[i]);
        if (value == NULL || PyTuple_SetItem(counts, i, value) < 0) Py_CLEAR(counts);
    }
    return counts;
}

static PyMemberDef batch_members[] = {
    {"index", T_LONGLONG, offsetof(Batch, index), READONLY, "Number of the batch in its feed."},
#define COUNT(name, place, doc) {name, T_LONGLONG, offsetof(Batch, counts) + 8 * place, READONLY, doc}
    COUNT("consumed_samples", CONSUMED_SAMPLES, "Samples of the whole job that are consumed once this batch is."),
    COUNT("max_seqlen", MAX_SEQLEN, "Tokens of the longest segment."),
    COUNT("num_documents", NUM_DOCUMENTS, "Segments of attention."),
    COUNT("num_loss_tokens", NUM_LOSS_TOKENS, "Targets: the sum of the loss mask."),
    COUNT("num_valid_tokens", NUM_VALID_TOKENS, "Tokens that are text, not padding."),
#undef COUNT
    {"_arrays", T_OBJECT_EX, offsetof(Batch, arrays), READONLY, NULL},
    {"_lender", T_OBJECT_EX, offsetof(Batch, lender), READONLY, NULL},
    {"_memory", T_OBJECT_EX, offsetof(Batch, memory), READONLY, NULL},
    {"_metadata", T_OBJECT_EX, offsetof(Batch, metadata), 0, NULL},
    {"_ends", T_OBJECT_EX, offsetof(Batch, ends), 0, NULL},
    {0},
};

static PyGetSetDef batch_properties[] = {
    {"_counts", (getter)batch_counts, NULL, NULL, NULL},
    {"_is_valid", (getter)batch_is_valid, NULL, NULL, NULL},
    {0},
};

/* ---- lender ------------------------------------------------------------------------------------------------------ */

static PyObject *lender_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs; /* the subclass's */
    Lender *self = (Lender *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL) self->hold = 1;
    return (PyObject *)self;
}

static void lender_dealloc(Lender *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_CLEAR(self->reader);
    Py_CLEAR(self->known);
    Py_CLEAR(self->batch_type);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *lender_lend_from(Lender *self, PyObject *args) {
    PyObject *reader, *known, *batch_type;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "OO!O!d", &reader, &PyDict_Type, &known, &PyType_Type, &batch_type, &timeout_s)) return NULL;
    if (!headrace_is_reader(reader) || !headrace_is_made_by((PyTypeObject *)batch_type, batch_new)) {
        PyErr_SetString(PyExc_TypeError, "lend_from takes a RingReader, a dict, a type of Batch and seconds");
        return NULL;
    }
    if (self->reader != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this lender lends already");
        return NULL;
    }
    self->reader = Py_NewRef(reader);
    self->known = Py_NewRef(known);
    self->batch_type = (PyTypeObject *)Py_NewRef(batch_type);
    self->allocate = (allocfunc)PyType_GetSlot(self->batch_type, Py_tp_alloc);
    self->timeout_s = timeout_s;
    Py_RETURN_NONE;
}

/* (arrays, memory) of a descriptor; NULL: not known, or an exception is set. */
static PyObject *known_place(Lender *self, const hr_descriptor *descriptor, unsigned long slot) {
    PyObject *key = PyTuple_New(2 + (Py_ssize_t)descriptor->num_ragged), *place = NULL;
    for (uint32_t i = 0; key != NULL && i < 2 + descriptor->num_ragged; i++) {
        long long number = i == 0 ? (long long)slot : i == 1 ? descriptor->layout_id : descriptor->lengths[i - 2];
        PyObject *value = PyLong_FromLongLong(number);
        if (value == NULL || PyTuple_SetItem(key, i, value) < 0) Py_CLEAR(key);
    }
    if (key != NULL) place = Py_XNewRef(PyDict_GetItemWithError(self->known, key));
    Py_XDECREF(key);
    return place;
}

static PyObject *batch_of(Lender *self, const hr_descriptor *descriptor, PyObject *place) {
    Batch *batch = (Batch *)self->allocate(self->batch_type, 0);
    if (batch == NULL) return NULL;
    batch->arrays = Py_NewRef(PyTuple_GetItem(place, 0));
    batch->memory = Py_NewRef(PyTuple_GetItem(place, 1));
    batch->lender = Py_NewRef((PyObject *)self);
    batch->metadata = Py_NewRef(Py_None);
    batch->ends = Py_NewRef(Py_None);
    batch->index = self->num_delivered;
    memcpy(batch->counts, descriptor->counts, sizeof batch->counts);
    return (PyObject *)batch;
}

static PyObject *lend(Lender *self) {
    unsigned long slot;
    const hr_descriptor *descriptor = headrace_peek(self->reader, self->timeout_s, &slot);
    if (descriptor == NULL) return NULL;
    int64_t consumed_samples = descriptor->counts[CONSUMED_SAMPLES];
    PyObject *place = descriptor->counts[HAS_STATE] == 0 ? known_place(self, descriptor, slot) : NULL;
    PyObject *batch = place == NULL ? NULL : batch_of(self, descriptor, place);
    Py_XDECREF(place);
    if (!headrace_take(self->reader, batch != NULL)) {
        Py_XDECREF(batch);
        return NULL;
    }
    self->num_delivered++;
    self->oldest_valid = self->num_delivered - self->hold;
    self->consumed_samples = consumed_samples;
    return batch;
}

static PyObject *lender_next(Lender *self) {
    PyObject *batch = self->reader == NULL ? NULL : lend(self);
    if (batch != NULL || PyErr_Occurred()) return batch;
    return PyObject_CallMethod((PyObject *)self, "_next_slowly", NULL);
}

static PyMemberDef lender_members[] = {
    {"_hold", T_LONGLONG, offsetof(Lender, hold), 0, "How many batches stay valid."},
    {"_num_delivered", T_LONGLONG, offsetof(Lender, num_delivered), 0, "Batches handed out."},
    {"_oldest_valid", T_LONGLONG, offsetof(Lender, oldest_valid), 0, "Number of the oldest batch that may still be read."},
    {"_consumed_samples", T_LONGLONG, offsetof(Lender, consumed_samples), 0, "Of the last batch."},
    {0},
};

static PyMethodDef lender_methods[] = {
    {"_lend_from", (PyCFunction)lender_lend_from, METH_VARARGS,
     "_lend_from(reader, known, batch_type, timeout_s): hand out what is ready without asking Python; `known` holds arrays and "
     "memory by (slot, layout id, *lengths)."},
    {0},
};

/* ---- types ------------------------------------------------------------------------------------------------------- */

static PyType_Slot batch_slots[] = {
    {Py_tp_doc, "The arrays of one version and its counts. What has no array is the subclass's: __missing__."},
    {Py_tp_new, batch_new},
    {Py_tp_traverse, batch_traverse},
    {Py_tp_clear, batch_clear},
    {Py_tp_dealloc, batch_dealloc},
    {Py_mp_subscript, batch_getitem},
    {Py_tp_members, batch_members},
    {Py_tp_getset, batch_properties},
    {0, NULL},
};

static PyType_Slot lender_slots[] = {
    {Py_tp_doc, "An iterator of batches that stay valid while they are among the last `_hold`."},
    {Py_tp_new, lender_new},
    {Py_tp_dealloc, lender_dealloc},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, lender_next},
    {Py_tp_members, lender_members},
    {Py_tp_methods, lender_methods},
    {0, NULL},
};

static PyType_Spec batch_spec = {
    .name = "headrace._native.Batch",
    .basicsize = sizeof(Batch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = batch_slots,
};

static PyType_Spec lender_spec = {
    .name = "headrace._native.Lender",
    .basicsize = sizeof(Lender),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = lender_slots,
};

int headrace_add_batch(PyObject *module) {
    PyType_Spec *specs[] = {&batch_spec, &lender_spec};
    const char *names[] = {"Batch", "Lender"};
    for (int i = 0; i < 2; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (type == NULL || PyModule_AddObjectRef(module, names[i], type) < 0) return -1;
        Py_DECREF(type);
    }
    return 0;
}
