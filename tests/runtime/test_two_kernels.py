"""A config of two kernels of another operation: its call, and what it computes in the simulator."""

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from two_kernels import COLUMNS, SQUARES, TOY_FAMILY, SquaresBackwards, ToyConfig, toy_ptx

from flash_helpers.check.tensors import tensors_for
from flash_helpers.compile.codegen import kernel_map_header, kernel_unit
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import FAMILIES, AttentionForward, Element, config_from_symbol
from flash_helpers.registry import families
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.runtime import call, library, simulator

CONFIG = ToyConfig(1, Element.FP32)
NAMES = ("z1_fp32__square", "z1_fp32__reverse")
A100 = largest_device(80)
PROBLEM = SquaresBackwards(3, 0.5)


@pytest.fixture
def kernels() -> dict:
    return {
        name: simulator.load_kernel(CONFIG, toy_ptx(CONFIG, function), function)
        for function, name in CONFIG.kernels.items()
    }


@pytest.fixture
def known(monkeypatch) -> None:
    """The registry with the toy's family."""
    monkeypatch.setattr(families, "FAMILIES", MappingProxyType({**FAMILIES, "toy": TOY_FAMILY}))


@pytest.fixture
def numbers(monkeypatch) -> Iterator[dict[str, int]]:
    """A library without kernels, and no listed configs: the numbers of registered kernels by
    name."""
    found: dict[str, int] = {}
    fake = SimpleNamespace(flash_register=lambda *_: len(found) + 7)
    monkeypatch.setattr(library, "load", lambda: fake)
    monkeypatch.setattr(library, "_registered", found)
    monkeypatch.setattr(library, "_listed", frozenset)
    monkeypatch.setattr(library, "_kept", [])
    library.resolve.cache_clear()
    yield found
    library.resolve.cache_clear()


def inputs() -> torch.Tensor:
    return torch.randn(3, COLUMNS, generator=torch.manual_seed(1))


def expected(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (x * x).flip(1)


class TestCall:
    def test_has_two_launches_and_a_buffer(self):
        found = CONFIG.call(PROBLEM, PROBLEM.strides(), A100)
        assert tuple(launch.kernel for launch in found.launches) == NAMES
        assert tuple(CONFIG.kernels.values()) == NAMES
        (buffer,) = found.buffers
        assert (buffer.name, buffer.bytes, buffer.zeroed) == (SQUARES, 3 * COLUMNS * 4, False)
        assert found.n_blocks == 2 * 3

    def test_hands_the_buffer_to_both(self):
        first, second = CONFIG.call(PROBLEM, PROBLEM.strides(), A100).launches
        addresses = {"x": 1 << 40, "y": 2 << 40, SQUARES: 3 << 40}
        assert first.bind(addresses)[8:16] == second.bind(addresses)[:8]

    def test_of_another_operations_problem_is_refused_by_name(self):
        v16 = AMPERE.progression()[-1]
        assert v16.refusal(PROBLEM) == (
            f"{v16.short_form()} computes attention_forward and the problem is one of "
            "squares_backwards: choose a config of that operation"
        )
        assert "z1_fp32 computes squares_backwards" in CONFIG.refusal(AttentionForward(1, 1, 64))
        assert CONFIG.refusal(PROBLEM) == ""


class TestSimulator:
    def test_runs_both_on_one_memory(self, kernels):
        x = inputs()
        tensors = tensors_for(CONFIG, PROBLEM, {"x": x})
        done: list[tuple[int, int]] = []
        run = simulator.run_kernel(
            CONFIG, kernels, tensors, factor=0.5, progress=lambda *at: done.append(at)
        )
        assert torch.equal(tensors["y"], expected(x))
        assert not run.faults
        assert done[-1] == (6, 6)
        assert run.n_blocks == 6 and run.kernel == kernels[CONFIG.kernels[CONFIG.main_kernel]].name

    def test_a_buffer_that_is_not_zeroed_holds_no_zeros(self, kernels):
        kernels[NAMES[0]] = simulator.load_kernel(
            CONFIG, toy_ptx(CONFIG, "square").replace("st.global.f32 [%to], %v;", ""), "square"
        )
        tensors = tensors_for(CONFIG, PROBLEM, {"x": inputs()})
        simulator.run_kernel(CONFIG, kernels, tensors)
        assert tensors["y"].isnan().all()

    def test_a_call_computes_from_the_ptx_that_is_shipped(
        self, numbers, known, monkeypatch, tmp_path
    ):
        def shipped(config: ToyConfig, function: str) -> Path:
            path = tmp_path / f"{config.kernels[function]}.ptx"
            path.write_text(toy_ptx(config, function))
            return path

        for name in NAMES:
            library.register(name, name, b"")
        monkeypatch.setattr(simulator, "ptx_path", shipped)
        monkeypatch.setattr(call, "_plans", {})
        x = inputs()
        ready = call.prepare("z1_fp32", x, factor=0.5)
        assert list(ready.outputs) == ["y"]
        ready.run()
        assert torch.equal(ready.output, expected(x))
        given, y = call.compute(
            SquaresBackwards, (CONFIG, (("factor", 0.5),)), ("x", "y"), (x, None)
        )
        assert given is x
        assert torch.equal(y, expected(x))

    def test_shapes_that_pose_no_problem_are_refused(self, numbers, known):
        for name in NAMES:
            library.register(name, name, b"")
        with pytest.raises(ValueError, match=r"x and y are \(rows, 32\)"):
            call.prepare(CONFIG, torch.zeros(3, 31))
        with pytest.raises(ValueError, match="x is not contiguous"):
            call.prepare(CONFIG, torch.zeros(COLUMNS, 3).t())
        with pytest.raises(TypeError, match=r"x is torch\.float16"):
            call.prepare(CONFIG, torch.zeros(3, COLUMNS).half())


class TestRegister:
    def test_makes_a_config_when_all_its_kernels_are_there(self, numbers, known):
        library.register(NAMES[0], "first", b"image")
        assert library.kernels() == []
        library.register(NAMES[1], "second", b"image")
        assert library.kernels() == [CONFIG]
        assert library.resolve("z1_fp32") == CONFIG
        assert numbers == {NAMES[0]: 7, NAMES[1]: 8}

    def test_keeps_what_the_library_points_to(self, numbers, known):
        library.register(NAMES[0], "first", b"image")
        assert library._kept == [(NAMES[0].encode(), b"first", b"image\0")]

    @pytest.mark.parametrize("name", ["z1_fp32", "z1_fp32__other", "nothing", "z9_fp32__square"])
    def test_refuses_a_name_of_no_kernel(self, numbers, known, name):
        with pytest.raises(ValueError, match=r"z1_fp32 has|short form|does not exist"):
            library.register(name, "symbol", b"image")
        assert numbers == {}


class TestText:
    def test_of_each_kernel_is_a_unit_with_its_own_arguments(self):
        for function, struct in (("square", "SquareArgs"), ("reverse", "ReverseArgs")):
            text = kernel_unit(CONFIG, function, name=CONFIG.kernels[function])
            assert f"struct z1_fp32__{function} {{" in text
            assert f"z1::{function}<Kernels>" in text
            assert f"sizeof({struct})" in text

    def test_of_the_map_has_both_in_one_entry(self):
        text = kernel_map_header(TOY_FAMILY, [CONFIG])
        assert "{z1_fp32__square_kernel(), z1_fp32__reverse_kernel()}}," in text
        assert "std::map<ToyConfig, std::vector<Kernel>> toy_kernels" in text

    def test_of_a_symbol_names_the_config(self, known):
        for function in CONFIG.kernels:
            assert config_from_symbol(f"void z1::{function}<z1_fp32>(Args)") == CONFIG
