"""Files that are written whole or not at all, and the folders of caches."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def text_diff(name: str, old: str, new: str) -> str:
    """Unified diff from a generated file's text to the text that it should have; "" if equal."""
    before, after = (text.splitlines(keepends=True) for text in (old, new))
    return "".join(difflib.unified_diff(before, after, name, f"{name} (generated)"))


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` at the end, with the permissions of a file that it replaces.
    After an exception `path` is as it was.

    Raises OSError, which names `path`.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            Path(temporary).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        # Not the temporary file, whose name means nothing to a user.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def user_cache(variable: str, *names: str) -> Path:
    """Return the folder that an environment variable names, or the one of these names in the user's
    cache folder."""
    from platformdirs import user_cache_path  # which the build of the kernels does without

    if folder := os.environ.get(variable):
        return Path(folder).absolute()
    return user_cache_path(names[0], appauthor=False).joinpath(*names[1:])


def write_if_different(path: Path, text: str) -> bool:
    """Write `text` to `path` unless the file holds it already; a reader never sees half a file.

    Returns whether the file was written. Creates the folder. Raises OSError, which names `path`.
    """
    data = text.encode()
    try:
        if path.is_file() and path.read_bytes() == data:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    with replaced_file(path) as file:
        file.write(data)
    return True
