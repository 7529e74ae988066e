"""Host programs of CUDA without a GPU: their launches run in the simulator.

A program is linked with the stub of libcudart and libcuda in `stub/`, which sends every call to the
Python process (`session`). That process holds device memory and runs the kernels' PTX.
"""
