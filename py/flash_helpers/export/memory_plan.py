"""Places of buffers in one piece of memory, where those that are used at different times share
theirs. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256  # bytes: what the driver gives, more than any kernel needs


@dataclass(frozen=True)
class Use:
    """A buffer's size in bytes, and the numbers of the first and the last call that use it."""

    bytes: int
    first: int
    last: int

    def meets(self, other: Use) -> bool:
        """Whether both are used at a time."""
        return self.first <= other.last and other.first <= self.last


def aligned(size: int) -> int:
    """Return a size rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def placed(uses: Sequence[Use]) -> tuple[list[int], int]:
    """Return the offset of each buffer, and the bytes of all together. The largest is placed first,
    each as low as those allow that it meets."""
    offsets = [0] * len(uses)
    done: list[int] = []
    for number in sorted(range(len(uses)), key=lambda n: (-uses[n].bytes, uses[n].first)):
        own = uses[number]
        taken = sorted(
            (offsets[n], offsets[n] + aligned(uses[n].bytes)) for n in done if own.meets(uses[n])
        )
        begin = 0
        for low, high in taken:
            if begin + aligned(own.bytes) <= low:
                break
            begin = max(begin, high)
        offsets[number] = begin
        done.append(number)
    ends = (offset + aligned(use.bytes) for offset, use in zip(offsets, uses, strict=True))
    return offsets, max(ends, default=0)
