"""Tensors that begin at any element: those that no kernel reads in chunks of several elements."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tiers import committed

from flash_helpers.check.errors import measure_error
from flash_helpers.check.tensors import tensors_for, unwritten
from flash_helpers.kernel_configs import FAMILIES, Config, Element, Problem
from flash_helpers.operations.attention_forward.supports import AttentionSupports
from flash_helpers.registry.family import Family
from flash_helpers.registry.problem import Role, Tensor
from flash_helpers.runtime.backend import find_backend
from flash_helpers.runtime.tensors import check_alignment, torch_dtype

ATTENTION = [
    family
    for family in FAMILIES.values()
    if isinstance(next(iter(committed(family.operation))).supports, AttentionSupports)
]


def read_by_elements(config: Config, problem: Problem) -> list[Tensor]:
    """The tensors of a call that kernels do not copy in chunks."""
    used = [x for x in problem.tensors if x.role is not Role.OPTIONAL]
    return [x for x in used if x.name not in config.supports.of_heads]


def least_problems(family: Family[Any]) -> Iterator[Any]:
    """For each tensor that a family's last step reads by elements the least corner that has it."""
    *_, last = family.steps.values()
    least: dict[str, tuple[int, Config, Problem]] = {}
    for config in committed(family.operation):
        for problem in config.supports.corners() if config.step is last else ():
            for tensor in read_by_elements(config, problem):
                cost = problem.operations
                if tensor.name not in least or cost < least[tensor.name][0]:
                    least[tensor.name] = (cost, config, problem)
    for _, config, problem in dict.fromkeys(least.values()):
        yield pytest.param(config, problem, id=f"{config.short_form()} {problem}")


def one_behind(tensor: Tensor) -> torch.Tensor:
    """A contiguous tensor that begins an element behind a multiple of 16 bytes, not yet written."""
    elements = math.prod(tensor.shape) + 1
    memory = torch.full((elements,), unwritten(tensor), dtype=torch_dtype(tensor.element))
    found = memory[1:].view(tensor.shape)
    assert found.data_ptr() % 16 == tensor.element.bytes
    return found


def outputs(
    config: Config, problem: Problem, given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The outputs, which begin at any element where they may."""
    tensors = tensors_for(config, problem, given)
    for tensor in read_by_elements(config, problem):
        tensors[tensor.name] = one_behind(tensor).copy_(tensors[tensor.name])
    call = problem.arranged(tensors), problem.call_options()
    assert find_backend("cpu").execute(config, *call).faults == ()
    return {tensor.name: tensors[tensor.name] for tensor in problem.outputs}


@pytest.mark.parametrize(
    ("config", "problem"), [each for family in ATTENTION for each in least_problems(family)]
)
def test_tensors_that_are_read_by_elements_begin_at_any(config, problem) -> None:
    operation = config.family.operation
    given = operation.part("inputs").draw("normal", problem)
    right = operation.part("reference").reference(problem, given)
    for name, found in outputs(config, problem, given).items():
        error = measure_error(found, right.expected[name])
        assert error.within(right.bounds[name]), f"{name}: {error}"


def test_integers_are_among_them() -> None:
    found = {
        tensor.name
        for family in ATTENTION
        for case in least_problems(family)
        for tensor in read_by_elements(*case.values)
        if tensor.element is Element.INT32
    }
    places = {"cache_seqlens", "block_table", "cache_batch_idx"}
    assert found == {"cu_seqlens_q", "cu_seqlens_k", *places}


def test_the_tensor_that_lies_wrongly_is_named_with_its_own_limit() -> None:
    q, lengths = torch.zeros(9), torch.zeros(9, dtype=torch.int32)
    check_alignment({"q": 16, "cache_seqlens": 4}, {"q": q, "cache_seqlens": lengths[1:]})
    with pytest.raises(ValueError, match=r"q starts at address 0x\w+4, not a multiple of 16 bytes"):
        check_alignment({"q": 16, "cache_seqlens": 4}, {"q": q[1:], "cache_seqlens": lengths})
