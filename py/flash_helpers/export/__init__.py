"""Kernels for programs without Python: machine code, PTX, a C header and a description in JSON."""
