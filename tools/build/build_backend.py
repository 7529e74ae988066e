"""Build backend of setuptools that also asks pip for nvcc if the machine has none."""

import sys

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _with_toolchain(requirements: list) -> list:
    if sys.version_info < (3, 10):
        return requirements  # pip reports the error once it has read the metadata
    from flash_helpers.compile.toolchain import BuildError, toolchain_requirements

    try:
        return [*requirements, *toolchain_requirements()]
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None


def get_requires_for_build_wheel(config_settings: object = None) -> list:
    return _with_toolchain(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: object = None) -> list:
    return _with_toolchain(build_meta.get_requires_for_build_editable(config_settings))
