"""The registry: problems, families of kernels, their steps and configs. Standard library only."""
