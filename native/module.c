/* headrace._native: what Python cannot say, or only slowly. Atomics and futex (ring.c), mappings that outlive their
 * views (mapping.c), a ready batch without Python code (batch.c), the packing pass (pack.c), two loops of the order
 * (order.c). Limited API, one abi3 wheel for all Pythons from 3.11. */
#include "module.h"

#if !defined(__linux__)
#error "headrace needs Linux: memfd and futex"
#endif

static int exec_module(PyObject *module) {
    if (headrace_add_mapping(module) < 0) return -1;
    if (headrace_add_ring(module) < 0) return -1;
    if (headrace_add_batch(module) < 0) return -1;
    if (headrace_add_pack(module) < 0) return -1;
    if (headrace_add_order(module) < 0) return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)exec_module},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headrace._native",
    .m_doc = "Atomics, futex waits, mappings and the packing pass.",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
