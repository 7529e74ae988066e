"""Tensor maps in global memory that the kernel itself has changed.

Tensor copies read maps through a proxy of their own (PTX ISA 9.0, "Proxies", "tensormap.replace",
"membar/fence: fence.proxy.tensormap"). So a change must be released to that proxy, by
tensormap.cp_fenceproxy or fence.proxy.tensormap::generic.release, and then a thread of the block
that uses the map must acquire it, by fence.proxy.tensormap::generic.acquire of its address.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

FENCE = "fence.proxy.tensormap::generic"


@dataclass
class _Change:
    """The last change of a map. `position`: the instruction; None for stores. `block`: the block
    that made it. `acquired`: the blocks that have acquired it since."""

    position: int | None
    block: int
    is_released: bool
    acquired: set[int] = field(default_factory=set)


class ChangedMaps:
    """The maps that the blocks of a batch have changed, by address. `before`: addresses of the maps
    that were there before. A map at any other address was stored by threads; when, is not known."""

    def __init__(self, before: Iterable[int]) -> None:
        self._before = frozenset(map(int, before))
        self._changes: dict[int, _Change] = {}

    def change(self, address: int, position: int, block: int, *, is_released: bool) -> None:
        """A block changes a map."""
        self._changes[address] = _Change(position, block, is_released)

    def release(self, blocks: Iterable[int]) -> None:
        """Blocks release the changes that they have made."""
        releasing = set(blocks)
        for change in self._changes.values():
            change.is_released |= change.block in releasing

    def acquire(self, address: int, block: int) -> None:
        """A block acquires a map."""
        change = self._change(address)
        if change is not None and change.is_released:
            change.acquired.add(block)

    def missing(self, address: int, block: int) -> tuple[int | None, str] | None:
        """The change that a block may not see when it uses a map, by the position of the
        instruction that made it, and the fence that is missing."""
        change = self._change(address)
        if change is None or block in change.acquired:
            return None
        return change.position, f"{FENCE}.{'acquire' if change.is_released else 'release'}"

    def _change(self, address: int) -> _Change | None:
        if address in self._before:
            return self._changes.get(address)
        return self._changes.setdefault(address, _Change(None, -1, is_released=True))
