"""Messages are short, name what their reader wrote, and say what to do."""

import re

import numpy as np
import pytest
from ptx_snippets import entry

from flash_helpers.console.symbols import demangled, short_name
from flash_helpers.ptx import (
    DeviceMemory,
    LaunchError,
    RaceError,
    RepeatedWorkLint,
    SimulatorError,
    load_ptx,
)
from flash_helpers.ptx.errors import MOST_CHARACTERS, MOST_LINES, Site, Thread
from flash_helpers.ptx.read.module import Location

DECLARATIONS = """
.reg .pred %p, %q;
.reg .b32 %r<20>;
.reg .b64 %rd<8>;
.shared .align 128 .b8 tile[1024];
.shared .align 8 .b64 bar;
"""
START = """
ld.param.u64 %rd0, [p];
cvta.to.global.u64 %rd1, %rd0;
mov.u32 %r0, %tid.x;
shl.b32 %r1, %r0, 2;
mov.u32 %r2, tile;
add.u32 %r3, %r2, %r1;
setp.eq.u32 %p, %r0, 0;
"""


def run(body, threads=32, **options):
    """Runs the body after START; %rd1 points to 1024 bytes."""
    memory = DeviceMemory()
    address = memory.upload(np.zeros(1024, np.uint8))
    text = entry(START + body, ".param .u64 p", DECLARATIONS, '.file 1 "k.cu"\n')
    text = text.replace("sm_80", "sm_90a")
    return load_ptx(text).kernel("k").launch(1, threads, args=[address], memory=memory, **options)


def fault(body, **options) -> SimulatorError:
    with pytest.raises(SimulatorError) as caught:
        run(body, **options)
    return caught.value


# -- names -------------------------------------------------------------------------------------


def mangled(depth: int) -> str:
    """k<a<a<…a<int>…>>(int)"""
    return f"_Z1kI{'1aI' * depth}i{'E' * depth}EvT_"


@pytest.mark.parametrize(
    ("symbol", "most", "short"),
    [
        ("plain", 100, "plain"),
        ("_Z1kILi3EfEvPT0_", 100, "k<3, float>"),
        ("_ZN12_GLOBAL__N_11kEPf", 100, "(anonymous namespace)::k"),
        ("_ZN2ns4copyIL5DType1EEEvi", 100, "ns::copy<(DType)1>"),
        (mangled(2), 100, "k<a<a<int> > >"),
        (mangled(40), 30, "k<a<a<a<a<…> > > > >"),
        (mangled(40), 17, "k<a<a<a<…> > > >"),
        (mangled(40), 8, "k<a<…> >"),
        (mangled(40), 5, "k<…>"),
        ("x" * 50, 10, "xxxx…xxxxx"),
    ],
)
def test_a_name_loses_its_parameters_and_the_innermost_arguments(symbol, most, short) -> None:
    assert short_name(symbol, most) == short and len(short) <= most


def test_kernels_of_a_file_are_listed_within_ten_lines() -> None:
    symbols = [mangled(40).replace("1k", f"3k{i:02}") for i in range(30)]
    assert len(demangled(symbols[0])) > 120
    text = entry("", "", "")
    head, kernel = text[: text.index(".visible")], text[text.index(".visible") :]
    module = load_ptx(head + "".join(kernel.replace(" k(", f" {s}(") for s in symbols))
    with pytest.raises(LaunchError) as caught:
        module.kernel("other")
    lines = str(caught.value).splitlines()
    assert len(lines) == 12 and max(map(len, lines)) < 120 and lines[-1] == "  … 20 more"


# -- lines of source ---------------------------------------------------------------------------


def chain(*files: str) -> Location:
    location = None
    for i, file in reversed(list(enumerate(files))):
        location = Location(file, i, 1, location)
    assert location is not None
    return location


LIBRARY = "/opt/lib/include/lib/copy.hpp"


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (["k.cu"], "k.cu:0"),
        (["k.cu", "k.cu"], "k.cu:0, inlined at k.cu:1"),
        (
            [*11 * [LIBRARY], "k.cu", "k.cu"],
            f"{LIBRARY}:0, … 10 more, inlined at k.cu:11, inlined at k.cu:12",
        ),
        (
            [LIBRARY, "include/a.cuh", "k.cu"],
            f"{LIBRARY}:0, inlined at include/a.cuh:1, inlined at k.cu:2",
        ),
        (12 * [LIBRARY], f"{LIBRARY}:0, … 10 more, inlined at {LIBRARY}:11"),
        (
            12 * ["k.cu"],
            "k.cu:0, inlined at k.cu:1, inlined at k.cu:2, inlined at k.cu:3, … 6 more, "
            "inlined at k.cu:10, inlined at k.cu:11",
        ),
    ],
)
def test_inlined_calls_are_cut_to_those_that_the_reader_wrote(files, shown) -> None:
    assert str(chain(*files)) == shown


@pytest.mark.parametrize(
    ("source", "brief"),
    [
        (None, "PTX line 7"),
        ("k.cu:1", "k.cu:1"),
        ("include/a:1, … 3 more, inlined at k.cu:2", "k.cu:2"),
        (
            "include/a:1, inlined at k.cu:3, inlined at include/b:2, inlined at k.cu:9",
            "k.cu:3, inlined at k.cu:9",
        ),
        ("include/a:1, inlined at include/b:2", "include/a:1, inlined at include/b:2"),
    ],
)
def test_a_message_that_names_many_places_names_each_briefly(source, brief) -> None:
    assert Site("k", 7, "bar.sync", source).brief == brief


# -- size --------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["x" * 100, "x" * 5000])
@pytest.mark.parametrize("lines", [1, 9, 200])
def test_a_message_is_at_most_15_lines_and_1200_characters(line, lines) -> None:
    site = Site(mangled(100), 7, "ld.shared.u32", f"{LIBRARY}:3, … 10 more, inlined at k.cu:12")
    error = RaceError("\n    ".join(lines * [line]), site, Thread((0, 0, 0), 1, 2), 16, 300)
    text = str(error)
    assert len(text.splitlines()) <= MOST_LINES == 15 and len(text) <= MOST_CHARACTERS == 1200
    assert text.startswith("shared-memory race: xxx") and text.endswith("address 0x10\n  300 times")
    assert "inlined at k.cu:12 [ld.shared.u32, PTX line 7] in k<a<a<" in text
    assert (text.count(line) == lines) == (lines * len(line) < 1000)
    told = re.search(r"… (\d+) more lines", text)
    assert (int(told[1]) if told else 0) == lines - text.count("\n    x") - 1


# -- one message per cause ---------------------------------------------------------------------


def unrolled(lines: str = "") -> str:
    """Forty reads of what other lanes have written, without a barrier."""
    reads = "".join(f"{lines}ld.shared.u32 %r4, [tile+{4 * i}];\n" for i in range(40))
    return f"st.shared.u32 [%r3], %r0;\n{reads}"


def test_an_unrolled_line_is_one_fault() -> None:
    (found,) = run(unrolled(".loc 1 7 1\n"), keep_going=True).faults
    assert str(found).endswith(f"  {32 * 31} times, on 32 lines of PTX")
    assert found.site.source == "k.cu:7"


def test_without_lines_of_source_the_rest_of_many_faults_is_counted() -> None:
    found = run(unrolled(), keep_going=True)
    assert len(found.faults) == 32
    report = found.report().splitlines()
    assert report[-1] == "shared-memory race: … 22 more, on 22 lines of PTX"
    assert sum(line.startswith("shared-memory race: read") for line in report) == 10


def test_two_instructions_of_one_line_are_two_faults() -> None:
    body = "st.shared.u32 [%r3], %r0;\nld.shared.u32 %r4, [tile];\nst.shared.u32 [tile], %r4;"
    body = f".loc 1 7 1\n{body}"
    found = run(body, keep_going=True).faults
    assert [fault.site.opcode for fault in found] == ["ld.shared.u32", "st.shared.u32"]


# -- one lane's work ---------------------------------------------------------------------------

INIT = "mbarrier.init.shared::cta.b64 [bar], 1;\n"
VISIBLE = "st.shared.u32 [%r3], %r0;\nfence.proxy.async;\nbar.warp.sync -1;\n"
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [tile], 128;\n"
REDUCE = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [tile], 128;\n"
CLOSE = "cp.async.bulk.commit_group;\n"
PREFETCH = "cp.async.bulk.prefetch.L2.global [%rd1], 128;\n"
LOAD = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%rd1], 128, [bar];"
)
ONE_BARRIER = f"@%p {INIT}bar.warp.sync -1;\n"


@pytest.mark.parametrize(
    ("body", "title"),
    [
        (INIT, "mbarrier misused: 32 lanes of this instruction make the same object: elect one"),
        (
            f"{ONE_BARRIER}mbarrier.inval.shared::cta.b64 [bar];",
            "mbarrier misused: 32 lanes of this instruction end the same object: elect one",
        ),
        (
            f"{ONE_BARRIER}mbarrier.arrive.shared::cta.b64 _, [bar];",
            "32 lanes of this instruction arrive: elect one, or count them",
        ),
        (
            f"{ONE_BARRIER}{LOAD}",
            "shared-memory race: write of shared address 0 by 32 copies in no order:\n"
            "    32 lanes of this instruction do the same: elect one",
        ),
    ],
)
def test_where_all_lanes_do_what_one_should_the_error_says_so(body, title) -> None:
    text = str(fault(body))
    assert title in text and "by block (0, 0, 0) warp 0 lane 0" in text


def test_one_lane_of_each_of_several_warps_is_not_told_to_elect() -> None:
    one = "and.b32 %r4, %r0, 31;\nsetp.eq.u32 %q, %r4, 0;\n"
    text = str(fault(f"{one}@%q {INIT}", threads=128))
    assert "lanes of 4 warps of this instruction make the same object: choose one warp" in text
    arrive = "mbarrier.arrive.shared::cta.b64 _, [bar];"
    text = str(fault(f"{one}@%p {INIT}bar.sync 0;\n@%q {arrive}", threads=128))
    assert "4 arrivals where the current phase waits for 1 of 1" in text and "elect" not in text
    assert "32 lanes of this instruction arrive" in str(
        fault(f"@%p {INIT}bar.sync 0;\n{arrive}", threads=128)
    )


@pytest.mark.parametrize("body", [f"{STORE}{CLOSE}", f"{REDUCE}{CLOSE}", PREFETCH])
def test_where_all_lanes_copy_the_same_a_lint_says_so(body) -> None:
    wait = "cp.async.bulk.wait_group 0;"
    (lint,) = run(f"{VISIBLE}{body}{wait}", lints=True).lints
    assert type(lint) is RepeatedWorkLint
    assert lint.detail == "32 lanes of this instruction do the same: elect one"
    assert not run(f"{VISIBLE}@%p {body}{wait}", lints=True).lints
    assert not run(f"{VISIBLE}{body}{wait}").lints


def test_lanes_that_store_different_bytes_are_told_nothing() -> None:
    store = "cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r5], 16;\n"
    places = """
    and.b32 %r4, %r0, 7;
    shl.b32 %r4, %r4, 4;
    add.u32 %r5, %r2, %r4;
    cvt.u64.u32 %rd2, %r4;
    add.u64 %rd3, %rd1, %rd2;
    setp.lt.u32 %q, %r0, 8;
    """
    body = f"{VISIBLE}{places}@%q {store}{CLOSE}cp.async.bulk.wait_group 0;"
    assert not run(body, lints=True).lints
    (lint,) = run(body.replace("@%q", ""), lints=True).lints
    assert lint.count == 8 and lint.detail.startswith("4 lanes of this instruction do the same")


# -- waits without a commit --------------------------------------------------------------------

COPY = ".loc 1 1 1\ncp.async.ca.shared.global [%r3], [%rd1], 4;\n"
COMMIT = "cp.async.commit_group;\n"
WAIT = ".loc 1 5 1\ncp.async.wait_group {};\n.loc 1 9 1\n"
BULK_WAIT = ".loc 1 5 1\ncp.async.bulk.wait_group{} {};\n.loc 1 9 1\n"
READ = "ld.shared.u32 %r6, [%r3];"
OVERWRITE = "st.shared.u32 [%r3], 0;"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (COPY + READ, "its thread has not waited for it"),
        (
            COPY + WAIT.format(0) + READ,
            "no cp.async.commit_group stands between it and the wait at k.cu:5 ",
        ),
        (
            COPY + WAIT.format(0) + COMMIT + READ,
            "no cp.async.commit_group stands between it and the wait at k.cu:5 ",
        ),
        (
            COPY + COMMIT + WAIT.format(1) + READ,
            "the wait at k.cu:5 [cp.async.wait_group, PTX line {}]\n"
            "    leaves the newest group pending, and it is in one",
        ),
        (WAIT.format(0) + COPY + COMMIT + READ, "its thread has not waited for it"),
        (
            COPY + WAIT.format(0) + "st.global.u32 [%rd1], %r0;",
            "reads: no cp.async.commit_group stands between it and the wait at k.cu:5 ",
        ),
        (
            VISIBLE + "@%p " + STORE + BULK_WAIT.format(".read", 0) + "@%p " + OVERWRITE,
            "no cp.async.bulk.commit_group stands between it and the wait at k.cu:5 ",
        ),
        (
            VISIBLE + "@%p " + STORE + CLOSE + BULK_WAIT.format("", 2) + "@%p " + OVERWRITE,
            "leaves the newest 2 groups pending, and it is in one",
        ),
        (
            VISIBLE + "@%p " + STORE + BULK_WAIT.format("", 0) + "ld.global.u32 %r6, [%rd1];",
            "no cp.async.bulk.commit_group stands between it and the wait at k.cu:5 ",
        ),
        (
            VISIBLE
            + "@%p "
            + STORE
            + CLOSE
            + BULK_WAIT.format(".read", 0)
            + "ld.global.u32 %r6, [%rd1];",
            "waits for its reads of shared memory only (.read)",
        ),
        (
            VISIBLE + "@%p " + STORE + BULK_WAIT.format("", 0),
            "none of its threads has waited for it\n"
            "    no cp.async.bulk.commit_group stands between it and the wait at k.cu:5 ",
        ),
    ],
)
def test_a_wait_that_stands_there_and_misses_the_copy_is_told(body, why) -> None:
    text = re.sub(r"PTX line \d+", "PTX line {}", str(fault(body)))
    assert why in text
