"""The progression matrix: which kernels it takes, and whether it tells the truth about them."""

import csv
import json
from collections import Counter
from dataclasses import replace

import pytest
from edited_kernels import block_of_phase, instructions_of, library_kernel
from sass_text import kernel, needs, of_version

from flash_helpers.kernel_configs import STEPS, Element, get_listed_configs
from flash_helpers.measure.machine_code import (
    config_facts,
    facts_matrix,
    listed_configs,
)
from flash_helpers.ptx.read.flow import Phase
from flash_helpers.registry.selection import choose_kernels
from flash_helpers.runtime import library
from flash_helpers.sass.analyse.bound import Launch
from flash_helpers.sass.analyse.matrix import (
    GROUP_NAMES,
    GROUPS,
    KernelFacts,
    Matrix,
    changes_text,
    opcode_changes,
)
from flash_helpers.sass.read import opcodes
from flash_helpers.sass.read.flow import NEVER
from flash_helpers.sass.read.records import SassError
from flash_helpers.sass.show.matrix_tables import (
    matrix_csv,
    matrix_json,
    matrix_markdown,
    matrix_text,
)

BUILT = get_listed_configs()
LARGE = next(c for c in BUILT if (c.version, c.B_r, c.dtype) == (7, 128, Element.BF16))
NUMBERS = [step.number for step in STEPS.values() if step.family == LARGE.family.name]
TERMINAL = 120


@pytest.fixture(scope="module")
def matrix(results) -> Matrix:
    """Every version in bf16; for sm_90, the architecture of the measurements, if it is built."""
    rows = [config_facts(of_version(n), library_kernel(n), results) for n in NUMBERS]
    return facts_matrix(rows, results)


class TestChoice:
    def test_of_a_short_form_is_itself_in_its_own_dtype(self) -> None:
        assert choose_kernels(BUILT, [LARGE.short_form()], Element.FP16) == [LARGE]

    def test_knows_what_is_made_for_an_architecture(self) -> None:
        assert listed_configs("sm_90") == library.kernels()
        assert listed_configs("sm_120") == [c for c in library.kernels() if c.family.is_portable]
        assert not any(c.family.is_portable for c in listed_configs("sm_90a"))
        for architecture in ("sm_75", "sm_120a"):
            with pytest.raises(SassError, match=f"no kernel is made for {architecture}"):
                listed_configs(architecture)


class TestNames:
    def test_tell_architectures_apart(self) -> None:
        rows = [KernelFacts(kernel=kernel("EXIT", a), name="k") for a in ("sm_80", "sm_90")]
        assert Matrix(rows, ["v16", "v16"]).names == ["v16 sm_80", "v16 sm_90"]
        assert Matrix(rows[:1] * 2, ["v15", "v16"]).names == ["v15", "v16"]


class TestFacts:
    def test_groups_hold_each_class_once(self) -> None:
        grouped = [name for classes in GROUPS.values() for name in classes]
        assert len(grouped) == len(set(grouped))
        assert set(grouped) <= set(opcodes.CLASSES)

    def test_groups_add_up_to_the_loop(self, matrix) -> None:
        for facts in matrix.rows:
            assert sum(facts.groups.values()) == facts.phases.main_loop.work
            assert min(facts.groups.values()) >= 0

    @needs("sm_90")
    def test_version_8_lowers_integer_work_and_registers(self, matrix) -> None:
        before, after = matrix.rows[6], matrix.rows[7]
        assert after.groups["integer"] < before.groups["integer"]
        assert after.kernel.resources.registers < before.kernel.resources.registers
        assert after.occupancy.blocks == before.occupancy.blocks + 1

    def test_version_6_lowers_fp32(self, matrix) -> None:
        """A multiplication and a subtraction of each of a lane's 32 elements of S become an FFMA,
        and the elements are not scaled before."""
        assert matrix.rows[4].groups["fp32"] - matrix.rows[5].groups["fp32"] >= 32

    def test_shared_memory_is_a_tile_each_of_q_k_and_v(self, matrix) -> None:
        assert {facts.smem_bytes for facts in matrix.rows} == {3 * 64 * 128 * 2}

    def test_measurements_of_another_architecture_are_left_aside(self, results) -> None:
        other = replace(library_kernel(16), architecture="sm_80")
        facts = config_facts(of_version(16), other, results)
        assert (facts.measurement, facts.prediction) == (None, None)

    def test_of_a_kernel_without_a_loop_has_none_of_it(self) -> None:
        kernel = library_kernel(9)
        instructions = tuple(replace(i, loop=None) for i in kernel.instructions)
        flat = replace(kernel, loops=(), instructions=instructions)
        facts = config_facts(of_version(9), flat, None)
        assert facts.loop is None and facts.per_hmma(1) is None
        matrix = Matrix((facts, facts), ("v9", "v9"))
        assert "-" in matrix_text(matrix)
        matrix_csv(matrix)
        json.dumps(matrix_json(matrix))


class TestChanges:
    @pytest.mark.parametrize("number", [2, 9, 16])
    def test_are_differences_of_what_stands_in_the_loop(self, matrix, number) -> None:
        counts = []
        for version in (number - 1, number):
            kernel = library_kernel(version)
            block = block_of_phase(kernel, Phase.MAIN_LOOP)
            inside = instructions_of(kernel, block)
            counts.append(Counter(i.opcode for i in inside if i.predicate not in NEVER))
        changes = dict(opcode_changes(matrix.rows[number - 2], matrix.rows[number - 1]))
        expected = {o: counts[1][o] - counts[0][o] for o in counts[0] | counts[1]}
        assert changes == {o: d for o, d in expected.items() if d}
        sizes = [abs(change) for change in changes.values()]
        assert sizes == sorted(sizes, reverse=True)

    def test_are_told_for_each_hmma_where_loops_hold_different_numbers(self, matrix) -> None:
        (one,) = (facts for facts in matrix.rows if facts.config.version == 9)
        counts = one.phases.main_loop
        doubled = replace(
            counts,
            by_opcode={opcode: 2 * number for opcode, number in counts.by_opcode.items()},
            by_class={name: 2 * number for name, number in counts.by_class.items()},
            tensor_operations=2 * counts.tensor_operations,
        )
        twice = replace(one)
        vars(twice)["phases"] = replace(one.phases, main_loop=doubled)
        assert opcode_changes(one, twice) == []

    def test_text_is_cut(self) -> None:
        assert changes_text([]) == "none"
        assert changes_text([("MOV", -3), ("LEA", 1)], most=1) == "MOV -3, 1 more"
        assert changes_text([("MOV", -0.25)]) == "MOV -0.25/HMMA"


class TestTables:
    @needs("sm_90")
    def test_fit_a_terminal_and_have_a_row_a_version(self, matrix) -> None:
        lines = matrix_text(matrix).splitlines()
        assert max(map(len, lines)) <= TERMINAL
        for number in NUMBERS:
            assert sum(line.startswith(f"v{number} ") for line in lines) == 5

    def test_tell_resources(self, matrix) -> None:
        text = matrix_text(matrix)
        row = next(line.split() for line in text.splitlines() if line.startswith("v8 "))
        registers = str(matrix.rows[7].kernel.resources.registers)
        held = matrix.rows[7].occupancy
        blocks, warps = str(held.blocks), f"{4 * held.blocks}/{held.max_warps}"
        assert row[1:7] == [registers, "0/0", "0", "49,152", blocks, warps]

    def test_warn_of_different_compilers(self, matrix) -> None:
        other = replace(matrix.rows[1].kernel.compiler, version=(12, 0, 0))
        changed = replace(matrix.rows[1], kernel=replace(matrix.rows[1].kernel, compiler=other))
        text = matrix_text(Matrix((matrix.rows[0], changed), matrix.short_names[:2]))
        assert "different compilers" in text
        assert "different compilers" not in matrix_text(matrix)

    def test_without_measurements_say_so(self, matrix) -> None:
        bare = facts_matrix([config_facts(f.config, f.kernel, None) for f in matrix.rows[:2]], None)
        text = matrix_text(bare)
        assert "No measurement" in text and "TFLOP/s" not in text

    def test_in_markdown_have_the_same_cells(self, matrix) -> None:
        text = matrix_markdown(matrix)
        row = next(line for line in text.splitlines() if line.startswith("| v8 "))
        registers = str(matrix.rows[7].kernel.resources.registers)
        assert [cell.strip() for cell in row.strip("|").split("|")][1:3] == [registers, "0/0"]

    def test_in_csv_are_a_row_a_kernel(self, matrix) -> None:
        rows = list(csv.DictReader(matrix_csv(matrix).splitlines()))
        assert [row["step"] for row in rows] == [f"v{number}" for number in NUMBERS]
        for row, facts in zip(rows, matrix.rows, strict=True):
            shares = sum(float(row[f"{name}_per_hmma"]) for name in GROUP_NAMES)
            assert shares == pytest.approx(float(row["instructions_per_hmma"]))
            assert int(row["registers"]) == facts.kernel.resources.registers

    def test_in_json_hold_opcodes_by_phase(self, matrix) -> None:
        document = json.loads(json.dumps(matrix_json(matrix)))
        for entry in document["kernels"]:
            loop = entry["phases"]["main loop"]
            assert sum(loop["opcodes"].values()) == entry["loop_instructions"]
            assert sum(loop["classes"].values()) == entry["loop_instructions"]
        assert document["kernels"][0]["changes"] == {}


class TestAnybodysKernels:
    """Two that no config is known of."""

    LOOP = "loop: HMMA.16816.F32 R4, R8, R12, R4\n{}@P0 BRA loop\nEXIT"

    def facts(self, text: str, name: str, launch: Launch | None = None) -> KernelFacts:
        return KernelFacts(kernel=kernel(self.LOOP.format(text)), name=name, launch=launch)

    def test_are_compared_by_what_their_text_tells(self) -> None:
        rows = [self.facts("", "one"), self.facts("FADD R1, R1, R1\n", "two")]
        matrix = Matrix(rows, ["one", "two"])
        text = matrix_text(matrix)
        assert text.startswith("2 kernels, sm_90, compiled by ptxas 13.0.88\n")
        assert "FADD +1" in text and "Time of a launch" not in text
        assert "**Resources**" in matrix_markdown(matrix)
        one, two = csv.DictReader(matrix_csv(matrix).splitlines())
        assert (one["blocks_per_sm"], one["loop_instructions"]) == ("", "2")
        assert (two["loop_instructions"], two["least_ms"]) == ("3", "")
        assert json.dumps(matrix_json(matrix))

    def test_are_resident_as_they_are_said_to_be_launched(self) -> None:
        facts = self.facts("", "one", Launch(threads=256, dynamic_smem_bytes=48 * 1024))
        assert facts.smem_bytes == 48 * 1024
        assert (facts.occupancy.blocks, facts.resident_warps) == (4, 32)
        assert "32/64" in matrix_text(Matrix([facts], ["one"]))
