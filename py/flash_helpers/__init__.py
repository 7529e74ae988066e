"""Tools around the kernels: their registry, their build, and the programs that check, measure and
explain them.

Importing this package imports nothing else. `registry`, `compile` and `kernel_configs` need only
the standard library, so that setup.py can use them before anything is installed.
"""

__version__ = "0.2.0"
