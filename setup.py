"""Build of flash_attention: nvcc makes the kernel library, setuptools the rest.

Modules that an old Python cannot read are imported only when kernels are built, so that pip can
report that this package needs a newer Python.
"""

import sys
from pathlib import Path

SETUPTOOLS = 77  # the first release that reads pyproject.toml's license, which asks pip for it

try:
    from setuptools import __version__ as found
except ImportError:
    found = "0"  # from Python 3.12 on, venv does not install setuptools
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
    """Compile the kernels into the package's folder, and copy them to the folder of the wheel."""

    description = "build the kernel library with nvcc"
    user_options = [("build-lib=", "b", "folder that the wheel is made from")]

    def initialize_options(self):
        self.build_lib = None
        self.editable_mode = False  # setuptools sets it for `pip install -e`

    def finalize_options(self):
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self):
        from flash_helpers.compile.build import build_package, copy_built_files, copy_sources
        from flash_helpers.compile.package import COMPILED_FOLDER, SOURCES_FOLDER
        from flash_helpers.compile.prebuild import prebuild
        from flash_helpers.compile.toolchain import BuildError

        def report(line):
            print(line, flush=True)

        try:
            build_package(ROOT, ROOT / PACKAGE, report)
            if not self.editable_mode:
                package = Path(self.build_lib) / PACKAGE
                copy_built_files(ROOT / PACKAGE, package)
                copy_sources(ROOT, package / SOURCES_FOLDER)
                prebuild(ROOT, package / COMPILED_FOLDER, report)
        except (BuildError, OSError, ValueError) as error:
            raise SystemExit(f"error: {error}") from None

    def get_source_files(self):
        return []  # MANIFEST.in lists them

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_kernels", None)]


class PlatformWheel(bdist_wheel):
    """A wheel for every version of Python: the library uses only Python's stable ABI."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(
    version=__version__,
    packages=[
        PACKAGE,
        *(f"{PACKAGE}.{part}" for part in ("distributed", "integrations", "multimodal")),
    ],
    package_data={PACKAGE: ["py.typed"]},
    install_requires=["torch>=2.4", f"flash_helpers=={__version__}"],
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": PlatformWheel},
)
