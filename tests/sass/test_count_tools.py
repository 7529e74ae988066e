"""Counting instructions by opcode, and comparing two countings."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fake_backend import run_tool
from listing_files import SEVERAL, V1, code_sizes, run_nvidia

from flash_helpers.sass.analyse.counts import Bucket
from flash_helpers.sass.read.listing import COUNT_COLUMNS
from flash_helpers.sass.read.records import SassError
from flash_helpers.sass.show.count_comparison import (
    Change,
    compare_counts,
    comparison_as_csv,
    comparison_as_json,
    comparison_as_text,
)
from flash_helpers.sass.show.listing_counts import (
    OpcodeCounts,
    counts_as_csv,
    counts_as_json,
    counts_as_text,
    load_counts,
)

pytestmark = pytest.mark.slow

COUNT = "tools/analysis/count_sass_instructions.sh"
COMPARE = "tools/analysis/compare_sass_instruction_counts.py"

# One function with each bucket: a NOP that is run, filler of both kinds, and padding.
SMALL = """\
        .target sm_90
        .section        .text.small,"ax",@progbits
        /*0000*/                   LDS.128 R4, [R2] ;
        /*0010*/                   NOP ;
        /*0020*/              @!PT LDS RZ, [RZ] ;
        /*0030*/             @!UPT UIADD3 URZ, URZ, URZ, URZ ;
        /*0040*/               @P0 LDS R4, [R2] ;
        /*0050*/               @PT MOV R1, R2 ;
        /*0060*/                   EXIT ;
.L_x_0:
        /*0070*/                   BRA `(.L_x_0);
        /*0080*/                   NOP;
        /*0090*/                   NOP;
"""


@pytest.fixture
def small(tmp_path) -> Path:
    """The listing SMALL."""
    path = tmp_path / "small.sass"
    path.write_text(SMALL)
    return path


def run_script(*arguments: str | Path, stdin: str = "", python: str = sys.executable):
    """count_sass_instructions.sh, as a user runs it."""
    return subprocess.run(
        [Path(__file__).parents[2] / COUNT, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": python},
    )


def total(counts: OpcodeCounts) -> int:
    return sum(counted.total() for counted in counts.by_bucket.values())


def bare(**opcodes: int) -> OpcodeCounts:
    return OpcodeCounts(Counter(opcodes), None)


class TestBuckets:
    def test_of_a_listing_that_has_them_all(self, small) -> None:
        counts = load_counts(small)
        assert counts.by_bucket == {
            Bucket.EXECUTED: {"LDS.128": 1, "NOP": 1, "MOV": 1, "EXIT": 1},
            Bucket.PREDICATED: {"LDS": 1},
            Bucket.FILLER: {"LDS": 1, "UIADD3": 1},
            Bucket.PADDING: {"BRA": 1, "NOP": 2},
        }
        assert counts.work == {"LDS.128": 1, "NOP": 1, "MOV": 1, "EXIT": 1, "LDS": 1}
        base = counts.base()
        assert (base.work["LDS"], base.by_bucket[Bucket.EXECUTED]["LDS"]) == (2, 1)

    def test_add_up_to_the_size_of_the_code(self, cubins) -> None:
        for cubin in cubins.values():
            counts, sizes = load_counts(cubin), code_sizes(cubin)
            assert total(counts) == sum(sizes.values())
            assert counts.functions == len(sizes)
            # each of these kernels ends with a jump to itself, and nothing else does
            assert counts.by_bucket[Bucket.PADDING]["BRA"] == len(sizes)

    def test_of_machine_code_and_of_its_listings_are_the_same(self, v1, tmp_path) -> None:
        counts = load_counts(v1)
        assert counts.compiler.startswith("ptxas ")
        for program, option in (("nvdisasm", "-c"), ("cuobjdump", "-sass")):
            path = tmp_path / program
            path.write_text(run_nvidia(program, option, v1))
            listed = load_counts(path)
            assert (listed.work, listed.by_bucket) == (counts.work, counts.by_bucket)
        # a naive count of the text differs by filler and padding
        text = path.read_text()
        naive = Counter(re.findall(r"/\*\w{4}\*/ +(?:@\S+ )? *([A-Z][\w.]*)", text))
        filler, padding = (counts.by_bucket[kind] for kind in (Bucket.FILLER, Bucket.PADDING))
        assert filler.total() > 0 and padding.total() > 0
        assert naive - filler - padding == counts.work
        assert text.count("@!PT") + text.count("@!UPT") == filler.total()


class TestChoice:
    def test_of_a_function_by_its_symbol_or_a_part_of_it(self, cubins) -> None:
        size = code_sizes(cubins["sm_80"])["_Z6sharesPfi"]
        for name in ("_Z6sharesPfi", "shares"):
            assert total(load_counts(cubins["sm_80"], name)) == size

    def test_of_a_kernel_of_the_library_by_its_short_form(self, v1, package) -> None:
        architecture = v1.name.split(".")[-2]
        library = package / "libflash_attention.so"
        assert load_counts(library, V1, architecture) == load_counts(v1)

    def test_of_an_architecture_is_needed_where_there_are_several(self, cubins, tmp_path) -> None:
        listing = tmp_path / "both.sass"
        listing.write_text(run_nvidia("cuobjdump", "-sass", SEVERAL))
        for path in (SEVERAL, listing):
            with pytest.raises(SassError, match="code for sm_80, sm_90: choose one with --arch"):
                load_counts(path)
            assert load_counts(path, architecture="sm_90").work == load_counts(cubins["sm_90"]).work
            with pytest.raises(SassError, match="4 such kernels: name one of "):
                load_counts(path, "Pfi", "sm_80")
            with pytest.raises(SassError, match="no kernel 'nix', only calls, shares, spills"):
                load_counts(path, "nix", "sm_80")

    def test_does_not_go_with_counts(self, tmp_path) -> None:
        path = tmp_path / "counts.txt"
        path.write_text("1 NOP\n")
        with pytest.raises(SassError, match="a file of counts, which tells no function"):
            load_counts(path, "k")


class TestTable:
    def test_has_most_work_first_and_totals_last(self, small) -> None:
        lines = counts_as_text(load_counts(small)).splitlines()
        assert lines[0].split() == [*COUNT_COLUMNS, "opcode"]
        numbers = [int(line.split()[0]) for line in lines[2:-1]]
        assert numbers == sorted(numbers, reverse=True)
        assert lines[-1].split() == ["5", "4", "1", "2", "3", "total"]

    def test_can_be_read_back(self, small, v1, tmp_path) -> None:
        kept = tmp_path / "kept.txt"
        for path in (small, v1):
            counts = load_counts(path)
            kept.write_text(counts_as_text(counts) + "\n")
            again = load_counts(kept)
            assert (again.work, again.by_bucket) == (counts.work, counts.by_bucket)
            kept.write_text(counts_as_text(OpcodeCounts(counts.work, None)) + "\n")
            assert load_counts(kept).work == counts.work

    def test_as_csv_and_json_holds_the_same(self, small) -> None:
        counts = load_counts(small)
        rows = list(csv.DictReader(io.StringIO(counts_as_csv(counts))))
        document = json.loads(counts_as_json(counts))
        assert [{k: str(v) for k, v in item.items()} for item in document["opcodes"]] == rows
        assert sum(int(row["padding"]) for row in rows) == document["total"]["padding"] == 3


class TestScript:
    def test_counts_files_and_pipes(self, small) -> None:
        for arguments, stdin in (([small], ""), (["-"], SMALL)):
            for option, as_text in ((), counts_as_text), (("--base", "--csv"), counts_as_csv):
                result = run_script(*arguments, *option, stdin=stdin)
                assert (result.returncode, result.stderr) == (0, "")
                counts = load_counts(small)
                wanted = as_text(counts.base() if option else counts)
                assert result.stdout.rstrip("\n") == wanted.rstrip("\n")

    def test_counts_machine_code(self, cubins) -> None:
        result = run_script(SEVERAL, "--arch", "sm_80", "--function", "shares", "--json")
        assert result.returncode == 0
        found = json.loads(result.stdout)["total"]
        size = code_sizes(cubins["sm_80"])["_Z6sharesPfi"]
        assert sum(found[kind.value] for kind in Bucket) == size

    def test_says_when_its_package_is_missing(self, small) -> None:
        result = run_script(small, python="/bin/false")
        assert result.returncode == 2
        assert "pip install ./py" in result.stderr


class TestComparison:
    BEFORE = bare(HMMA=128, MOV=10, IADD3=40, LDS=7)
    AFTER = bare(HMMA=128, MOV=16, IADD3=20, LEA=3)

    def test_has_the_largest_change_first(self) -> None:
        comparison = compare_counts(self.BEFORE, self.AFTER)
        assert comparison.changes == (
            Change("IADD3", 40, 20),
            Change("LDS", 7, 0),
            Change("MOV", 10, 16),
            Change("LEA", 0, 3),
            Change("HMMA", 128, 128),
        )
        assert comparison.total == Change("total", 185, 167)

    def test_shows_what_changed_and_sums_it_up(self) -> None:
        lines = comparison_as_text(compare_counts(self.BEFORE, self.AFTER)).splitlines()
        cells = [line.split() for line in lines[2:7]]
        assert cells == [
            ["IADD3", "40", "20", "-20", "-50.0%"],
            ["LDS", "7", "0", "-7", "-100.0%"],
            ["MOV", "10", "16", "+6", "+60.0%"],
            ["LEA", "0", "3", "+3", "new"],
            ["total", "185", "167", "-18", "-9.7%"],
        ]
        assert lines[-1] == "185 -> 167 instructions (-18, -9.7%); 4 of 5 opcodes changed"

        text = comparison_as_text(compare_counts(self.BEFORE, self.AFTER), unchanged=True)
        assert ["HMMA", "128", "128", "="] in [line.split() for line in text.splitlines()]
        text = comparison_as_text(compare_counts(self.BEFORE, self.BEFORE))
        assert text == "185 -> 185 instructions (+0, +0.0%); 0 of 4 opcodes changed"

    def test_for_machines_holds_the_same(self) -> None:
        comparison = compare_counts(self.BEFORE, self.AFTER)
        rows = list(csv.DictReader(io.StringIO(comparison_as_csv(comparison, unchanged=True))))
        document = json.loads(comparison_as_json(comparison, unchanged=True))
        assert [row["opcode"] for row in rows] == [c.opcode for c in comparison.changes]
        assert [int(row["delta"]) for row in rows] == [o["delta"] for o in document["opcodes"]]
        assert document["total"]["delta"] == -18

    def test_tells_the_buckets_where_both_sides_know_them(self, small) -> None:
        counts = load_counts(small)
        summary = compare_counts(counts, counts).summary()
        assert "executed 4 -> 4, predicated 1 -> 1, filler 2 -> 2, padding 3 -> 3" in summary

    def test_warns_of_bare_counts_beside_others(self, small) -> None:
        counts = load_counts(small)
        assert "BEFORE is a file of bare counts" in compare_counts(self.BEFORE, counts).notes()[0]
        assert "AFTER is a file of bare counts" in compare_counts(counts, self.BEFORE).notes()[0]
        assert not compare_counts(self.BEFORE, self.AFTER).notes()

    def test_warns_of_two_compilers(self) -> None:
        old, new = (OpcodeCounts(Counter(), None, 1, f"ptxas {n}") for n in ("12.4.131", "13.0.88"))
        (note,) = compare_counts(old, new).notes()
        assert "ptxas 12.4.131 and ptxas 13.0.88" in note
        assert not compare_counts(new, new).notes()


class TestCompareTool:
    @pytest.fixture
    def kept(self, tmp_path) -> Path:
        """Counts as sort | uniq -c prints them."""
        path = tmp_path / "kept.txt"
        path.write_text("   7 LDS.128\n   2 MOV\n")
        return path

    def test_compares_counts_with_a_listing(self, capsys, kept, small) -> None:
        status, out, _ = run_tool(capsys, COMPARE, kept, small)
        assert status == 0
        assert out.splitlines()[2].split() == ["LDS.128", "7", "1", "-6", "-85.7%"]
        assert "BEFORE is a file of bare counts" in out

    def test_compares_machine_code(self, capsys, cubins) -> None:
        status, out, _ = run_tool(
            capsys, COMPARE, cubins["sm_80"], cubins["sm_90"], "--base", "--all"
        )
        assert status == 0
        before, after = (load_counts(path).work.total() for path in cubins.values())
        assert f"{before:,} -> {after:,} instructions" in out

    def test_prints_for_machines_and_pages(self, capsys, kept, small) -> None:
        _, out, _ = run_tool(capsys, COMPARE, kept, small, "--markdown")
        assert out.startswith("| opcode")
        assert out.splitlines()[1] == "| :-- | --: | --: | --: | --: |"
        _, out, _ = run_tool(capsys, COMPARE, kept, small, "--csv")
        assert out.splitlines()[:2] == [
            "opcode,before,after,delta,percent",
            f"LDS.128,7,1,-6,{-600 / 7}",
        ]
        _, out, _ = run_tool(capsys, COMPARE, kept, small, "--json")
        assert json.loads(out)["total"]["before"] == 9
