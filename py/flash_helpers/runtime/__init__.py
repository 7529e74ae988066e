"""Runners of kernels: the library on a GPU, the simulator on the CPU, the driver for cubins."""
