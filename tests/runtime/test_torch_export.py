"""Modules with attention() and forward() in torch.export and AOTInductor, on CPU tensors."""

import shutil

import pytest
import torch
from torch.export import Dim

import flash_attention

pytestmark = pytest.mark.slow

CONFIG = "o5_bf16_d128_Br128_Bc64_w4"


class Block(torch.nn.Module):
    """Two kinds of calls, and operators of PyTorch around them."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        once = flash_attention.attention(q, k, v)
        return flash_attention.forward(CONFIG, q, k, once + v) * 2


def tensors(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(batch * length)
    return tuple(torch.randn(batch, length, 1, 128, dtype=torch.bfloat16) for _ in range(3))


@pytest.fixture(scope="module")
def exported() -> torch.export.ExportedProgram:
    sizes = {0: Dim("batch", max=8), 1: 128 * Dim("blocks", max=8)}
    return torch.export.export(Block(), tensors(2, 256), dynamic_shapes=dict.fromkeys("qkv", sizes))


def test_an_exported_module_keeps_each_call_as_one_operator(exported) -> None:
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    own = [name for name in called if name.startswith("flash_attention")]
    assert own == ["flash_attention.attention.default", "flash_attention.forward.default"]


def test_a_saved_module_computes_problems_of_other_sizes(exported, tmp_path) -> None:
    torch.export.save(exported, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    for given in (tensors(3, 128), tensors(1, 384)):
        assert torch.equal(loaded(*given), Block()(*given))


@pytest.mark.matrix("overlap")  # g++ takes half a minute; CONFIG and what attention() takes here
def test_a_compiled_package_computes_problems_of_other_sizes(exported, tmp_path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    path = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(tmp_path / "block.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # compiles in less time
    )
    loaded = torch._inductor.aoti_load_package(path)
    for given in (tensors(2, 256), tensors(1, 128)):
        assert torch.equal(loaded(*given), Block()(*given))


def test_a_problem_that_no_kernel_takes_is_refused_when_it_is_exported() -> None:
    given = tensors(1, 100)
    with pytest.raises(ValueError, match="seq_len 100 is not a multiple of B_r"):
        torch.export.export(Block(), given)
