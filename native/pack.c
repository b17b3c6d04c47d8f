/* headrace._native.pack, zigzag_runs, cut: check every buffer, then hand them to the passes of pack.h and cut.h. */
#include "module.h"

#include "cut.h"
#include "pack.h"

/* A shorter pass is over (30 us) before another thread could use the GIL; from here on others may run. */
enum { RELEASE_GIL_TOKENS = 16384 };

enum { FLAG_RESET_POSITION_IDS = 1, FLAG_RESET_ATTENTION_MASK = 2, FLAG_EOD_MASK_LOSS = 4 };

/* The buffers of a call. Outputs come first, in the order of the tuple that holds them. */
enum { TOKENS, LABELS, LOSS_MASK, POSITION_IDS, CU_SEQLENS, HF_LABELS, SHIFT_LABELS, NUM_OUTPUTS };
enum { ROWS = NUM_OUTPUTS, DOCUMENT_ENDS, PADDING_ROWS, NUM_BUFFERS };

static const struct buffer_kind {
    const char *name;
    const char *dtype;
    const char *formats; /* of the struct module: int64 is 'l' for NumPy and 'q' for ctypes */
    Py_ssize_t itemsize;
    int writable;
} KINDS[NUM_BUFFERS] = {
    [TOKENS] = {"tokens", "int64", "lq", 8, 1},
    [LABELS] = {"labels", "int64", "lq", 8, 1},
    [LOSS_MASK] = {"loss_mask", "float32", "f", 4, 1},
    [POSITION_IDS] = {"position_ids", "int64", "lq", 8, 1},
    [CU_SEQLENS] = {"cu_seqlens", "int32", "il", 4, 1},
    [HF_LABELS] = {"hf_labels", "int64", "lq", 8, 1},
    [SHIFT_LABELS] = {"shift_labels", "int64", "lq", 8, 1},
    [ROWS] = {"rows", "uint16 or int32", "Hil", 0, 0},
    [DOCUMENT_ENDS] = {"document_ends", "int32", "il", 4, 0},
    [PADDING_ROWS] = {"padding_rows", "uint8", "B", 1, 0},
};

static int format_is(const char *format, const char *wanted) {
    if (!format) return wanted[0] == 'B'; /* the buffer protocol's default: plain bytes */
    /* Native order may be spelled out; '<' is native on the two platforms there are (x86-64, aarch64). */
    if (*format == '@' || *format == '=' || *format == '<') format++;
    return format[0] && !format[1] && strchr(wanted, format[0]);
}

static int get_buffer(PyObject *object, int which, Py_buffer *view) {
    const struct buffer_kind *kind = &KINDS[which];
    int request = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (kind->writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, request) < 0) {
        PyErr_Format(PyExc_ValueError, "%s must be a C-contiguous%s %s buffer, got %R", kind->name,
                     kind->writable ? " writable" : "", kind->dtype, (PyObject *)Py_TYPE(object));
        return -1;
    }
    int size_fits = which == ROWS ? view->itemsize == 2 || view->itemsize == 4 : view->itemsize == kind->itemsize;
    if (size_fits && format_is(view->format, kind->formats)) return 0;
    PyErr_Format(PyExc_ValueError, "%s must be %s, got buffer format '%s' of %zd bytes an element", kind->name,
                 kind->dtype, view->format ? view->format : "B", view->itemsize);
    return -1;
}

static int check_count(const Py_buffer *views, int which, int64_t wanted) {
    if (!views[which].obj) return 0;
    int64_t have = views[which].len / views[which].itemsize;
    if (have == wanted) return 0;
    PyErr_Format(PyExc_ValueError, "%s must have %lld elements, got %lld", KINDS[which].name, (long long)wanted,
                 (long long)have);
    return -1;
}

static int check_sizes(const Py_buffer *views, const struct pack_job *job) {
    static const int dense[] = {TOKENS, LABELS, LOSS_MASK, POSITION_IDS, HF_LABELS, SHIFT_LABELS};
    int64_t total = job->num_rows * job->seq_length;
    for (size_t i = 0; i < sizeof dense / sizeof *dense; i++)
        if (check_count(views, dense[i], total) < 0) return -1;
    return check_count(views, PADDING_ROWS, job->num_rows);
}

/* Ends must rise to each row end: what follows relies on it to stay inside the outputs. */
static int check_document_ends(const Py_buffer *view, const struct pack_job *job) {
    int64_t count = view->len / view->itemsize, previous = 0, next_row_end = job->seq_length;
    for (int64_t i = 0; i < count; i++) {
        int64_t end = job->document_ends[i];
        if (end <= previous || end > next_row_end) {
            PyErr_Format(PyExc_ValueError, "document_ends must rise to each row end, got %lld outside (%lld, %lld]",
                         (long long)end, (long long)previous, (long long)next_row_end);
            return -1;
        }
        if (end == next_row_end && end < job->num_rows * job->seq_length) next_row_end += job->seq_length;
        previous = end;
    }
    if (previous == job->num_rows * job->seq_length) return 0;
    PyErr_Format(PyExc_ValueError, "document_ends stop at %lld, the rows end at %lld", (long long)previous,
                 (long long)(job->num_rows * job->seq_length));
    return -1;
}

static int describe_job(struct pack_job *job, const Py_buffer *views, int64_t seq_length) {
    const Py_buffer *rows = &views[ROWS];
    if (rows->ndim != 2 || rows->shape[0] < 1 || seq_length < 1 ||
        (rows->shape[1] != seq_length && rows->shape[1] != seq_length + 1)) {
        PyErr_Format(PyExc_ValueError,
                     "rows must be [micro_batch >= 1, seq_length or seq_length + 1] with seq_length >= 1, got %d "
                     "dimensions for seq_length %lld",
                     rows->ndim, (long long)seq_length);
        return -1;
    }
    if (rows->shape[0] > INT32_MAX / seq_length) {
        PyErr_Format(PyExc_ValueError, "rows must hold at most %d tokens (cu_seqlens is int32), got %zd rows of %lld",
                     INT32_MAX, rows->shape[0], (long long)seq_length);
        return -1;
    }
    job->text = rows->buf;
    job->text_is_uint16 = rows->itemsize == 2;
    job->num_rows = rows->shape[0];
    job->row_length = rows->shape[1];
    job->seq_length = seq_length;
    job->tokens = views[TOKENS].buf;
    job->labels = views[LABELS].buf;
    job->loss_mask = views[LOSS_MASK].buf;
    job->position_ids = views[POSITION_IDS].buf;
    job->hf_labels = views[HF_LABELS].buf;
    job->shift_labels = views[SHIFT_LABELS].buf;
    job->cu_seqlens = views[CU_SEQLENS].buf;
    job->cu_capacity = views[CU_SEQLENS].len / 4;
    job->document_ends = views[DOCUMENT_ENDS].buf;
    job->padding_rows = views[PADDING_ROWS].buf;
    if (check_sizes(views, job) < 0) return -1;
    return views[DOCUMENT_ENDS].obj ? check_document_ends(&views[DOCUMENT_ENDS], job) : 0;
}

static int integer(PyObject *object, const char *name, int64_t low, int64_t high, int64_t *value) {
    *value = PyLong_AsLongLong(object);
    if (*value == -1 && PyErr_Occurred()) return -1;
    if (*value >= low && *value <= high) return 0;
    PyErr_Format(PyExc_ValueError, "%s must be in [%lld, %lld], got %lld", name, (long long)low, (long long)high,
                 (long long)*value);
    return -1;
}

static int describe_rules(struct pack_job *job, PyObject *const *arguments, int64_t *seq_length) {
    int64_t eod, pad, last_id, flags;
    if (integer(arguments[0], "seq_length", INT32_MIN, INT32_MAX, seq_length) < 0) return -1;
    if (integer(arguments[1], "eod", INT32_MIN, INT32_MAX, &eod) < 0) return -1;
    if (integer(arguments[2], "pad", INT32_MIN, INT32_MAX, &pad) < 0) return -1;
    if (integer(arguments[3], "last_id", -1, INT32_MAX, &last_id) < 0) return -1;
    if (integer(arguments[4], "flags", 0, 7, &flags) < 0) return -1;
    job->eod = (int32_t)eod;
    job->pad = (int32_t)pad;
    job->last_id = (int32_t)last_id;
    job->reset_position_ids = flags & FLAG_RESET_POSITION_IDS;
    job->reset_attention_mask = flags & FLAG_RESET_ATTENTION_MASK;
    job->eod_mask_loss = flags & FLAG_EOD_MASK_LOSS;
    return 0;
}

static PyObject *run_job(const struct pack_job *job) {
    struct pack_counts counts;
    if (job->num_rows * job->seq_length >= RELEASE_GIL_TOKENS) {
        Py_BEGIN_ALLOW_THREADS
        pack_rows(job, &counts);
        Py_END_ALLOW_THREADS
    } else {
        pack_rows(job, &counts);
    }
    if (job->cu_seqlens && counts.num_documents >= job->cu_capacity)
        return PyErr_Format(PyExc_ValueError, "cu_seqlens needs %lld elements for %lld documents, got %lld",
                            (long long)counts.num_documents + 1, (long long)counts.num_documents,
                            (long long)job->cu_capacity);
    return Py_BuildValue("(LLLLL)", (long long)counts.num_documents, (long long)counts.max_seqlen,
                         (long long)counts.num_loss_tokens, (long long)counts.num_valid_tokens,
                         (long long)counts.first_foreign);
}

static int get_buffers(PyObject *rows, PyObject *outputs, PyObject *document_ends, PyObject *padding_rows,
                       Py_buffer *views) {
    if (!PyTuple_Check(outputs) || PyTuple_Size(outputs) != NUM_OUTPUTS) {
        PyErr_Format(PyExc_TypeError, "outputs must be a tuple of %d", NUM_OUTPUTS);
        return -1;
    }
    for (int which = 0; which < NUM_OUTPUTS; which++) {
        PyObject *output = PyTuple_GetItem(outputs, which);
        if (output != Py_None && get_buffer(output, which, &views[which]) < 0) return -1;
    }
    if (document_ends != Py_None && get_buffer(document_ends, DOCUMENT_ENDS, &views[DOCUMENT_ENDS]) < 0) return -1;
    if (padding_rows != Py_None && get_buffer(padding_rows, PADDING_ROWS, &views[PADDING_ROWS]) < 0) return -1;
    return get_buffer(rows, ROWS, &views[ROWS]);
}

static PyObject *pack(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 9) return PyErr_Format(PyExc_TypeError, "pack takes 9 arguments, got %zd", count);
    Py_buffer views[NUM_BUFFERS];
    memset(views, 0, sizeof views);
    struct pack_job job = {0};
    int64_t seq_length;
    PyObject *result = NULL;
    if (get_buffers(arguments[0], arguments[1], arguments[2], arguments[3], views) == 0 &&
        describe_rules(&job, arguments + 4, &seq_length) == 0 && describe_job(&job, views, seq_length) == 0)
        result = run_job(&job);
    for (int which = 0; which < NUM_BUFFERS; which++) PyBuffer_Release(&views[which]); /* an empty one is left alone */
    return result;
}

/* -- parts of a batch (cut.h) ---------------------------------------------------------------------------------------- */

static int get_plain_buffer(PyObject *object, const char *name, int writable, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) == 0) return 0;
    PyErr_Format(PyExc_ValueError, "%s must be a C-contiguous%s buffer, got %R", name, writable ? " writable" : "",
                 (PyObject *)Py_TYPE(object));
    return -1;
}

static PyObject *find_zigzag(const Py_buffer *cu_seqlens, const Py_buffer *padded, const Py_buffer *runs,
                             PyObject *const *sizes) {
    int64_t multiple, cp_size, cp_rank;
    if (integer(sizes[0], "multiple", 1, INT32_MAX, &multiple) < 0) return NULL;
    if (integer(sizes[1], "cp_size", 1, INT32_MAX, &cp_size) < 0) return NULL;
    if (integer(sizes[2], "cp_rank", 0, cp_size - 1, &cp_rank) < 0) return NULL;
    int64_t num_documents = cu_seqlens->len / 4 - 1;
    if (cu_seqlens->itemsize != 4 || padded->itemsize != 4 || runs->itemsize != 8 || num_documents < 1 ||
        padded->len < cu_seqlens->len || runs->len < num_documents * 2 * (Py_ssize_t)sizeof(struct cut_run) ||
        multiple % (2 * cp_size) || num_documents * multiple > INT32_MAX ||
        ((const int32_t *)cu_seqlens->buf)[num_documents] > INT32_MAX - num_documents * multiple)
        return PyErr_Format(PyExc_ValueError, "zigzag_runs: boundaries are int32 [documents + 1], runs int64 "
                                              "[2 * documents, 3], multiple a multiple of 2 * cp_size");
    struct cut_runs_summary summary;
    cut_zigzag(cu_seqlens->buf, num_documents, multiple, cp_size, cp_rank, padded->buf, runs->buf, &summary);
    return Py_BuildValue("(LLLL)", (long long)summary.num_runs, (long long)summary.length,
                         (long long)summary.max_padded, (long long)summary.first_wrong);
}

static PyObject *zigzag_runs(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 6) return PyErr_Format(PyExc_TypeError, "zigzag_runs takes 6 arguments, got %zd", count);
    Py_buffer views[3];
    memset(views, 0, sizeof views);
    PyObject *result = NULL;
    if (get_plain_buffer(arguments[0], "cu_seqlens", 0, &views[0]) == 0 &&
        get_plain_buffer(arguments[1], "padded", 1, &views[1]) == 0 &&
        get_plain_buffer(arguments[2], "runs", 1, &views[2]) == 0)
        result = find_zigzag(&views[0], &views[1], &views[2], arguments + 3);
    for (int which = 0; which < 3; which++) PyBuffer_Release(&views[which]);
    return result;
}

/* A field to cut: its buffers, held while it is copied, and its job. */
struct cut_field {
    Py_buffer source, target;
    struct cut_job job;
};

/* Runs must lie inside the source and together fill the target: cut_part relies on it. */
static int check_runs(const struct cut_job *job, int64_t source_count, int64_t target_count) {
    int64_t filled = 0;
    for (int64_t i = 0; i < job->num_runs; i++) {
        const struct cut_run *run = &job->runs[i];
        if (run->start < 0 || run->start > INT32_MAX || run->length < 0 || run->length > target_count - filled ||
            run->end < 1 || run->end > source_count) {
            PyErr_Format(PyExc_ValueError, "run %lld (start %lld, length %lld, end %lld) leaves %lld tokens",
                         (long long)i, (long long)run->start, (long long)run->length, (long long)run->end,
                         (long long)source_count);
            return -1;
        }
        filled += run->length;
    }
    if (filled == target_count) return 0;
    PyErr_Format(PyExc_ValueError, "runs hold %lld tokens, target %lld", (long long)filled, (long long)target_count);
    return -1;
}

/* One field: (source, target, fill, run_on, blank_at_seam). `plan` says which runs and how far they are shifted. */
static int describe_cut(struct cut_field *field, PyObject *description, const struct cut_job *plan) {
    if (!PyTuple_Check(description) || PyTuple_Size(description) != 5) {
        PyErr_Format(PyExc_TypeError, "cut: a field is (source, target, fill, run_on, blank_at_seam), got %R", description);
        return -1;
    }
    int64_t fill, run_on, blank_at_seam;
    if (get_plain_buffer(PyTuple_GetItem(description, 0), "source", 0, &field->source) < 0 ||
        get_plain_buffer(PyTuple_GetItem(description, 1), "target", 1, &field->target) < 0 ||
        integer(PyTuple_GetItem(description, 2), "fill", INT32_MIN, INT32_MAX, &fill) < 0 ||
        integer(PyTuple_GetItem(description, 3), "run_on", 0, 1, &run_on) < 0 ||
        integer(PyTuple_GetItem(description, 4), "blank_at_seam", 0, 1, &blank_at_seam) < 0)
        return -1;
    struct cut_job *job = &field->job;
    *job = *plan;
    job->source = field->source.buf;
    job->target = field->target.buf;
    job->itemsize = field->source.itemsize;
    job->fill = fill;
    job->run_on = run_on;
    job->blank_at_seam = blank_at_seam;
    int is_number = job->itemsize == 8 || job->itemsize == 4;
    if (field->target.itemsize != job->itemsize || (!is_number && (fill || run_on))) {
        PyErr_Format(PyExc_ValueError, "cut: source has elements of %zd bytes, target of %zd, fill is %lld",
                     field->source.itemsize, field->target.itemsize, (long long)fill);
        return -1;
    }
    return check_runs(job, field->source.len / job->itemsize, field->target.len / job->itemsize);
}

/* Every field is checked before the first is written. */
static int cut_fields(PyObject *descriptions, struct cut_field *fields, Py_ssize_t num_fields,
                      const struct cut_job *plan) {
    Py_ssize_t nbytes = 0;
    for (Py_ssize_t i = 0; i < num_fields; i++) {
        if (describe_cut(&fields[i], PyList_GetItem(descriptions, i), plan) < 0) return -1;
        nbytes += fields[i].target.len;
    }
    if (nbytes >= RELEASE_GIL_TOKENS * 8) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < num_fields; i++) cut_part(&fields[i].job);
        Py_END_ALLOW_THREADS
    } else {
        for (Py_ssize_t i = 0; i < num_fields; i++) cut_part(&fields[i].job);
    }
    return 0;
}

static PyObject *cut_all(PyObject *descriptions, PyObject *runs, PyObject *num_runs, PyObject *shift) {
    if (!PyList_Check(descriptions)) return PyErr_Format(PyExc_TypeError, "cut: fields are a list");
    Py_ssize_t num_fields = PyList_Size(descriptions);
    struct cut_field *fields = PyMem_Calloc((size_t)num_fields + 1, sizeof *fields);
    if (!fields) return PyErr_NoMemory();
    struct cut_job plan = {0};
    Py_buffer table = {0};
    int result = get_plain_buffer(runs, "runs", 0, &table);
    if (result == 0 && table.itemsize != 8) {
        PyErr_Format(PyExc_ValueError, "runs are int64 [runs, 3], got elements of %zd bytes", table.itemsize);
        result = -1;
    }
    if (result == 0) {
        plan.runs = table.buf;
        result = integer(num_runs, "num_runs", 0, table.len / (Py_ssize_t)sizeof(struct cut_run), &plan.num_runs);
    }
    if (result == 0) result = integer(shift, "shift", 0, INT32_MAX, &plan.shift);
    if (result == 0) result = cut_fields(descriptions, fields, num_fields, &plan);
    for (Py_ssize_t i = 0; i < num_fields; i++) {
        PyBuffer_Release(&fields[i].source);
        PyBuffer_Release(&fields[i].target);
    }
    PyBuffer_Release(&table);
    PyMem_Free(fields);
    if (result < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *cut(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "cut takes 4 arguments, got %zd", count);
    return cut_all(arguments[0], arguments[1], arguments[2], arguments[3]);
}

static PyMethodDef functions[] = {
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL,
     "pack(rows, outputs, document_ends, padding_rows, seq_length, eod, pad, last_id, flags)\n"
     "-> (num_documents, max_seqlen, num_loss_tokens, num_valid_tokens, first_foreign)\n\n"
     "outputs: (tokens, labels, loss_mask, position_ids, cu_seqlens, hf_labels, shift_labels), an array or None each.\n"
     "Fills outputs from rows [micro_batch, seq_length (+ 1)], uint16 or int32. ValueError names the buffer that\n"
     "does not fit. Outputs hold nothing of use after an error, or when first_foreign >= 0: the index into rows of\n"
     "the first id outside the vocabulary. Large batches are packed without the GIL."},
    {"zigzag_runs", (PyCFunction)(void (*)(void))zigzag_runs, METH_FASTCALL,
     "zigzag_runs(cu_seqlens, padded, runs, multiple, cp_size, cp_rank)\n"
     "-> (num_runs, length, max_padded, first_wrong)\n\n"
     "Fills padded (int32, like cu_seqlens) and runs (int64 [2 * documents, 3]: start, length, end) for one rank.\n"
     "first_wrong: index of the boundary that does not rise, -1: none."},
    {"cut", (PyCFunction)(void (*)(void))cut, METH_FASTCALL,
     "cut(fields, runs, num_runs, shift) -> None\n\n"
     "fields: a list of (source, target, fill, run_on, blank_at_seam). Copies the runs of each source into its target,\n"
     "`shift` further on, with `fill` past the end of a document. run_on (int64, int32): padding counts on from the\n"
     "document's last element. blank_at_seam: the first of a run is fill. Large fields are copied without the GIL."},
    {NULL, NULL, 0, NULL},
};

int headrace_add_pack(PyObject *module) {
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    if (PyModule_AddIntConstant(module, "RESET_POSITION_IDS", FLAG_RESET_POSITION_IDS) < 0) return -1;
    if (PyModule_AddIntConstant(module, "RESET_ATTENTION_MASK", FLAG_RESET_ATTENTION_MASK) < 0) return -1;
    return PyModule_AddIntConstant(module, "EOD_MASK_LOSS", FLAG_EOD_MASK_LOSS);
}
