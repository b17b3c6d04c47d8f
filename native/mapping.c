/* Mapping: a shared mapping of a descriptor that cannot vanish under a view.
 *
 * Views are built as np.frombuffer(mapping): NumPy holds a buffer export for as long as the array (and every tensor made
 * from it) lives. close() with live exports raises BufferError; the memory goes when the last view does. Views made
 * from a raw pointer (PyMemoryView_FromMemory, torch.frombuffer) hold nothing and crash after unmap. */
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>

#include "module.h"

typedef struct {
    PyObject_HEAD
    uint8_t *address;
    Py_ssize_t nbytes;
    Py_ssize_t exports;
    int writable;
} Mapping;

/* Reserve more address space than needed, then map over its first aligned part: device pinning on Ascend wants a base that
 * is a multiple of 64 KiB, huge pages one that is a multiple of theirs, and mmap promises only pages. */
static uint8_t *map_aligned(int fd, size_t nbytes, size_t alignment, int protection) {
    uint8_t *reserved = mmap(NULL, nbytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return NULL;
    uint8_t *base = (uint8_t *)(((uintptr_t)reserved + alignment - 1) / alignment * alignment);
    if (mmap(base, nbytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int saved = errno;
        munmap(reserved, nbytes + alignment);
        errno = saved;
        return NULL;
    }
    if (base > reserved) munmap(reserved, (size_t)(base - reserved));
    munmap(base + nbytes, alignment - (size_t)(base - reserved));
    return base;
}

static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fd", "nbytes", "alignment", "writable", NULL};
    int fd, writable;
    Py_ssize_t nbytes, alignment;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "innp", names, &fd, &nbytes, &alignment, &writable)) return NULL;
    if (alignment < 4096 || (alignment & (alignment - 1)) != 0 || nbytes <= 0 || nbytes % 4096 != 0) {
        PyErr_Format(PyExc_ValueError, "nbytes must be whole pages and alignment a power of two of at least one, got %zd and %zd",
                     nbytes, alignment);
        return NULL;
    }
    uint8_t *address = map_aligned(fd, (size_t)nbytes, (size_t)alignment, writable ? PROT_READ | PROT_WRITE : PROT_READ);
    if (address == NULL) return PyErr_SetFromErrno(PyExc_OSError);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Mapping *self = (Mapping *)allocate(type, 0);
    if (self == NULL) {
        munmap(address, (size_t)nbytes);
        return NULL;
    }
    self->address = address;
    self->nbytes = nbytes;
    self->writable = writable;
    return (PyObject *)self;
}

static void unmap(Mapping *self) {
    if (self->address != NULL) munmap(self->address, (size_t)self->nbytes);
    self->address = NULL;
}

static void mapping_dealloc(Mapping *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    unmap(self); /* no exports can be alive: each holds a reference to this object */
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *mapping_close(Mapping *self, PyObject *unused) {
    (void)unused;
    if (self->exports > 0) {
        PyErr_Format(PyExc_BufferError, "%zd views of this mapping are alive", self->exports);
        return NULL;
    }
    unmap(self);
    Py_RETURN_NONE;
}

static PyObject *mapping_advise(Mapping *self, PyObject *argument) {
    long advice = PyLong_AsLong(argument);
    if (advice == -1 && PyErr_Occurred()) return NULL;
    int code = 0;
    if (self->address != NULL) {
        Py_BEGIN_ALLOW_THREADS
        code = madvise(self->address, (size_t)self->nbytes, (int)advice) == 0 ? 0 : errno;
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLong(code);
}

static int mapping_getbuffer(Mapping *self, Py_buffer *view, int flags) {
    if (self->address == NULL) {
        PyErr_SetString(PyExc_ValueError, "this mapping is closed");
        view->obj = NULL;
        return -1;
    }
    if (PyBuffer_FillInfo(view, (PyObject *)self, self->address, self->nbytes, !self->writable, flags) < 0) return -1;
    self->exports++;
    return 0;
}

static void mapping_releasebuffer(Mapping *self, Py_buffer *view) {
    (void)view;
    self->exports--;
}

static PyObject *mapping_get_address(Mapping *self, void *unused) {
    (void)unused;
    return PyLong_FromVoidPtr(self->address);
}

static PyObject *mapping_get_nbytes(Mapping *self, void *unused) {
    (void)unused;
    return PyLong_FromSsize_t(self->nbytes);
}

static PyObject *mapping_get_exports(Mapping *self, void *unused) {
    (void)unused;
    return PyLong_FromSsize_t(self->exports);
}

static PyMethodDef methods[] = {
    {"close", (PyCFunction)mapping_close, METH_NOARGS, "Unmap. BufferError while a view is alive; again: no effect."},
    {"advise", (PyCFunction)mapping_advise, METH_O, "madvise over the whole mapping; returns 0 or errno."},
    {0},
};

static PyGetSetDef properties[] = {
    {"address", (getter)mapping_get_address, NULL, "Base address; 0 once closed.", NULL},
    {"nbytes", (getter)mapping_get_nbytes, NULL, "Length in bytes.", NULL},
    {"exports", (getter)mapping_get_exports, NULL, "Views alive.", NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Mapping(fd, nbytes, alignment, writable): shared mapping of a descriptor, alive while a view is."},
    {Py_tp_new, mapping_new},
    {Py_tp_dealloc, mapping_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_bf_getbuffer, mapping_getbuffer},
    {Py_bf_releasebuffer, mapping_releasebuffer},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "headrace._native.Mapping",
    .basicsize = sizeof(Mapping),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int headrace_add_mapping(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    if (type == NULL) return -1;
    int status = PyModule_AddObjectRef(module, "Mapping", type);
    Py_DECREF(type);
    return status;
}
