"""Tools around the sixteen forward kernels: their registry, their build, reference and analysis.

Importing this package imports nothing else: `kernel_configs`, `codegen` and `build` need only the
standard library, so that setup.py can use them before anything is installed.
"""

__version__ = "0.1.0"
