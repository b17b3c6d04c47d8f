/* What each file of the native module adds to it. One function per file; module.c calls them in turn. */
#ifndef HEADRACE_MODULE_H
#define HEADRACE_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

int headrace_add_mapping(PyObject *module); /* mapping.c: type Mapping, a shared mapping that cannot vanish under a view */
int headrace_add_ring(PyObject *module);    /* ring.c:    type Ring, versions, slots, futex waits */
int headrace_add_pack(PyObject *module);    /* pack.c:    pack(), token rows to fields in one pass */

#endif
