"""Progress bars on stderr, if that is a terminal; elsewhere nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

# (done, total)
Progress = Callable[[int, int], None]


def bar(steps: Iterable[T] | None = None, **options: Any) -> tqdm[T]:
    """A bar around steps, or one to be moved on by hand. options: of tqdm, such as desc and
    unit."""
    return tqdm(steps, disable=None, **options)


@contextmanager
def progress_bar(description: str, unit: str = "kernel") -> Iterator[Progress]:
    """A bar that is told how far the work is, and is gone after it."""
    with bar(desc=description, unit=unit, leave=False) as shown:

        def advance(done: int, total: int) -> None:
            if shown.total is None:
                shown.reset(total)
            shown.update(done - shown.n)

        yield advance
