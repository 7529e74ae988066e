"""The mbarrier object by itself: phases, counts, waits, and what is undefined; test_arrivals.py has
the parities and arrivals that the instructions refuse."""

import numpy as np
import pytest

from flash_helpers.ptx.run.asynchronous.mbarriers import (
    MOST,
    Mbarrier,
    MbarrierMisuse,
    pending_count,
)

ADDRESS = 0x40


def mbarrier(count=2) -> Mbarrier:
    return Mbarrier(ADDRESS, count)


def misuse(message):
    return pytest.raises(MbarrierMisuse, match=message)


def counts(barrier):
    return barrier.phase, barrier.pending, barrier.transactions


# The count of arrivals; each deed with its number, and (phase, pending arrivals, bytes) after it.
PHASES = {
    "the last arrival completes the phase": (2, [
        ("arrive", 1, (0, 1, 0)), ("arrive", 1, (1, 2, 0)),
    ]),
    "an arrival may count for several": (128, [
        ("arrive", 96, (0, 32, 0)), ("arrive", 32, (1, 128, 0)),
    ]),
    "bytes must come too": (1, [
        ("expect", 4096, (0, 1, 4096)), ("arrive", 1, (0, 0, 4096)),
        ("complete", 1024, (0, 0, 3072)), ("complete", 3072, (1, 1, 0)),
    ]),
    "bytes may come before they are expected": (1, [
        ("complete", 512, (0, 1, -512)), ("expect", 512, (0, 1, 0)), ("arrive", 1, (1, 1, 0)),
    ]),
    "bytes that nobody expected hold the phase open": (1, [
        ("complete", 512, (0, 1, -512)), ("arrive", 1, (0, 0, -512)), ("expect", 512, (1, 1, 0)),
    ]),
}  # fmt: skip


class TestPhases:
    @pytest.mark.parametrize(("count", "deeds"), PHASES.values(), ids=PHASES)
    def test_end_when_all_has_come(self, count, deeds):
        barrier = mbarrier(count)
        for name, number, expected in deeds:
            getattr(barrier, name)(number)
            assert counts(barrier) == expected

    def test_a_thread_that_drops_out_is_expected_no_more(self):
        barrier = mbarrier(3)
        barrier.arrive(drops=True)
        barrier.arrive(2)
        assert (barrier.phase, barrier.expected, barrier.pending) == (1, 2, 2)

    def test_an_asynchronous_arrival_may_add_itself(self):
        barrier = mbarrier(1)
        barrier.add_pending()
        barrier.arrive()
        assert counts(barrier) == (0, 1, 0)
        barrier.arrive()
        assert counts(barrier) == (1, 1, 0)

    def test_what_arrivals_release_is_handed_over_by_the_phase(self):
        barrier = mbarrier(1)
        barrier.expect(64)
        barrier.arrive(1, "first")
        assert (barrier.released, barrier.arrived) == ([], ["first"])
        barrier.complete(64, "bytes")
        assert (barrier.released, barrier.arrived) == (["first", "bytes"], [])
        barrier.observe()
        barrier.arrive(1, "second")
        assert barrier.released == ["first", "bytes", "second"]


class TestWaits:
    def test_parity_of_a_fresh_object(self):
        """Parity 1 passes at once: it is that of the phase before the first."""
        barrier = mbarrier(1)
        assert not barrier.is_complete_parity(0)
        assert barrier.is_complete_parity(1)

    def test_parity_alternates(self):
        barrier = mbarrier(1)
        for phase in range(5):
            assert not barrier.is_complete_parity(phase % 2)
            barrier.arrive()
            assert barrier.is_complete_parity(phase % 2)
            assert not barrier.is_complete_parity(1 - phase % 2)
            barrier.observe()

    def test_state(self):
        barrier = mbarrier()
        state = barrier.state
        barrier.arrive()
        later = barrier.state
        assert not barrier.is_complete(state) and not barrier.is_complete(later)
        assert pending_count(np.array([state, later], np.uint64)).tolist() == [2, 1]
        barrier.arrive()
        assert barrier.is_complete(state) and barrier.is_complete(later)

    def test_a_state_outlives_one_phase_only(self):
        barrier = mbarrier(1)
        state = barrier.state
        barrier.arrive()
        assert barrier.is_complete(state)
        barrier.observe()
        barrier.arrive()
        with misuse("the state of phase 0, which is neither the current phase 2 nor the one"):
            barrier.is_complete(state)

    def test_the_state_of_another_object(self):
        with misuse("is not one that an arrival here returned"):
            mbarrier().is_complete(Mbarrier(ADDRESS + 8, 2).state)


class TestLimits:
    """ "Contents of the mbarrier object": the range of each count."""

    @pytest.mark.parametrize("count", [0, MOST + 1])
    def test_of_arrivals(self, count):
        with misuse(f"a count of {count} arrivals: give 1 to 1048575"):
            mbarrier(count)
        with misuse(f"a count of {count} arrivals"):
            mbarrier().arrive(count)

    def test_most_arrivals(self):
        barrier = mbarrier(MOST)
        with misuse("more than 1048575 pending"):
            barrier.add_pending()
        barrier.arrive(MOST)
        assert counts(barrier) == (1, MOST, 0)

    def test_of_bytes(self):
        barrier = mbarrier()
        barrier.expect(MOST)
        with misuse("16 bytes expected besides 1048575: a tx-count is at most"):
            barrier.expect(16)
        barrier.complete(MOST)
        barrier.complete(MOST)
        with misuse("16 bytes come where -1048575 are expected"):
            barrier.complete(16)
        assert counts(barrier) == (0, 2, -MOST)


class TestMisuse:
    def test_more_arrivals_than_expected(self):
        barrier = mbarrier()
        with misuse("3 arrivals where the current phase waits for 2 of 2"):
            barrier.arrive(3)
        assert counts(barrier) == (0, 2, 0)

    def test_an_arrival_while_only_bytes_are_missing(self):
        barrier = mbarrier(1)
        barrier.expect(64)
        barrier.arrive()
        with misuse("1 arrival where the current phase waits for 0 of 1"):
            barrier.arrive()

    def test_an_arrival_in_a_phase_whose_predecessor_nobody_saw_complete(self):
        barrier = mbarrier(1)
        barrier.arrive()
        with misuse("an arrival in phase 1 before any thread has seen phase 0 complete"):
            barrier.arrive()
        barrier.observe()
        barrier.arrive()
        assert barrier.phase == 2

    def test_dropping_more_than_there_are(self):
        barrier = mbarrier(1)
        barrier.add_pending()
        with misuse("2 arrivals dropped where later phases expect 1"):
            barrier.arrive(2, drops=True)


class TestWords:
    def test_an_object_says_where_it_stands(self):
        barrier = mbarrier()
        stands = "mbarrier at 0x40: phase 0 (parity 0) waits for"
        assert str(barrier) == f"{stands} 2 of 2 arrivals"
        barrier.expect(4096)
        barrier.arrive()
        barrier.complete(1024)
        came = "(4096 expected, 1024 came)"
        assert str(barrier) == f"{stands} 1 of 2 arrivals and 3072 bytes {came}"
