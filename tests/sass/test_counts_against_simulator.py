"""Static counts weighted with trip counts, against what the simulator executes of the same kernel's
PTX: those instructions that ptxas makes one for one."""

import functools

import pytest
import torch
from attention_tensors import attention_tensors
from sass_text import ARCHITECTURES, DEFAULT, WITH_TENSOR, WITHOUT_TENSOR, kernel_of
from tiers import each

from flash_helpers.kernel_configs import AttentionForward, Config
from flash_helpers.measure.machine_code import trips
from flash_helpers.measure.predictions import predict_launch
from flash_helpers.operations.attention_forward.inputs import make_inputs
from flash_helpers.registry.mma_sync import LAZY_RESCALE
from flash_helpers.runtime.library import ptx_path
from flash_helpers.runtime.simulator import load_kernel, run_kernel
from flash_helpers.sass.analyse.phases import NotDeterminedError
from flash_helpers.sass.read.opcodes import (
    ASYNC_COPY,
    GLOBAL_STORE,
    LDMATRIX,
    SHARED_LOAD,
    SHARED_STORE,
    SHUFFLE,
    TENSOR,
)

pytestmark = pytest.mark.slow

PTX_OF = {
    TENSOR: ("mma.",),
    LDMATRIX: ("ldmatrix.",),
    ASYNC_COPY: ("cp.async.ca.", "cp.async.cg."),
    SHARED_LOAD: ("ld.shared",),
    SHARED_STORE: ("st.shared",),
    GLOBAL_STORE: ("st.global",),
    SHUFFLE: ("shfl.",),
}
# one block of K and V, so that the loops of the peeled versions are passed by, and three
BLOCKS = (1, 3)
DETERMINED = [config for config in WITH_TENSOR if LAZY_RESCALE not in config.step.traits]
LAZY = [config for config in WITH_TENSOR if LAZY_RESCALE in config.step.traits]


def shape_of(config: Config, blocks: int) -> AttentionForward:
    """So many blocks of two heads, to which `attention_tensors` gives the row stride that the
    kernel is made for."""
    return AttentionForward(batch=1, heads=2, len_q=blocks * config.supports.whole)


@functools.lru_cache
def simulated(config: Config, blocks: int) -> dict[str, int]:
    """Warp instructions of a launch, by PTX opcode."""
    inputs = make_inputs(
        "normal", shape_of(config, blocks), getattr(torch, config.dtype.torch_name)
    )
    kernel = load_kernel(config, ptx_path(config))
    run = run_kernel(config, kernel, attention_tensors(config, *inputs))
    return {name: c.instructions for name, c in run.counters.by_opcode().items()}


@pytest.mark.parametrize("blocks", BLOCKS)
@each(DETERMINED, once=True)
def test_the_text_predicts_what_is_executed(config, blocks):
    executed = simulated(config, blocks)
    expected = {
        name: sum(n for opcode, n in executed.items() if opcode.startswith(prefixes))
        for name, prefixes in PTX_OF.items()
    }
    assert all(expected.values())
    for architecture in ARCHITECTURES:
        kernel = kernel_of(config, architecture)
        record = predict_launch(kernel, config, shape_of(config, blocks))
        assert {name: record.predicted[name] for name in PTX_OF} == expected, architecture


@each(DETERMINED[-2:], once=True)
def test_exponentials_and_barriers_are_predicted_too(config):
    executed = simulated(config, 3)
    exponentials = sum(n for name, n in executed.items() if name.startswith("ex2."))
    barriers = sum(n for name, n in executed.items() if name.startswith("bar.sync"))
    assert exponentials and barriers
    for architecture in ARCHITECTURES:
        kernel = kernel_of(config, architecture)
        opcodes = predict_launch(kernel, config, shape_of(config, 3)).predicted_opcodes
        reciprocals = sum(n for name, n in executed.items() if name.startswith("rcp."))
        assert opcodes["MUFU"] == exponentials + reciprocals
        assert opcodes["BAR"] == barriers


@each(LAZY, once=True)
def test_what_the_data_decide_is_not_predicted(config):
    kernel = kernel_of(config, DEFAULT)
    with pytest.raises(NotDeterminedError, match="branch"):
        predict_launch(kernel, config, shape_of(config, 3))


ONE_OF_EACH_FAMILY = {config.family.name: config for config in WITHOUT_TENSOR}


@pytest.mark.parametrize("config", ONE_OF_EACH_FAMILY.values(), ids=ONE_OF_EACH_FAMILY)
def test_without_tensor_instructions_nothing_is_predicted(config):
    with pytest.raises(NotDeterminedError, match="has no tensor instructions"):
        trips(kernel_of(config, DEFAULT), config, 1000)
