"""Kernels read from files: each number is compared with what something else says of it."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sass_text import ARCHITECTURES, DEFAULT, WITH_TENSOR, kernels_of, parts_of
from tiers import ROOT

import flash_helpers.sass.read.reader as reader
from flash_helpers.compile.codegen import library_configs
from flash_helpers.compile.ptxas import PtxasReport, parse_ptxas_log
from flash_helpers.kernel_configs import Config, config_from_symbol, get_kernel_progression_configs
from flash_helpers.measure.machine_code import listed_configs, own_kernels
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.runtime.library import library_path
from flash_helpers.sass.read import flow, opcodes
from flash_helpers.sass.read.cache import DisassemblyCache
from flash_helpers.sass.read.containers import cubins_of, members_of
from flash_helpers.sass.read.cubin import read_cubin
from flash_helpers.sass.read.disassembler import find_disassembler
from flash_helpers.sass.read.disassembly import Batch, Disassembly, Request, batches, disassemble
from flash_helpers.sass.read.records import SassError

pytestmark = pytest.mark.slow

WITH_LOGS = [
    f"{name}.sm_{architecture}"
    for name in ("spills", "unrolled", "filler", "predicates", "several")
    for architecture in (80, 90)
]
OLD = ["old.sm_80", "old.sm_90"]
LIBRARY = library_configs(ROOT)
FEW = sorted({ARCHITECTURES[0], ARCHITECTURES[-1]})


def words(text: str) -> list[str]:
    """The words of an instruction, without hints such as (*"TARGET= .L_x_0"*)."""
    return re.sub(r'\(\*".*?"\*\)', "", text).replace(",", " ").split()


@pytest.fixture
def no_nvdisasm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disassembling fails, so that what succeeds came from the cache."""

    def fail(*_: object) -> None:
        raise AssertionError("nvdisasm was run")

    monkeypatch.setattr(reader, "disassemble", fail)


def ptxas_said(log: Path) -> dict[str, PtxasReport]:
    """The reports of `ptxas -v`, by kernel."""
    return {report.symbol: report for report in parse_ptxas_log(log.read_text())}


class TestResources:
    @pytest.mark.parametrize("name", [*WITH_LOGS, *OLD])
    def test_are_those_that_ptxas_printed(self, name, load, planted) -> None:
        said = ptxas_said(planted / f"{name}.log")
        kernels = load(f"{name}.cubin")
        assert sorted(said) == sorted(kernel.symbol for kernel in kernels)
        for kernel in kernels:
            expected, resources = said[kernel.symbol], kernel.resources
            assert resources.registers == expected.registers
            assert resources.static_smem_bytes == expected.smem_bytes
            assert resources.stack_bytes == expected.stack_bytes
            if name in WITH_LOGS:
                assert resources.barriers == expected.barriers
                assert resources.spill_store_bytes == expected.spill_store_bytes
                assert resources.spill_load_bytes == expected.spill_load_bytes

    def test_barriers_of_an_older_ptxas_are_those_of_the_source(self, load) -> None:
        for name in OLD:
            barriers = {k.symbol: k.resources.barriers for k in load(f"{name}.cubin")}
            assert barriers == {"divergent": 4, "nested": 1, "table": 0, "local_array": 0}

    def test_thread_bounds_are_those_of_the_source(self, load) -> None:
        bounds = {k.symbol: k.resources.max_threads for k in load("several.sm_90.cubin")}
        assert bounds == {"divergent": 128, "nested": None, "table": 64, "local_array": None}
        assert load("spills.sm_80.cubin")[0].resources.max_threads == 1024

    def test_local_memory_that_is_an_array(self, load) -> None:
        """32 ints are stored one by one and one is loaded: that is no spill."""
        (kernel,) = (k for k in load("several.sm_90.cubin") if k.symbol == "local_array")
        resources = kernel.resources
        assert (resources.stack_bytes, resources.spill_store_bytes) == (128, 0)
        assert resources.spill_load_bytes == 0
        bases = [i.base for i in kernel.instructions]
        assert (bases.count("STL"), bases.count("LDL")) == (32, 1)

    def test_spills_beside_an_array_are_told_apart_as_ptxas_does(self, load, planted) -> None:
        said = ptxas_said(planted / "ends.sm_90.log")["spills_beside_array"]
        (kernel,) = (k for k in load("ends.sm_90.cubin") if k.symbol == "spills_beside_array")
        stored = [i for i in kernel.instructions if i.base == "STL"]
        assert 0 < sum(not i.is_spill for i in stored) < len(stored)
        assert kernel.resources.spill_store_bytes == said.spill_store_bytes > 0
        assert kernel.resources.spill_load_bytes == said.spill_load_bytes

    def test_spills_are_unknown_where_the_compiler_does_not_mark_them(self, load) -> None:
        for name in OLD:
            for kernel in load(f"{name}.cubin"):
                found = kernel.resources.spill_store_bytes
                assert found == (None if kernel.symbol == "local_array" else 0)

    @pytest.mark.parametrize("name", ["ends12_9", "several12_9"])
    def test_spills_are_known_from_the_first_compiler_that_marks_them(self, name, load, planted):
        """Where that compiler marks none, an array in local memory is no spill."""
        said = ptxas_said(planted / f"{name}.sm_90.log")
        kernels = {kernel.symbol: kernel for kernel in load(f"{name}.sm_90.cubin")}
        for symbol, kernel in kernels.items():
            assert kernel.resources.spill_store_bytes == said[symbol].spill_store_bytes
            assert kernel.resources.spill_load_bytes == said[symbol].spill_load_bytes
        if name == "several12_9":
            stored = [i for i in kernels["local_array"].instructions if i.base == "STL"]
            assert stored
            assert not any(i.is_spill for i in stored)

    def test_shared_variables_count_before_they_are_linked(self, load) -> None:
        """Those of templates, inline functions and called functions, as the linker places them."""
        found = [
            {k.symbol: k.resources.static_smem_bytes for k in load(name) if not k.is_function}
            for name in ("shared.sm_90.cubin", "shared_linked.sm_90.cubin")
        ]
        expected = {"names_and_calls": 512 + 400 + 256, "owns": 3, "inlines_and_calls": 256 + 160}
        assert found == [expected, expected]

    def test_the_stack_of_recursion_is_unknown(self, load) -> None:
        stacks = {k.symbol: k.resources.stack_bytes for k in load("ends.sm_90.cubin")}
        assert stacks["recurses"] is None
        assert (stacks["breaks"], stacks["spills_beside_array"]) == (0, 320)


class TestInstructions:
    @pytest.mark.parametrize(
        "name",
        ["several.sm_80", "several.sm_90", "spills.sm_90", "predicates.sm_80", "filler.sm_80"],
    )
    def test_read_as_in_a_listing(self, name, load, planted, nvdisasm) -> None:
        """Text, encoding and the targets of jumps, which a listing prints as labels."""
        text = nvdisasm("-c", "-hex", planted / f"{name}.cubin")
        kernels = {kernel.symbol: kernel for kernel in load(f"{name}.cubin")}
        seen = Counter()
        for part in text.split(".section\t.text.")[1:]:
            kernel = kernels[part.partition(",")[0]]
            labels = {}
            waiting = []
            listed = []
            for line in part.splitlines():
                if match := re.match(r"([.$\w]+):", line):
                    waiting.append(match[1])
                elif match := re.match(
                    r"\s+/\*([0-9a-f]{4})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16})", line
                ):
                    address = int(match[1], 16)
                    labels.update(dict.fromkeys(waiting, address))
                    waiting.clear()
                    listed.append([address, match[2], int(match[3], 16)])
                elif match := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", line):
                    listed[-1][2] |= int(match[1], 16) << 64
            assert len(listed) == len(kernel.instructions)
            for (address, shown, encoding), i in zip(listed, kernel.instructions, strict=True):
                assert (i.address, i.encoding) == (address, encoding)
                label = re.search(r"`\(([^)]+)\)$", shown)
                if i.target is not None:
                    assert labels[label[1]] == i.target, i
                    seen[i.base] += 1
                elif label is None:
                    assert words(shown) == words(i.text), i
                    assert shown.count("], [") == i.text.count("], ["), i
        assert seen["BRA"]
        if name.startswith("several"):
            assert seen["CALL"]

    def test_packed_predicates_are_an_operand(self, load) -> None:
        """nvdisasm's JSON has them where the guard belongs."""
        (kernel,) = load("predicates.sm_90.cubin")
        packing = [i for i in kernel.instructions if i.base == "P2R"]
        assert packing
        for i in packing:
            assert i.predicate == ""
            assert i.operands.split(", ")[1] == "PR"

    def test_a_jump_table_has_no_target(self, load) -> None:
        (kernel,) = (k for k in load("several.sm_90.cubin") if k.symbol == "table")
        jumps = [i for i in kernel.instructions if i.base == "BRX"]
        assert jumps
        assert all(i.target is None for i in jumps)

    def test_compiler_is_as_noted(self, load) -> None:
        compiler = load("several.sm_90.cubin")[0].compiler
        assert (compiler.name, compiler.version) == ("ptxas", (13, 0, 88))
        assert "-lineinfo" in compiler.options
        assert str(load("old.sm_90.cubin")[0].compiler) == "ptxas 12.4"
        assert str(load("ends12_9.sm_90.cubin")[0].compiler) == "ptxas 12.9"


class TestAnalysis:
    def test_blocks_loops_pipes_and_costs_are_those_of_their_modules(self, load) -> None:
        for kernel in load("several.sm_80.cubin"):
            blocks, loops = flow.control_flow(kernel.instructions)
            if kernel.symbol != "table":  # of which the cubin tells more than the text
                assert (kernel.blocks, kernel.loops) == (blocks, loops)
            blocks, loops = kernel.blocks, kernel.loops
            for i in kernel.instructions:
                block = kernel.blocks[i.block]
                assert block.start <= i.address < block.end
                around = [loop for loop in loops if i.block in loop.blocks]
                innermost = max(around, key=lambda loop: loop.depth, default=None)
                assert i.loop == (None if innermost is None else innermost.index)
                assert i.pipe == opcodes.pipe(i.opcode, 80)
                assert i.cost == opcodes.cost(i.opcode, 80)

    def test_jump_tables_have_the_targets_that_nvdisasm_tells(self, load, planted, nvdisasm):
        text = nvdisasm("-c", planted / "several.sm_90.cubin")
        told = re.findall(r"BRX .*BRANCH_TARGETS ([^\"]*)\"", text)
        (kernel,) = (k for k in load("several.sm_90.cubin") if k.symbol == "table")
        jumps = [i for i in kernel.instructions if i.base == "BRX"]
        assert len(jumps) == len(told) == 2
        for jump, labels in zip(jumps, told, strict=True):
            found = {kernel.blocks[n].start for n in kernel.blocks[jump.block].successors}
            assert len(found) == len(labels.split(","))

    def test_the_operands_of_break_are_as_in_a_listing(self, load, planted, nvdisasm, tmp_path):
        data = bytearray((planted / "ends.sm_90.cubin").read_bytes())
        (kernel,) = (k for k in load("ends.sm_90.cubin") if k.symbol == "breaks")
        first, second = (i for i in kernel.instructions if i.base == "BREAK")
        assert (first.operands, second.operands) == ("B1", "B1")
        # ptxas was not seen to give it a predicate: bits 87 to 90, here !P2
        changed = second.encoding & ~(15 << 87) | (2 | 8) << 87
        at = data.index(second.encoding.to_bytes(16, "little"))
        data[at : at + 16] = changed.to_bytes(16, "little")
        path = tmp_path / "breaks.cubin"
        path.write_bytes(data)
        assert "BREAK !P2, B1" in " ".join(nvdisasm("-c", path).split())
        (kernel,) = reader.load_kernels(path, names=["breaks"])
        assert "!P2, B1" in [i.operands for i in kernel.instructions if i.base == "BREAK"]


class TestLibrary:
    @pytest.fixture(scope="class", params=FEW)
    @classmethod
    def architecture(cls, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture(scope="class", params=parts_of(LIBRARY))
    @classmethod
    def configs(cls, request: pytest.FixtureRequest) -> tuple[Config, ...]:
        return request.param

    @pytest.fixture
    def kernels(self, architecture: str, configs: tuple[Config, ...]) -> dict:
        return kernels_of(configs, architecture)

    def test_those_of_all_steps_are_listed(self, architecture: str) -> None:
        number = int(architecture.removeprefix("sm_"))
        listed = listed_configs(architecture)
        assert {*listed} >= {
            config
            for config in get_kernel_progression_configs()
            if config.family.targets_for((number,))
        }
        assert listed == sorted(listed)

    def test_each_is_read_for_its_config(self, kernels: dict, configs: tuple[Config, ...]) -> None:
        assert [*kernels] == sorted(configs)
        for config, kernel in kernels.items():
            assert config_from_symbol(kernel.symbol) == config

    def test_registers_spills_and_stack_are_those_of_the_logs(self, kernels, package) -> None:
        spilling = 0
        for config, kernel in kernels.items():
            log = (package / "ptxas" / f"{config.short_form()}.log").read_text()
            (report,) = (
                report for report in parse_ptxas_log(log) if report.target == kernel.architecture
            )
            resources = kernel.resources
            assert resources.registers == report.registers
            assert resources.stack_bytes == report.stack_bytes
            assert resources.spill_store_bytes == report.spill_store_bytes
            assert resources.spill_load_bytes == report.spill_load_bytes
            spilling += bool(report.spill_store_bytes)
        assert spilling

    def test_embedded_ptx_is_the_ptx_that_ships(self, kernels, package) -> None:
        """Compiled for another architecture, but the same instructions."""

        def opcodes_of(text: str) -> Counter:
            return Counter(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z]\w+\.[\w.:]+)\s", text, re.M))

        config, kernel = next(iter(kernels.items()))
        shipped = (package / "ptx" / f"{config.short_form()}.ptx").read_text()
        assert opcodes_of(kernel.ptx)["ldmatrix.sync.aligned.m8n8.x4.shared.b16"] > 0
        assert opcodes_of(kernel.ptx) == opcodes_of(shipped)

    def test_a_config_that_is_not_listed_is_compiled(self) -> None:
        config = WITH_TENSOR[-1].replace(B_c=32)
        assert [*own_kernels(DEFAULT, [WITH_TENSOR[0], config])] == sorted([WITH_TENSOR[0], config])

    def test_a_config_that_is_not_made_for_an_architecture_is_named(self) -> None:
        with pytest.raises(SassError, match="family hopper are made for sm_90a, not for sm_80"):
            own_kernels("sm_80", HOPPER.progression()[:1])


class TestMerging:
    """Kernels of several cubins are disassembled in one run: with the same result."""

    @staticmethod
    def requests(planted: Path, *names: str) -> list[Request]:
        members = [m for name in names for m in members_of(planted / f"{name}.cubin")]
        cubins = [member.cubin() for member in members]
        return [
            Request(m, cubin, k)
            for m, cubin in zip(members, cubins, strict=True)
            for k in cubin.kernels
        ]

    @staticmethod
    def alone(requests: list[Request], folder: Path) -> list:
        nvdisasm = find_disassembler("nvdisasm")
        return [
            disassembly
            for request in requests
            for disassembly in disassemble([nvdisasm], Batch((request,), merged=False), folder)
        ]

    def test_of_the_library_changes_nothing(self, tmp_path: Path) -> None:
        members = cubins_of(library_path())
        requests = [
            Request(member, cubin, kernel)
            for member in members
            if re.search(r":v(1|7)_bf16", member.origin) and member.architecture in FEW
            for cubin in [member.cubin()]
            for kernel in cubin.kernels
        ]
        planned = batches(requests, workers=1)
        assert len(requests) > 2 * len(FEW)
        assert [batch.merged for batch in planned] == [True] * len(FEW)  # one an architecture
        for batch in planned:
            merged = disassemble([find_disassembler("nvdisasm")], batch, tmp_path)
            assert merged == self.alone(list(batch.requests), tmp_path)
        assert not list(tmp_path.iterdir())

    def test_is_not_done_with_what_needs_its_own_cubin(self, planted: Path) -> None:
        """A jump table, a function that is called, a file that is not linked."""
        cubin = read_cubin((planted / "several.sm_90.cubin").read_bytes(), "several")
        assert {k.symbol for k in cubin.kernels if not k.self_contained} == {"table"}
        (member,) = cubins_of(planted / "relocatable.o")
        assert not any(kernel.self_contained for kernel in member.cubin().kernels)

    def test_of_planted_kernels_changes_nothing(self, planted: Path, tmp_path: Path) -> None:
        requests = self.requests(planted, "several.sm_80", "several.sm_90", "spills.sm_80")
        merged = [batch for batch in batches(requests, workers=1) if batch.merged]
        assert sorted(len(batch.requests) for batch in merged) == [1, 3, 3]
        for batch in merged:
            together = disassemble([find_disassembler("nvdisasm")], batch, tmp_path)
            assert together == self.alone(list(batch.requests), tmp_path)

    def test_batches_are_for_all_workers_and_of_one_architecture(self, planted: Path) -> None:
        requests = self.requests(planted, "filler.sm_80", "several.sm_80", "several.sm_90")
        assert len(requests) == 9
        planned = batches(requests * 3, workers=2)
        # of the twelve of sm_80, and of the nine of sm_90, half each; and what cannot be merged
        sizes = sorted((len(b.requests), b.merged) for b in planned)
        assert sizes == [(3, False), (3, False), (4, True), (5, True), (6, True), (6, True)]
        for batch in planned:
            assert len({request.cubin.architecture for request in batch.requests}) == 1

    def test_four_kernels_are_not_worth_two_batches(self, planted: Path) -> None:
        requests = self.requests(planted, "filler.sm_80") * 5
        sizes = [
            [len(batch.requests) for batch in batches(requests[:n], workers=8)] for n in (1, 4, 5)
        ]
        assert sizes == [[1], [4], [4, 1]]


class TestCacheUse:
    def test_the_second_reading_runs_no_disassembler(
        self, planted: Path, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        cache = DisassemblyCache(tmp_path)
        path = planted / "unrolled.sm_80.cubin"
        first = reader.load_kernels(path, cache=cache)
        request.getfixturevalue("no_nvdisasm")
        assert reader.load_kernels(path, cache=cache) == first
        with pytest.raises(AssertionError, match="nvdisasm was run"):
            reader.load_kernels(planted / "unrolled.sm_90.cubin", cache=cache)

    def test_a_damaged_entry_is_made_again(self, planted: Path, tmp_path, monkeypatch) -> None:
        cache = DisassemblyCache(tmp_path)
        path = planted / "unrolled.sm_80.cubin"
        told = []

        def disassemble_once(*arguments: Any) -> list[Disassembly]:
            told.append(told[0] if told else disassemble(*arguments))
            return told[0]

        monkeypatch.setattr(reader, "disassemble", disassemble_once)
        first = reader.load_kernels(path, cache=cache)
        (entry,) = tmp_path.iterdir()
        good = entry.read_bytes()
        damages = (b"", good[:-1], good[:40] + b"\0" + good[41:], b"x" * 1000)
        for bad in damages:
            entry.write_bytes(bad)
            assert reader.load_kernels(path, cache=cache) == first
            assert entry.read_bytes() == good
        assert len(told) == 1 + len(damages)

    def test_a_copy_of_the_file_is_known(self, planted: Path, tmp_path: Path, request) -> None:
        cache = DisassemblyCache(tmp_path / "cache")
        first = reader.load_kernels(planted / "filler.sm_80.cubin", cache=cache)
        copy = tmp_path / "renamed"
        copy.write_bytes((planted / "filler.sm_80.cubin").read_bytes())
        request.getfixturevalue("no_nvdisasm")
        (kernel,) = reader.load_kernels(copy, cache=cache)
        assert kernel.instructions == first[0].instructions
        assert kernel.origin == str(copy)

    def test_a_folder_that_cannot_be_made_does_no_harm(self, planted, tmp_path) -> None:
        (tmp_path / "file").write_text("in the way")
        cache = DisassemblyCache(tmp_path / "file" / "cache")
        assert reader.load_kernels(planted / "unrolled.sm_80.cubin", cache=cache)


def test_progress_counts_the_kernels(planted: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    reader.load_kernels(
        planted / "several.sm_80.cubin",
        cache=DisassemblyCache(tmp_path),
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
