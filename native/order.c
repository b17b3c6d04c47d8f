/* headrace._native.draw_blend, index_samples: check every array, then hand them to the passes of order.h. */
#include "module.h"

#include "order.h"

enum { ANY_STRIDE = PyBUF_STRIDES | PyBUF_FORMAT };
enum { READ = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT, WRITE = READ | PyBUF_WRITABLE };

/* An array that a pass wants. Formats of the struct module: int64 is 'l' for NumPy and 'q' for ctypes. */
struct array {
    const char *name, *wanted, *formats;
    Py_ssize_t least_bytes, most_bytes; /* an element */
    int ndim, flags;
    Py_buffer view;
};

static int get_array(PyObject *object, struct array *array) {
    Py_buffer *view = &array->view;
    if (PyObject_GetBuffer(object, view, array->flags) == 0) {
        const char *format = view->format ? view->format : "B";
        if (*format == '@' || *format == '=' || *format == '<') format++; /* all native on x86-64 and aarch64 */
        if (view->ndim == array->ndim && format[0] && !format[1] && strchr(array->formats, format[0]) &&
            view->itemsize >= array->least_bytes && view->itemsize <= array->most_bytes)
            return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s must be %s, got %R (format '%s', %zd bytes, %d dimensions)", array->name,
                 array->wanted, (PyObject *)Py_TYPE(object), view->obj && view->format ? view->format : "none",
                 view->itemsize, view->ndim);
    return -1;
}

/* -- which corpus comes next --------------------------------------------------------------------------------------- */

enum { SHARES, LIMITS, CORPUS_INDEX, CORPUS_SAMPLE_INDEX, NUM_BLEND_ARRAYS };

/* Where shares are numbers and the limits suffice, some corpus can always give the next sample. */
static int check_blend(const struct order_blend *blend, int64_t num_limits, int64_t num_numbers) {
    int64_t left = blend->num_samples;
    bool good = blend->num_corpora >= 1 && blend->num_corpora <= INT16_MAX && num_limits == blend->num_corpora &&
                num_numbers == left;
    for (int64_t corpus = 0; good && corpus < blend->num_corpora; corpus++) {
        good = blend->shares[corpus] >= 0 && blend->shares[corpus] <= 1 && blend->limits[corpus] >= 0;
        left -= blend->limits[corpus] < left ? blend->limits[corpus] : left;
    }
    if (good && left == 0) return 0;
    PyErr_Format(PyExc_ValueError,
                 "draw_blend needs shares in [0, 1] and limits of 1 to %d corpora that suffice for the samples of both "
                 "outputs, got %lld shares, %lld limits, outputs of %lld and %lld samples",
                 INT16_MAX, (long long)blend->num_corpora, (long long)num_limits, (long long)blend->num_samples,
                 (long long)num_numbers);
    return -1;
}

static int run_blend(const struct array *arrays) {
    struct order_blend blend = {
        .shares = arrays[SHARES].view.buf,
        .limits = arrays[LIMITS].view.buf,
        .num_corpora = arrays[SHARES].view.shape[0],
        .num_samples = arrays[CORPUS_INDEX].view.shape[0],
        .corpus_index = arrays[CORPUS_INDEX].view.buf,
        .corpus_sample_index = arrays[CORPUS_SAMPLE_INDEX].view.buf,
    };
    if (check_blend(&blend, arrays[LIMITS].view.shape[0], arrays[CORPUS_SAMPLE_INDEX].view.shape[0]) < 0) return -1;
    blend.drawn = PyMem_Calloc((size_t)blend.num_corpora, sizeof *blend.drawn);
    if (!blend.drawn) return PyErr_NoMemory(), -1;
    Py_BEGIN_ALLOW_THREADS
    order_draw(&blend);
    Py_END_ALLOW_THREADS
    PyMem_Free(blend.drawn);
    return 0;
}

static PyObject *draw_blend(PyObject *module, PyObject *arguments) {
    (void)module;
    struct array arrays[NUM_BLEND_ARRAYS] = {
        [SHARES] = {"shares", "float64 [corpora]", "d", 8, 8, 1, READ, {0}},
        [LIMITS] = {"limits", "int64 [corpora]", "lq", 8, 8, 1, READ, {0}},
        [CORPUS_INDEX] = {"corpus_index", "writable int16 [samples]", "h", 2, 2, 1, WRITE, {0}},
        [CORPUS_SAMPLE_INDEX] = {"corpus_sample_index", "writable int64 [samples]", "lq", 8, 8, 1, WRITE, {0}},
    };
    PyObject *given[NUM_BLEND_ARRAYS];
    if (!PyArg_ParseTuple(arguments, "OOOO:draw_blend", &given[0], &given[1], &given[2], &given[3])) return NULL;
    int result = 0;
    for (int i = 0; i < NUM_BLEND_ARRAYS && result == 0; i++) result = get_array(given[i], &arrays[i]);
    if (result == 0) result = run_blend(arrays);
    for (int i = 0; i < NUM_BLEND_ARRAYS; i++) PyBuffer_Release(&arrays[i].view); /* an empty one is left alone */
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* -- where samples start ------------------------------------------------------------------------------------------- */

static int run_index(const Py_buffer *lengths, const Py_buffer *index, long long sequence_length, int extra) {
    struct order_samples samples = {
        .lengths = lengths->buf,
        .num_documents = lengths->shape[0],
        .stride = lengths->strides ? lengths->strides[0] : lengths->itemsize, /* none: one element behind the other */
        .sequence_length = sequence_length,
        .extra = extra,
        .index = index->buf,
        .wide = index->itemsize == 8,
        .num_rows = index->shape[0],
    };
    if (samples.num_documents < 1 || (!samples.wide && samples.num_documents > INT32_MAX) || samples.num_rows < 1 ||
        index->shape[1] != 2 || sequence_length < 1 || sequence_length > INT32_MAX || extra < 0 || extra > 1) {
        PyErr_Format(PyExc_ValueError,
                     "index_samples needs documents, sample_index [1 + samples, 2] (int64 beyond %d documents), "
                     "sequence_length 1 to %d and extra 0 or 1, got %lld documents, [%zd, %zd], %lld and %d",
                     INT32_MAX, INT32_MAX, (long long)samples.num_documents, index->shape[0], index->shape[1],
                     sequence_length, extra);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    order_index(&samples);
    Py_END_ALLOW_THREADS
    return 0;
}

static PyObject *index_samples(PyObject *module, PyObject *arguments) {
    (void)module;
    struct array lengths = {"lengths", "int32 [documents]", "il", 4, 4, 1, ANY_STRIDE, {0}};
    struct array index = {"sample_index", "writable int32 or int64 [1 + samples, 2]", "ilq", 4, 8, 2, WRITE, {0}};
    PyObject *given[2];
    long long sequence_length;
    int extra;
    if (!PyArg_ParseTuple(arguments, "OOLi:index_samples", &given[0], &given[1], &sequence_length, &extra)) return NULL;
    int result = get_array(given[0], &lengths);
    if (result == 0) result = get_array(given[1], &index);
    if (result == 0) result = run_index(&lengths.view, &index.view, sequence_length, extra);
    PyBuffer_Release(&lengths.view);
    PyBuffer_Release(&index.view);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"draw_blend", draw_blend, METH_VARARGS,
     "draw_blend(shares, limits, corpus_index, corpus_sample_index) -> None\n\n"
     "Fills both outputs, int16 and int64 [samples]: the corpus each sample comes from, and which of its samples it\n"
     "is. shares: float64 [corpora]; limits: int64 [corpora], the most samples of each. Without the GIL."},
    {"index_samples", index_samples, METH_VARARGS,
     "index_samples(lengths, sample_index, sequence_length, extra) -> None\n\n"
     "Fills sample_index, int32 or int64 [1 + samples, 2], from the lengths of documents in order, int32 with any\n"
     "stride. Without the GIL."},
    {NULL, NULL, 0, NULL},
};

int headrace_add_order(PyObject *module) { return PyModule_AddFunctions(module, functions); }
