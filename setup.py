"""Build of flash_attention: the kernel library is made by nvcc, the rest is setuptools.

What a Python that is too old cannot read is imported only when kernels are built, so that pip can
say that this package needs a newer one.
"""

import sys
from pathlib import Path

SETUPTOOLS = 77  # the first that reads pyproject.toml's license; pyproject.toml asks pip for it

try:
    from setuptools import __version__ as found
except ImportError:
    found = "0"  # venv brings none from Python 3.12 on
if int(found.partition(".")[0]) < SETUPTOOLS:
    there = "no setuptools" if found == "0" else f"setuptools {found}"
    raise SystemExit(
        f"error: there is {there}, and setup.py needs {SETUPTOOLS} or later: "
        f"pip install 'setuptools>={SETUPTOOLS}', or leave out --no-build-isolation"
    )

from setuptools import Command, Distribution, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build import build  # noqa: E402

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "py"))

from flash_helpers import __version__  # noqa: E402

PACKAGE = "flash_attention"


class BuildKernels(Command):
    """Compile the kernels into the package's folder, and copy them to where wheels are made."""

    description = "build the kernel library with nvcc"
    user_options = [("build-lib=", "b", "folder that the wheel is made from")]

    def initialize_options(self):
        self.build_lib = None
        self.editable_mode = False  # setuptools sets it for `pip install -e`

    def finalize_options(self):
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self):
        from flash_helpers.compile.build import build_package, copy_built_files
        from flash_helpers.compile.toolchain import BuildError

        try:
            build_package(ROOT, ROOT / PACKAGE, report=lambda line: print(line, flush=True))
        except (BuildError, OSError, ValueError) as error:
            raise SystemExit(f"error: {error}") from None
        if not self.editable_mode:
            copy_built_files(ROOT / PACKAGE, Path(self.build_lib) / PACKAGE)

    def get_source_files(self):
        return []  # MANIFEST.in lists them

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_kernels", None)]


class PlatformWheel(bdist_wheel):
    """One wheel serves every Python: of it the library calls the stable ABI alone."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(
    version=__version__,
    packages=[PACKAGE],
    package_data={PACKAGE: ["py.typed"]},
    install_requires=["torch>=2.4", f"flash_helpers=={__version__}"],
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": PlatformWheel},
)
