#pragma once
// The functions of Python's stable ABI that the library calls, the same from Python 3.10 on
// (https://docs.python.org/3/c-api/stable.html). Declared here, so that a build needs no headers of
// Python and one library serves every version.

#include <cstddef>

struct PyObject;
struct PyThreadState;

struct PyMethodDef {
    const char *ml_name;
    PyObject *(*ml_meth)(PyObject *self, PyObject *const *arguments, ptrdiff_t count);
    int ml_flags;
    const char *ml_doc;
};

constexpr int METH_FASTCALL = 0x0080;

extern "C" {
PyObject *PyCFunction_NewEx(PyMethodDef *method, PyObject *self, PyObject *module);
PyObject *PyBool_FromLong(long value);
char *PyBytes_AsString(PyObject *bytes);
void PyErr_Clear();
PyThreadState *PyEval_SaveThread();
void PyEval_RestoreThread(PyThreadState *state);
}
