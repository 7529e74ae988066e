"""Running kernels without a GPU: what is refused, and that a fault leaves nothing half-written."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from attention_tensors import attention_tensors

import flash_attention
from flash_helpers.compile.codegen import library_configs
from flash_helpers.kernel_configs import (
    STEPS,
    AttentionForward,
    Element,
    get_kernel_progression_configs,
)
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.ptx import (
    MisalignedError,
    PtxSyntaxError,
    RaceError,
    UnsupportedInstruction,
)
from flash_helpers.runtime import simulator
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.simulator import (
    duration_text,
    load_kernel,
    run_kernel,
)

pytestmark = pytest.mark.slow

CONFIG = next(
    config
    for config in get_kernel_progression_configs()
    if config.step is STEPS["v7"] and config.dtype == Element.BF16
)
SHAPE = (1, 128, 1, 128)


@pytest.fixture(scope="module")
def ptx() -> str:
    """The PTX that the package ships for CONFIG."""
    return ptx_path(CONFIG).read_text()


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, *SHAPE, generator=torch.manual_seed(1)).bfloat16().unbind(0))


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """Makes the package ship another text for CONFIG."""

    def ship(text: str | None) -> None:
        path = tmp_path / ptx_path(CONFIG).name
        monkeypatch.setattr(simulator, "ptx_path", lambda *_: path)
        if text is not None:
            path.write_text(text)

    return ship


def run(text: str, inputs: tuple[torch.Tensor, ...]) -> None:
    """Run CONFIG's kernel of a PTX text."""
    run_kernel(CONFIG, load_kernel(CONFIG, text), attention_tensors(CONFIG, *inputs))


def edited(text: str, pattern: str, replacement: str, count: int = 1) -> str:
    changed, n = re.subn(pattern, replacement, text, count=count, flags=re.M)
    assert n, f"{pattern} is not in the PTX any more"
    return changed


def without_barriers(text: str) -> str:
    return edited(text, r"^\tbar\.sync.*\n", "", count=0)


class TestMemory:
    def test_begins_where_a_tensor_does_between_multiples_of_16_bytes(self, inputs, ptx) -> None:
        tensors, kernel = attention_tensors(CONFIG, *inputs), load_kernel(CONFIG, ptx)
        memory = torch.empty(8 + tensors["q"].numel(), dtype=torch.bfloat16)
        for first in (0, 8, 4):
            own = memory[first:][: tensors["q"].numel()].view(SHAPE).copy_(tensors["q"])
            with nullcontext() if first % 8 == 0 else pytest.raises(MisalignedError):
                run_kernel(CONFIG, kernel, {**tensors, "q": own})


class TestFaults:
    def test_are_runtime_errors_that_lead_to_the_line(self, shipped, inputs, ptx) -> None:
        shipped(without_barriers(ptx))
        with pytest.raises(RuntimeError, match="shared-memory race") as error:
            flash_attention.forward(CONFIG, *inputs)
        assert isinstance(error.value, RaceError)
        assert re.search(r"previous_kernels/v7/forward_kernel\.cuh:\d+", str(error.value))
        assert re.search(r"block \(\d+, \d+, \d+\) warp \d+ lane \d+", str(error.value))

    def test_leave_the_output_as_it_was(self, shipped, inputs, ptx) -> None:
        shipped(without_barriers(ptx))
        output = torch.full(SHAPE, 7.0, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError):
            flash_attention.forward(CONFIG, *inputs, output)
        assert (output == 7.0).all()

    def test_are_collected_when_asked_for(self, shipped, inputs, ptx) -> None:
        shipped(without_barriers(ptx))
        _, run = flash_attention.simulate(CONFIG, *inputs, keep_going=True)
        assert len(run.faults) > 1
        assert RaceError in {type(fault) for fault in run.faults}
        assert all(str(fault) in run.report() for fault in run.faults)

    def test_reach_through_torch_compile(self, shipped, inputs, ptx) -> None:
        shipped(without_barriers(ptx))
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda *x: flash_attention.forward(CONFIG, *x), backend="aot_eager"
        )
        with pytest.raises(RuntimeError, match="shared-memory race"):
            compiled(*inputs)


class TestBadPtx:
    def test_missing_files_say_how_to_build(self, shipped, inputs) -> None:
        shipped(None)
        with pytest.raises(RuntimeError, match=r"PTX of v7_bf16.* cannot be read .*pip install"):
            flash_attention.forward(CONFIG, *inputs)

    def test_cut_off_behind_the_kernel_is_refused_too(self, ptx) -> None:
        with pytest.raises(PtxSyntaxError, match=r"no \.file 1 follows: the text is cut off"):
            load_kernel(CONFIG, ptx[: ptx.index("\n}\n") + 3])

    def test_cut_off_in_the_package_is_a_runtime_error(self, shipped, inputs, ptx) -> None:
        shipped(ptx[: len(ptx) // 2])
        with pytest.raises(RuntimeError, match=r"cannot be read .*line \d+"):
            flash_attention.forward(CONFIG, *inputs)

    def test_no_modifier_is_ignored(self, ptx, inputs) -> None:
        opcodes = set(re.findall(r"^\t(?:@!?%p\d+ )?([a-z][a-z0-9]*)[.\w:]*[ \t;]", ptx, re.M))
        assert len(opcodes) > 20
        for opcode in sorted(opcodes):
            # everywhere: where a predicate holds for nobody, nothing is refused
            text = edited(ptx, rf"^(\t(?:@!?%p\d+ )?{opcode})\b", r"\1.twice", count=0)
            with pytest.raises(UnsupportedInstruction, match=rf"{opcode}\.twice.*\.twice is not"):
                run(text, inputs)


class TestSimulate:
    def test_is_for_the_cpu(self) -> None:
        q = torch.empty(SHAPE, dtype=torch.bfloat16, device="meta")
        with pytest.raises(ValueError, match=r"q is on meta and the simulator runs on the CPU"):
            flash_attention.simulate(CONFIG, q, q, q)

    def test_checks_arguments_as_forward_does(self, inputs) -> None:
        q, k, v = inputs
        with pytest.raises(TypeError, match=r"k is torch\.float32"):
            flash_attention.simulate(CONFIG, q, k.float(), v)
        with pytest.raises(ValueError, match="o overlaps q in memory"):
            flash_attention.simulate(CONFIG, q, k, v, q)
        with pytest.raises(TypeError, match="cfg is a int"):
            flash_attention.simulate(7, q, k, v)


class TestAnnouncement:
    def test_of_a_short_run_there_is_none(self, inputs, capsys) -> None:
        flash_attention.forward(CONFIG, *inputs)
        assert capsys.readouterr().err == ""

    def test_of_a_long_run_gives_an_estimate_and_progress(
        self, inputs, terminal, capsys, monkeypatch
    ) -> None:
        monkeypatch.setattr(simulator, "ANNOUNCE_FROM_SECONDS", 0.0)
        flash_attention.forward(CONFIG, *inputs)
        err = capsys.readouterr().err
        assert f"simulating {CONFIG.short_form()}, about " in err
        assert "0/2" in err

    def test_estimates_grow_with_the_work(self) -> None:
        one = OPERATION.simulated_seconds(AttentionForward(1, 1, 512))
        assert OPERATION.simulated_seconds(AttentionForward(2, 3, 512)) == pytest.approx(6 * one)
        assert OPERATION.simulated_seconds(AttentionForward(1, 1, 1024)) == pytest.approx(4 * one)

    @pytest.mark.parametrize(("seconds", "text"), [(8.4, "8 s"), (200, "3 min"), (50_000, "14 h")])
    def test_durations_are_in_the_unit_that_suits(self, seconds, text) -> None:
        assert duration_text(seconds) == text

    def test_is_for_a_terminal(self, inputs, capsys, monkeypatch) -> None:
        monkeypatch.setattr(simulator, "ANNOUNCE_FROM_SECONDS", 0.0)
        flash_attention.forward(CONFIG, *inputs)
        assert capsys.readouterr().err == ""


def test_every_kernel_of_the_library_ships_its_ptx_under_its_name(root: Path) -> None:
    """A kernel that is compiled at first use is found by its name whenever it is simulated."""
    for config in library_configs(root):
        (name,) = re.findall(r"\.entry (\w+)", ptx_path(config).read_text())
        assert config.short_form() in name
