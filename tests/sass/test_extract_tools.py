"""extract_sass.py and get_embedded_ptx_from_cubin.py: what they print and write."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fake_backend import ROOT, run_tool
from sass_text import DEFAULT

from flash_helpers.kernel_configs import get_kernel_progression_configs
from flash_helpers.measure.machine_code import readable_name
from flash_helpers.runtime.library import library_path
from flash_helpers.sass.read.listing import parse_listing
from flash_helpers.sass.read.records import Kernel
from flash_helpers.sass.show.extract import FileNames, graph_text, listing_text

pytestmark = pytest.mark.slow

SASS_TOOL = "tools/build/extract_sass.py"
PTX_TOOL = "tools/build/get_embedded_ptx_from_cubin.py"


@pytest.fixture
def kernels(load) -> dict[str, Kernel]:
    return {kernel.symbol: kernel for kernel in load("several.sm_90.cubin")}


class TestListing:
    @pytest.mark.parametrize("offsets", [True, False])
    def test_is_read_back(self, offsets: bool, kernels: dict[str, Kernel]) -> None:
        for kernel in kernels.values():
            (function,) = parse_listing(listing_text(kernel, offsets), "listing")
            assert (function.name, function.architecture) == (kernel.symbol, kernel.architecture)
            assert [(o.address, o.predicate, o.opcode, o.target) for o in function.operations] == [
                (i.address, i.predicate, i.opcode, i.target) for i in kernel.instructions
            ]

    def test_shows_the_resources(self, load) -> None:
        (kernel,) = load("spills.sm_90.cubin")
        resources = kernel.resources
        assert resources.spill_store_bytes
        assert (
            f"// registers {resources.registers}, static shared memory 0, "
            f"stack {resources.stack_bytes}, spill stores {resources.spill_store_bytes}, "
            f"spill loads {resources.spill_load_bytes}, barriers 0, threads 1024\n"
        ) in listing_text(kernel)

    def test_shows_all_of_an_instruction(self, kernels: dict[str, Kernel]) -> None:
        kernel = kernels["nested"]
        i = next(i for i in kernel.instructions if i.base == "FMUL" and len(i.source) == 3)
        line = next(
            line
            for line in listing_text(kernel).splitlines()
            if line.startswith(f"/*{i.address:04x}*/")
        )
        code, _, notes = line.partition(" // ")
        assert code.split() == [f"/*{i.address:04x}*/", i.opcode, *i.operands.split(), ";"]
        encoding, control, live, ptx, source = notes.split(" | ")
        assert int(encoding, 16) == i.encoding
        assert control.startswith(f"s{i.control.stall:02} ")
        assert live.split() == [
            "live",
            str(i.live.general),
            str(i.live.predicate),
            str(i.live.uniform),
            str(i.live.uniform_predicate),
        ]
        assert ptx == f"ptx {i.ptx_line}"
        assert source.split(" < ") == [f"{line.file}:{line.line}" for line in i.source]

    @pytest.mark.parametrize("offsets", [True, False])
    def test_marks_spills_and_no_accesses_of_an_array(self, offsets: bool, load) -> None:
        (kernel,) = (k for k in load("ends.sm_90.cubin") if k.symbol == "spills_beside_array")
        marked = [
            " | spill" in line
            for line in listing_text(kernel, offsets).splitlines()
            if re.search(r"\b(STL|LDL)\b", line)
        ]
        local = [i for i in kernel.instructions if i.base in ("STL", "LDL")]
        assert marked == [i.is_spill for i in local]
        assert {*marked} == {True, False}

    def test_names_blocks_and_their_loops(self, kernels: dict[str, Kernel]) -> None:
        text = listing_text(kernels["nested"])
        comments = re.findall(r"^// block (\d+)(?:, loop (\d+), depth (\d+))?$", text, re.M)
        assert [int(number) for number, _, _ in comments] == list(
            range(len(kernels["nested"].blocks))
        )
        assert {depth for _, _, depth in comments} == {"", "1", "2"}

    def test_every_label_is_defined_once_and_used(self, kernels: dict[str, Kernel]) -> None:
        for kernel in kernels.values():
            text = listing_text(kernel)
            defined = re.findall(r"^(\.L_\d+):$", text, re.M)
            assert len(defined) == len(set(defined))
            assert set(defined) == set(re.findall(r"`\((\.L_\d+)\)", text))

    def test_without_offsets_nothing_is_left_that_shifts(self, load) -> None:
        (before,) = load("unrolled.sm_90.cubin")
        text = listing_text(before, offsets=False)
        code = text[text.index("// block 0") :]
        assert "/*" not in code
        assert "unrolled.cu" not in code
        assert not re.search(r"BRA 0x", code)
        assert len(code.splitlines()) < len(listing_text(before).splitlines())
        assert Counter(re.findall(r"^ +(?:@\S+ )?([A-Z]\S+)", code, re.M)) == Counter(
            i.opcode for i in before.instructions
        )


class TestGraph:
    def test_has_the_blocks_and_their_edges(self, kernels: dict[str, Kernel]) -> None:
        for kernel in kernels.values():
            text = graph_text(kernel)
            nodes = re.findall(r"^\s*b(\d+) \[label=", text, re.M)
            assert sorted(map(int, nodes)) == list(range(len(kernel.blocks)))
            edges = re.findall(r"^\s*b(\d+) -> b(\d+);", text, re.M)
            assert sorted((int(a), int(b)) for a, b in edges) == sorted(
                (block.index, successor)
                for block in kernel.blocks
                for successor in block.successors
            )
            assert text.count("{") == text.count("}")
            assert text.count("subgraph") == len(kernel.loops)

    def test_inner_loops_lie_in_outer_ones(self, kernels: dict[str, Kernel]) -> None:
        text = graph_text(kernels["nested"])
        assert re.search(
            r"\n    subgraph cluster_\d+ \{.*\n        subgraph cluster_\d+ \{", text, re.S
        )


class TestNames:
    def test_of_files_are_all_different_and_safe(self) -> None:
        long = "x" * 400
        files = FileNames(".sass")
        names = [
            files.of(*kernel)
            for kernel in (
                ("sm_80", "a/b"),
                ("sm_80", "a_b"),
                ("sm_90", "a_b"),
                ("sm_80", long),
                ("sm_80", long + "y"),
            )
        ]
        assert len(set(names)) == 5
        assert all("/" not in name and len(name) < 255 for name in names)

    def test_of_this_library_are_short_forms(self) -> None:
        config = get_kernel_progression_configs()[0]
        short = config.short_form()
        symbol = f"_ZN2v114forward_kernelI{len(short)}{short}EEv17ForwardKernelArgs"
        assert FileNames(".sass", readable_name).of("sm_90", symbol) == f"{short}.sm_90.sass"


class TestExtractSass:
    def test_lists(self, capsys, planted: Path) -> None:
        status, out, err = run_tool(capsys, SASS_TOOL, planted / "one.o", "--list")
        assert (status, err) == (0, "")
        assert out.split() == ["sm_80", "one", "sm_90", "one"]

    def test_prints(self, capsys, planted: Path, kernels: dict[str, Kernel]) -> None:
        status, out, _ = run_tool(
            capsys, SASS_TOOL, planted / "several.sm_90.cubin", "--kernel", "nest"
        )
        assert status == 0
        assert out == listing_text(kernels["nested"])

    def test_writes_a_file_a_kernel_and_architecture(self, capsys, planted, tmp_path) -> None:
        status, out, _ = run_tool(capsys, SASS_TOOL, planted / "libone.so", "-o", tmp_path / "new")
        assert status == 0
        written = sorted((tmp_path / "new").iterdir())
        assert sorted(out.split()) == [str(path) for path in written]
        assert [path.name for path in written] == [
            f"{name}.{architecture}.sass"
            for name in ("one", "other")
            for architecture in ("sm_80", "sm_90")
        ]
        for path in written:
            (function,) = parse_listing(path.read_text(), path.name)
            assert f"{function.name}.{function.architecture}.sass" == path.name

    def test_draws(self, capsys, planted: Path, kernels: dict[str, Kernel]) -> None:
        _, out, _ = run_tool(
            capsys,
            SASS_TOOL,
            planted / "several.sm_90.cubin",
            "--cfg",
            "--no-offsets",
            "--kernel",
            "table",
        )
        assert out == graph_text(kernels["table"], offsets=False)

    @pytest.mark.parametrize("step", ["v3", "3", "3..3"])
    def test_takes_steps_of_the_library(self, capsys, step) -> None:
        _, out, _ = run_tool(
            capsys, SASS_TOOL, library_path(), "--list", "--arch", DEFAULT, "--kernel", step
        )
        named = {line.split()[-1] for line in out.splitlines()}
        assert named >= {
            c.short_form() for c in get_kernel_progression_configs() if c.step.id == "v3"
        }
        assert all("_ZN2v314forward_kernel" in line for line in out.splitlines())

    def test_a_reader_that_has_seen_enough_is_no_error(self, planted: Path) -> None:
        command = [sys.executable, str(ROOT / SASS_TOOL), str(planted / "several.sm_90.cubin")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(timeout=120) == 0


class TestEmbeddedPtx:
    def test_of_a_cubin_keeps_its_lines(self, capsys, planted, load) -> None:
        status, out, err = run_tool(capsys, PTX_TOOL, planted / "unrolled.sm_90.cubin")
        assert (status, err) == (0, "")
        (kernel,) = load("unrolled.sm_90.cubin")
        lines = out.split("\n")
        products = {i.ptx_line for i in kernel.instructions if i.base == "HMMA"}
        assert products
        assert all("mma.sync" in lines[number - 1] for number in products)

    def test_of_a_fatbin_without_lines_is_its_ptx_member(self, capsys, planted) -> None:
        _, out, _ = run_tool(capsys, PTX_TOOL, planted / "one.fatbin")
        assert out.count(".visible .entry one(") == 1
        assert ".target sm_90" in out

    def test_is_chosen_by_architecture_and_kernel(self, capsys, planted) -> None:
        _, out, _ = run_tool(
            capsys, PTX_TOOL, planted / "libone.so", "--arch", "sm_80", "--kernel", "other"
        )
        assert out.count(".visible .entry") == 1
        assert ".target sm_80" in out
        assert ".entry other(" in out

    def test_is_written_to_files(self, capsys, planted, tmp_path) -> None:
        status, out, _ = run_tool(capsys, PTX_TOOL, planted / "libone.so", "-o", tmp_path)
        assert status == 0
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [
            f"{name}.{architecture}.ptx"
            for name in ("one", "other")
            for architecture in ("sm_80", "sm_90")
        ]
        assert sorted(Path(line).name for line in out.split()) == names
