/* What each file of the native module adds to it. One function per file; module.c calls them in turn. */
#ifndef HEADRACE_MODULE_H
#define HEADRACE_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "layout.h"

int headrace_add_mapping(PyObject *module); /* mapping.c: type Mapping, a shared mapping that cannot vanish under a view */
int headrace_add_ring(PyObject *module);    /* ring.c:    types RingWriter and RingReader, versions, slots, futex waits */
int headrace_add_batch(PyObject *module);   /* batch.c:   types Batch and Lender, a ready batch in one call */
int headrace_add_pack(PyObject *module);    /* pack.c:    pack(), token rows to fields in one pass */
int headrace_add_order(PyObject *module);   /* order.c:   draw_blend(), index_samples(), loops that NumPy has no word for */

/* Whether instances of the type begin as `make` makes them: by a native type, or by a subclass whatever its own __new__. */
static inline int headrace_is_made_by(PyTypeObject *type, newfunc make) {
    while (type != NULL && PyType_GetSlot(type, Py_tp_new) != (void *)make) type = PyType_GetSlot(type, Py_tp_base);
    return type != NULL;
}

/* ring.c for batch.c. `peek` returns the descriptor and the slot of the next version if that is a batch, after having handed
 * back what it may and waited for at most timeout_s. NULL, without an exception: only RingReader.next knows what to do.
 * After a descriptor the reader is busy until `take`, so that it stays readable whatever Python code runs meanwhile: any
 * allocation may collect garbage, and a finalizer may close this reader. `take` counts the version as taken, if it is
 * wanted and the reader still open; it says whether it did. */
int headrace_is_reader(PyObject *object);
const hr_descriptor *headrace_peek(PyObject *reader, double timeout_s, unsigned long *slot);
bool headrace_take(PyObject *reader, bool is_wanted);

#endif
