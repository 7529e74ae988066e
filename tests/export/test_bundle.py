"""A bundle computes what its module does, and a module that needs another operator is refused."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bundles import Ran, bytes_of, compiled_program, simulated
from torch import Tensor, nn

import flash_attention
from flash_attention.multimodal import (
    JointAttention,
    MultimodalTransformer,
    SelfAttention,
    rotary_table,
)
from flash_helpers import gpu
from flash_helpers.compile.compilers import find_compiler
from flash_helpers.compile.toolchain import BuildError
from flash_helpers.export.bundle import ZEROS, Bundle, Place, Zeroing
from flash_helpers.export.bundled_module import device_of, planned, weights_bytes
from flash_helpers.export.memory_plan import ALIGNMENT, Use, placed
from flash_helpers.export.recording import recorded
from flash_helpers.gpu import Device
from flash_helpers.host.errors import HostError
from flash_helpers.host.launches import Options
from flash_helpers.host.run import run_program
from flash_helpers.host.stub_library import FOLDER_VARIABLE as STUB_CACHE
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.simulator import load_kernel

BF16 = torch.bfloat16
WIDTH, HEADS, LENGTH, TOKENS = 32, 2, 16, 8
TARGET = "sm_90a"
HOPPER = Device("a GPU", (9, 0), 2)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3).to(BF16)


X, CONTEXT = drawn(1, LENGTH, WIDTH, seed=1), drawn(1, TOKENS, WIDTH, seed=2)
TABLE = rotary_table(LENGTH, WIDTH // HEADS)
INPUTS = {"x": X, "condition": drawn(1, WIDTH, seed=3), "context": CONTEXT}
MODEL = functools.partial(MultimodalTransformer, feed_forward=64, layers=3, length=LENGTH)


def made(kind: Callable[..., nn.Module], **options: Any) -> Any:
    """A module with weights that are no constants, for inference."""
    torch.manual_seed(0)
    module = kind(WIDTH, HEADS, backend="torch", **options)
    for name, weights in module.named_parameters():
        if "norm" in name:
            nn.init.normal_(weights, mean=1.0, std=0.2)
        elif "modulation" in name:
            nn.init.normal_(weights, std=0.3)
    return module.to(BF16).eval()


def with_kernels(module: Any) -> Any:
    for part in module.modules():
        if "backend" in vars(part):
            part.backend = "kernels"
    return module


def bundle_of(module: nn.Module, given: Any, device: Device = HOPPER) -> tuple[Bundle, bytes]:
    bundle, weights = planned(recorded(module, given), TARGET, device)
    return bundle, weights_bytes(bundle, weights)


def run(module: nn.Module, inputs: Mapping[str, Tensor], *, late: bool = False) -> Ran:
    """A bundle of the module, run in the simulator."""
    bundle, weights = bundle_of(module, inputs)

    def kernel_of(name: str) -> Any:
        config, function = bundle.kernels[name]
        return load_kernel(config, ptx_path(config, function), function)

    text = bundle.text(dict.fromkeys(bundle.kernels, "S"))
    return simulated(text, weights, kernel_of, inputs, late=late)


def check(
    kind: Callable[..., nn.Module], inputs: Mapping[str, Tensor], *, late: bool = False
) -> Ran:
    """Every output is as right as PyTorch's in bf16, within a factor of 2."""
    module = made(kind)
    usual = module(**inputs)
    found = run(with_kernels(module), inputs, late=late)
    right = made(kind).double()(**{n: x.double() for n, x in inputs.items()})
    if isinstance(usual, Tensor):
        usual, right = (usual,), (right,)
    assert len(found.outputs) == len(usual)
    for own, by_torch, exact in zip(found.outputs.values(), usual, right, strict=True):
        assert own.shape == by_torch.shape
        assert own.dtype == by_torch.dtype
        error, of_torch = ((y.double() - exact).norm() / exact.norm() for y in (own, by_torch))
        assert error < 2 * of_torch + 1e-3
    return found


def test_self_attention() -> None:
    found = check(SelfAttention, {"x": X, "rotary": TABLE})
    assert len(found.launches) >= 3
    assert found.arena > 0


def test_joint_attention() -> None:
    found = check(JointAttention, {"x": X, "context": CONTEXT, "rotary": TABLE})
    assert [*found.outputs] == ["output0", "output1"]


def test_a_model() -> None:
    """Three layers, of which the last computes no context: every operator has a kernel. Modulation
    of two layers runs beside the first one: here as late as it may, in the program at once."""
    found = check(MODEL, INPUTS, late=True)
    assert [*found.outputs] == ["output"]
    assert len(found.launches) == 3 * 10
    assert found.on_side == 2


class Twice(nn.Module):
    """attention() of its own output, by tensor maps on Hopper, and a call that nothing reads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        once = flash_attention.attention(q, k, v)
        flash_attention.attention(once, k, v)
        return {"twice": flash_attention.attention(once, k, v)}


def test_kernels_with_tensor_maps() -> None:
    q, k, v = (drawn(1, 64, 1, 128, seed=seed) for seed in range(3))
    found = run(Twice(), {"q": q, "k": k, "v": v})
    assert [name.partition("_")[0][0] for name in found.launches] == ["g", "g"]
    assert found.tensor_maps > 0
    wanted = q
    for _ in range(2):
        scores = wanted[0, :, 0].float() @ k[0, :, 0].float().T / 128**0.5
        wanted = (scores.softmax(-1) @ v[0, :, 0].float()).to(BF16)[None, :, None]
    assert torch.allclose(found.outputs["twice"].float(), wanted.float(), atol=0.03)


class Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention.attention(q, k, v, window_size=(-1, 0))


def test_a_counter_is_zeroed_before_each_launch() -> None:
    q = torch.empty(1, 4096, 4, 128, dtype=BF16)
    bundle, _ = bundle_of(Causal(), [q, q, q])
    assert [type(step).__name__ for step in bundle.steps] == ["Zeroing", "PlacedLaunch"]
    zeroing, launch = bundle.steps
    assert isinstance(zeroing, Zeroing)
    assert zeroing.place in launch.places.values()


class Decoded(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
        for _ in range(2):
            q = flash_attention.decode(q, k, v, cache_seqlens=lengths)
        return q


def test_a_counter_that_kernels_leave_as_zeros_is_zeroed_once() -> None:
    q, k = drawn(2, 1, 8, 128), drawn(2, 512, 1, 128)
    lengths = torch.tensor([5, 512], dtype=torch.int32)
    bundle, _ = bundle_of(Decoded(), {"q": q, "k": k, "v": k, "lengths": lengths})
    assert not [step for step in bundle.steps if isinstance(step, Zeroing)]
    assert bundle.zeros_bytes > 0
    for step in bundle.launches:
        assert Place(ZEROS) in step.places.values()


# -- what is refused -------------------------------------------------------------------------------


class Part(nn.Module):
    """A module with a part that a function computes."""

    def __init__(self, function: Callable[..., Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Identity()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner(x))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Part(nn.functional.silu), "aten::silu in the module itself computes, and no kernel"),
        (Part(lambda x: x, nn.Linear(WIDTH, 8).to(BF16)), " in module inner computes, and no"),
        (Part(torch.clone), "aten::clone in the module itself computes"),
        (Part(lambda x: x + torch.rand(1)), "aten::rand in the module itself draws random"),
        (Part(lambda x: x.add_(1)), "aten::add_ in the module itself writes into a tensor"),
        (Part(lambda x: bool(x.sum())), "aten::sum in the module itself computes"),
        (Part(lambda x: x.mT), "output is an input or a constant, which no kernel writes"),
        (Part(lambda x: torch.ones(3)), "output is an input or a constant"),
        (Part(lambda x: None), "forward returns no tensor"),
    ],
    ids=range(9),
)
def test_what_no_kernel_computes_is_refused(module, words) -> None:
    with pytest.raises(ValueError, match=words):
        bundle_of(module.eval(), [X])


def test_results_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="output1 is a int: a bundle returns tensors"):
        bundle_of(Part(lambda x: (x, 3)), [X])
    with pytest.raises(TypeError, match="x has tensors inside: give each as an argument"):
        bundle_of(Part(lambda x: x), [[X, X]])


def test_inputs_and_outputs_have_names() -> None:
    with pytest.raises(TypeError, match=r"the inputs are one tensor: pass a list of it, \[x\]"):
        bundle_of(Part(lambda x: x), X)
    with pytest.raises(ValueError, match="output 'a b' is no name: use letters, digits and _"):
        bundle_of(Part(lambda x: {"a b": x}), [X])


def test_a_part_of_a_tensor_is_no_output() -> None:
    inner = with_kernels(made(SelfAttention))
    with pytest.raises(ValueError, match="output is a part of a tensor, of shape"):
        bundle_of(Part(lambda x: x[:, 1:], inner), [X])
    with pytest.raises(ValueError, match="output1 and output0 share memory: return one of them"):
        bundle_of(Part(lambda x: (x, x[0]), inner), [X])


def test_a_block_with_an_operator_of_pytorch_is_refused_by_its_module() -> None:
    model = with_kernels(made(MODEL, layers=1, activation="swiglu"))
    with pytest.raises(ValueError, match=r"aten::\w+ in module blocks\.0\S* computes, and no"):
        bundle_of(model, INPUTS)


def test_wrong_usage_is_refused(tmp_path) -> None:
    module = made(SelfAttention)
    with pytest.raises(TypeError, match=r"module is a function: pass a torch\.nn\.Module"):
        flash_attention.export_bundle(check, [X], tmp_path)
    with pytest.raises(ValueError, match="sm_75"):
        flash_attention.export_bundle(module, [X], tmp_path / "b", arch="75")
    with pytest.raises(ValueError, match=r"multiprocessors of a GPU of sm_100 are not known"):
        flash_attention.export_bundle(module, [X], tmp_path / "b", arch="100")
    assert not [*tmp_path.iterdir()]


def test_the_module_stays_as_it_is() -> None:
    module = made(SelfAttention).train()
    with pytest.raises(ValueError, match="input x has shape"):
        flash_attention.export_bundle(module, [X[:0]], "nowhere")
    assert module.training
    assert module.backend == "torch"


def test_a_device_is_made_for_a_number_of_multiprocessors() -> None:
    assert device_of(TARGET, None).sms == gpu.MOST_SMS[90]
    assert device_of(TARGET, 114) == Device(TARGET, (9, 0), 114)
    assert device_of("sm_100", 148).capability == (10, 0)


# -- memory ----------------------------------------------------------------------------------------


def test_buffers_share_memory_unless_they_are_used_at_a_time() -> None:
    uses = [Use(1000, 0, 1), Use(500, 1, 2), Use(900, 2, 3), Use(256, 0, 3), Use(1, 3, 3)]
    offsets, size = placed(uses)
    for a, one in enumerate(uses):
        assert offsets[a] % ALIGNMENT == 0
        assert offsets[a] + one.bytes <= size
        for b, other in enumerate(uses[:a]):
            if one.meets(other):
                apart = offsets[a] >= offsets[b] + other.bytes
                assert apart or offsets[b] >= offsets[a] + one.bytes
    assert size == 1024 + 512 + 256


def test_layers_do_not_need_more_memory() -> None:
    """The arena is that of one layer: what a layer has read is overwritten by the next ones."""

    class Layers(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(with_kernels(made(SelfAttention)) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    two, six = (bundle_of(Layers(count), [X])[0] for count in (2, 6))
    assert len(six.launches) == 3 * len(two.launches)
    assert six.arena_bytes == two.arena_bytes
    assert six.weights_bytes == 3 * two.weights_bytes


# -- the program -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder with a bundle of a model, its inputs and what PyTorch computes."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error).splitlines()[0])
    folder = tmp_path_factory.mktemp("bundle")
    module = made(MODEL)
    flash_attention.export_bundle(module, INPUTS, folder, arch="90a", sms=2)
    for name, x in INPUTS.items():
        (folder / f"{name}.in").write_bytes(bytes_of(x))
    (folder / "output.ref").write_bytes(bytes_of(module(**INPUTS)))
    return folder


@pytest.mark.slow
def test_the_program_tells_that_there_is_no_driver(exported) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is a driver")
    program = compiled_program(exported)
    result = subprocess.run([program, exported, exported], capture_output=True, text=True)
    assert result.returncode == 3
    assert "no CUDA driver that can launch the kernel: libcuda.so.1" in result.stderr


@pytest.mark.slow
def test_the_program_runs_in_the_simulator(exported, capfd, monkeypatch) -> None:
    monkeypatch.setenv(STUB_CACHE, str(exported / "stub"))
    monkeypatch.setattr(gpu, "MOST_SMS", {**gpu.MOST_SMS, 90: 2, 80: 2})
    program = compiled_program(exported)

    def ran(target: str, *arguments: str) -> tuple[int, str, str]:
        try:
            options = Options(output=sys.stdout)
            ended = run_program(program, [str(exported), *arguments], target, options)
        except HostError as error:
            pytest.skip(str(error).splitlines()[0])
        return ended.status, *capfd.readouterr()

    status, out, err = ran(TARGET, str(exported), "0", "ptx")
    assert (status, err) == (0, "")
    assert out.startswith("output: right, the error is 0.0")
    assert out.endswith("30 launches\n")
    assert (exported / "output.out").stat().st_size == X.nbytes

    status, _, err = ran("sm_80", str(exported), "0", "ptx")
    assert status == 2
    assert 'capability 8.0 and the bundle is for sm_90a: export it with arch="80"' in err

    monkeypatch.setattr(gpu, "MOST_SMS", {**gpu.MOST_SMS, 90: 1})
    status, _, err = ran(TARGET, str(exported), "0", "ptx")
    assert status == 2
    assert "has 1 streaming multiprocessors and the bundle is made for 2: export it with" in err

    monkeypatch.setattr(gpu, "MOST_SMS", {**gpu.MOST_SMS, 90: 2})
    other = exported / "other"
    other.mkdir()
    (other / "x.in").write_bytes(bytes_of(X)[2:])
    status, _, err = ran(TARGET, str(other), "0", "ptx")
    assert status == 2
    assert "x.in has 1022 bytes and the bundle takes 1024, bfloat16 (1, 16, 32): give such" in err
