"""Reading listings: every format says the same, and what is no listing is refused."""

import random
import re

import pytest
from listing_files import (
    LIVE_FORMATS,
    NVDISASM_FORMATS,
    SEVERAL,
    Row,
    code_sizes,
    extract,
    from_json,
    in_order,
    listing,
    rows_of,
    run_nvidia,
)

from flash_helpers.sass.read.listing import (
    COUNT_COLUMNS,
    counts_in_text,
    decode,
    is_counts,
    parse_listing,
)
from flash_helpers.sass.read.records import SassError

pytestmark = pytest.mark.slow

JUMPS = ("BRA", "CALL")


def without_targets(rows: list[Row]) -> list[Row]:
    """Rows with jump targets, which are labels or addresses, replaced by their guards alone."""
    return [
        (function, guard, opcode, re.sub(r"`\([^)]*\)|(?<![\w.])0x[0-9a-f]+$", "TARGET", operands))
        for function, guard, opcode, operands in rows
    ]


class TestFormats:
    def test_have_as_many_instructions_as_the_sections_are_long(self, cubin) -> None:
        functions = parse_listing(listing(cubin, "-c"), "listing")
        assert {f.name: len(f.operations) for f in functions} == code_sizes(cubin)
        assert {f.architecture for f in functions} == {"sm_80"}

    def test_agree_with_what_the_disassembler_says_in_json(self, cubin) -> None:
        expected = sorted((i.function, i.predicate, i.opcode) for i in from_json(cubin))
        text = listing(cubin, "-c")
        rows = rows_of(text)
        assert sorted(row[:3] for row in rows) == expected
        assert {row[1] for row in rows} >= {"", "@P0", "@!P0", "@!P1"}
        assert '(*"SpillRefill"*)' in text and not [row for row in rows if "(*" in row[3]]

    @pytest.mark.parametrize("options", NVDISASM_FORMATS.values(), ids=NVDISASM_FORMATS)
    def test_of_nvdisasm_all_say_the_same(self, cubin, v1, options) -> None:
        for file in (cubin, v1):
            assert rows_of(listing(file, *options)) == rows_of(listing(file, "-c"))

    @pytest.mark.parametrize("options", LIVE_FORMATS.values(), ids=LIVE_FORMATS)
    def test_with_live_registers_only_lack_nops_at_the_end(self, cubin, options) -> None:
        shown = {f.name: f.operations for f in parse_listing(listing(cubin, *options), "x")}
        for function in parse_listing(listing(cubin, "-c"), "x"):
            number = len(shown[function.name])
            assert shown[function.name] == function.operations[:number]
            assert {o.opcode for o in function.operations[number:]} <= {"NOP"}

    def test_of_cuobjdump_say_the_same_but_for_targets(self, cubin) -> None:
        dumped = in_order(rows_of(run_nvidia("cuobjdump", "-sass", cubin)))
        listed = in_order(rows_of(listing(cubin, "-c")))
        assert without_targets(dumped) == without_targets(listed)

    def test_of_cuobjdump_tell_architectures_apart(self, tmp_path) -> None:
        functions = parse_listing(run_nvidia("cuobjdump", "-sass", SEVERAL), "listing")
        found = {(f.architecture, f.name): len(f.operations) for f in functions}
        cubins = {path.name.split(".")[-2]: path for path in extract(SEVERAL, "all", tmp_path)}
        assert cubins.keys() == {"sm_80", "sm_90"}
        assert found == {
            (architecture, name): size
            for architecture, path in cubins.items()
            for name, size in code_sizes(path).items()
        }

    @pytest.mark.parametrize("program", ["nvdisasm", "cuobjdump"])
    def test_tell_where_jumps_go(self, cubin, program) -> None:
        options = ["-c"] if program == "nvdisasm" else ["-sass"]
        functions = parse_listing(run_nvidia(program, *options, cubin), "listing")
        jumps = [
            (f.name, o.opcode, o.target) for f in functions for o in f.operations if o.base in JUMPS
        ]
        # in JSON the last operand is the address, or the name of what is called
        expected = [
            (i.function, i.opcode, i.operands.rpartition(",")[2])
            for i in from_json(cubin)
            if i.opcode.partition(".")[0] in JUMPS
        ]
        assert len(expected) > 20
        for found, wanted in zip(
            sorted(jumps, key=lambda jump: jump[0]),
            sorted(expected, key=lambda jump: jump[0]),
            strict=True,
        ):
            assert found[:2] == wanted[:2]
            if wanted[2].startswith("0x"):
                assert found[2] == int(wanted[2], 16)

    def test_may_be_a_part_of_one(self, cubin) -> None:
        lines = listing(cubin, "-c").splitlines()
        part = [line for line in lines if "/*01" in line][:16]
        (function,) = parse_listing("\n".join(part), "part")
        assert (function.name, function.architecture) == ("", "")
        assert function.operations[0].address == 0x100


class TestRefusal:
    def refused(self, text: str) -> str:
        with pytest.raises(SassError) as error:
            parse_listing(decode(text.encode(), "FILE"), "FILE")
        return str(error.value)

    @pytest.mark.parametrize("options", [("-json",), ("-cfg",), ("-bbcfg", "-poff")])
    def test_of_what_else_the_disassembler_prints(self, cubin, options) -> None:
        assert "readable are" in self.refused(listing(cubin, *options))

    def test_of_other_languages(self, root, package) -> None:
        ptx = next((package / "ptx").glob("v1_*.ptx")).read_text()
        assert "is PTX, not a listing of SASS" in self.refused(ptx)
        kernel = (root / "src/include/forward_kernel.cuh").read_text()
        assert "is CUDA C++, not a listing of SASS" in self.refused(kernel)
        assert "readable are" in self.refused((root / "README.md").read_text())

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "FILE holds no SASS"),
            (" \n\r\n", "FILE holds no SASS"),
            ("\x7fELF", "FILE is an object file"),
            ("a\0b", "FILE holds bytes that no listing does; readable are"),
            # prose
            ("WARNING: NVIDIA H100 80GB; clock 1732 MHz\n", "holds no SASS"),
            # a line that is cut off, which is quoted
            (
                "        /*0000*/   NOP ;\n        /*0010*/              @!P0 BRA `(.L_x_",
                "FILE line 2: not an instruction, or one that is cut off: '/*0010*/",
            ),
            ("/*0008*/ MOV R1, c[0x0][0x20] ;", "sm_70 and later"),
            ("/*0000*/ NOP ;\n/*0010*/ EXIT ;\n/*0000*/ NOP ;", "line 3: address 0x0 comes again"),
            ("/*0000*/ NOP ;\nMOV R1, R2 ; and more", "line 2"),
            # huge lines
            *(
                (f"/*0000*/ {line}", "readable are")
                for line in ("NOP" + " " * 10**6 + "x", "A" * 10**6, "/*0000*/ " + "@P0 " * 10**5,
                             '(*"' * 10**5)
            ),
        ],
        ids=range(13),
    )  # fmt: skip
    def test_tells_why(self, text: str, message: str) -> None:
        assert message in self.refused(text)


class TestDamage:
    @pytest.mark.parametrize("options", [("-c",), ("-c", "-hex"), ("-c", "-hex", "-plr")])
    def test_a_listing_that_breaks_off_is_refused_or_read_so_far(self, cubin, options) -> None:
        text = listing(cubin, *options)
        rows = rows_of(text)
        numbers = random.Random(0)
        n_refused = 0
        for _ in range(60):
            cut = text[: numbers.randrange(len(text))]
            try:
                found = rows_of(cut)
            except SassError:
                n_refused += 1
                continue
            assert found == rows[: len(found)]
            assert len(found) == len(re.findall(r"/\*[0-9a-f]+\*/[^;\n]*;", cut))
        assert n_refused

    def test_a_listing_with_other_bytes_is_read_or_refused(self, cubin) -> None:
        data = listing(cubin, "-c", "-hex").encode()[:20000]
        numbers = random.Random(0)
        for _ in range(300):
            damaged = bytearray(data)
            for _ in range(numbers.randrange(1, 20)):
                damaged[numbers.randrange(len(damaged))] = numbers.randrange(256)
            try:
                rows_of(decode(bytes(damaged), "listing"))
            except SassError as error:
                assert "\n" not in str(error)


class TestCounts:
    @pytest.mark.parametrize(
        ("text", "counts"),
        [
            (
                "    128 HMMA.16816.F32\n      3 BRA\n\n      1 EXIT;\n",
                {"HMMA.16816.F32": 128, "BRA": 3, "EXIT": 1},
            ),
            ("1 NOP\n2 NOP\n", {"NOP": 3}),
            ("# made from v1\n1 NOP\n", {"NOP": 1}),
        ],
    )
    def test_are_lines_as_uniq_prints_them(self, text: str, counts: dict[str, int]) -> None:
        assert is_counts(text)
        assert counts_in_text(text, "FILE") == {"count": counts}

    def test_may_have_a_column_for_each_bucket(self) -> None:
        text = (
            "  ".join([*COUNT_COLUMNS, "opcode"]) + "\n---- ---\n5 3 2 1 0 LDS\n5 3 2 1 0 total\n"
        )
        assert is_counts(text)
        found = counts_in_text(text, "FILE")
        assert {column: counted["LDS"] for column, counted in found.items()} == dict(
            zip(COUNT_COLUMNS, (5, 3, 2, 1, 0), strict=True)
        )

    @pytest.mark.parametrize(
        "line", ["2 @P0 BRA", "two BRA", "-1 BRA", "2 bra", "BRA", "1 2 3 BRA", "²  BRA", "2 ½"]
    )
    def test_of_anything_else_are_refused(self, line) -> None:
        with pytest.raises(SassError, match=r"FILE: .* is no count of"):
            counts_in_text(f"1 NOP\n{line}\n", "FILE")

    def test_are_not_taken_for_a_listing(self, cubin) -> None:
        assert not is_counts(listing(cubin, "-c"))
        assert not is_counts("")
