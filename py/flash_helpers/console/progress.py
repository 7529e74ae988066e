"""Progress bars on stderr, if it is a terminal; otherwise nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

# Called as (done, total).
Progress = Callable[[int, int], None]


def bar(steps: Iterable[T] | None = None, **options: Any) -> tqdm[T]:
    """Return a bar around steps, or a bar to advance by hand. options: of tqdm, such as desc and
    unit."""
    return tqdm(steps, disable=None, **options)


@contextmanager
def task(description: str) -> Iterator[None]:
    """Show what is done during work of unknown length."""
    with bar(desc=description, bar_format="{desc} ...", leave=False):
        yield


@contextmanager
def progress_bar(description: str, unit: str = "kernel") -> Iterator[Progress]:
    """Show a bar during the work. Yields a function that sets the bar to (done, total)."""
    with bar(desc=description, unit=unit, leave=False) as shown:

        def advance(done: int, total: int) -> None:
            if shown.total is None:
                shown.reset(total)
            shown.update(done - shown.n)

        yield advance
