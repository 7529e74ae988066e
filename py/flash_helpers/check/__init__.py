"""Checks of kernels against references: inputs, errors, and the first difference."""
