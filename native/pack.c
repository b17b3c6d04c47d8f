#include "module.h"
int headrace_add_pack(PyObject *module) { (void)module; return 0; }
