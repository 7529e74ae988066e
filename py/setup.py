"""Package flash_helpers: the registry of the kernels and the tools around them."""

import sys
from pathlib import Path

from setuptools import find_packages, setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

from flash_helpers import __version__

setup(
    name="flash_helpers",
    version=__version__,
    description="Registry, reference, benchmarks and analysis for the flash_attention kernels",
    packages=find_packages(),
    package_data={"flash_helpers.sass.show": ["page_assets/*"]},
    python_requires=">=3.10",
    install_requires=[
        "numpy>=2",
        # The disassemblers of the CUDA toolkit: they read what older compilers wrote.
        "nvidia-cuda-cuobjdump>=13.2",
        "nvidia-cuda-nvdisasm>=13.2",
        "platformdirs",
        "pyelftools",
        "tabulate",
        "torch>=2.4",
        "tqdm",
    ],
    extras_require={"plot": ["matplotlib"]},
)
