"""Memory of zeros that kernels leave as zeros."""

from __future__ import annotations

from flash_helpers.runtime.zeros import ALIGNMENT, RESERVE, ROOM, Zeros


class Device:
    """Allocations, one behind the other."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, size: int) -> int:
        self.sizes.append(size)
        return 2**30 + sum(self.sizes[:-1])


def test_calls_of_one_stream_share_memory_and_those_of_two_do_not():
    zeros = Zeros(Device().allocate)
    first = zeros.address(100, stream=7)
    assert first is not None
    assert zeros.address(60, stream=7) == first
    assert zeros.address(100, stream=8) == first + ALIGNMENT


def test_a_larger_call_has_more_memory_and_a_later_one_the_same():
    zeros = Zeros(Device().allocate)
    first = zeros.address(100, stream=7)
    larger = zeros.address(ALIGNMENT + 1, stream=7)
    assert larger == first + ALIGNMENT
    assert zeros.address(2 * ALIGNMENT, stream=7) == larger
    assert zeros.address(1, stream=8) == larger + 2 * ALIGNMENT


def test_a_graph_has_memory_of_its_own_for_each_capture():
    zeros = Zeros(Device().allocate)
    of_calls = zeros.address(100, stream=7)
    found = [zeros.address(100, stream=7, capture=number) for number in (1, 2, 1)]
    assert found[0] == found[2] != found[1]
    assert of_calls not in found


def test_a_capture_allocates_nothing():
    device = Device()
    zeros = Zeros(device.allocate)
    assert zeros.address(100, stream=7, capture=1) is None
    assert device.sizes == []
    zeros.address(100, stream=7)
    captures = 0
    while zeros.address(ALIGNMENT, stream=7, capture=captures) is not None:
        captures += 1
    assert captures == ROOM // ALIGNMENT - 1
    assert device.sizes == [ROOM]
    zeros.address(100, stream=7)  # which had enough, and provides for captures
    assert device.sizes == [ROOM, ROOM]
    assert zeros.address(RESERVE, stream=7, capture=captures) is not None


def test_a_call_may_need_more_than_is_allocated_at_once():
    device = Device()
    zeros = Zeros(device.allocate)
    assert zeros.address(3 * ROOM, stream=7) is not None
    assert device.sizes == [ROOM, 4 * ROOM]
    assert zeros.address(RESERVE, stream=7, capture=1) is not None
