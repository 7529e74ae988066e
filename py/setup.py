"""Package flash_helpers: the registry of the kernels and the tools around them."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

from flash_helpers import __version__

setup(
    name="flash_helpers",
    version=__version__,
    description="Registry, reference, benchmarks and analysis for the flash_attention kernels",
    packages=["flash_helpers", "flash_helpers.ptx"],
    python_requires=">=3.10",
    install_requires=["numpy>=2", "pyelftools", "tabulate", "torch>=2.4", "tqdm"],
)
