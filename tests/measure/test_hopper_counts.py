"""Counts of the simulator beside those that Nsight Compute had of the same launches on an H200."""

import functools
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from fake_backend import ROOT

from flash_helpers.kernel_configs import AttentionForward
from flash_helpers.measure import counts as compared_counts
from flash_helpers.measure.counts import ONE_FOR_ONE, CountedKernel
from flash_helpers.measure.predictions import simulated_counts
from flash_helpers.ptx import Counters, DeviceMemory, TensorMap, load_ptx

sys.path.insert(0, str(ROOT / "benchmarks"))

import hopper_kernels as tool
from hopper_cases import WHOLE

COUNTED = {launch.case: launch for launch in tool.HopperKernels.load(ROOT / tool.RESULTS).launches}
PAGE = re.sub(
    r"\[([^]]*)\]\([^)]*\)", r"\1", (ROOT / "docs" / "simulator.md").read_text()
)  # without links


@functools.cache
def simulate(name: str) -> Counters:
    case, memory = WHOLE[name], DeviceMemory()
    addresses = {name: memory.upload(array) for name, array in case.buffers.items()}
    kernel = load_ptx(tool.KERNELS / f"{case.module}.ptx").kernel(case.kernel)
    args = case.bind(addresses, TensorMap.encode)
    cluster = case.cluster if max(case.cluster) > 1 else None
    run = kernel.launch(case.grid, case.block, case.shared_bytes, args, memory, cluster=cluster)
    return run.counters


@dataclass(frozen=True)
class Quantity:
    """A count that both have.

    gpu: of Nsight Compute, a metric without its ending .sum, or the start of the names of opcodes;
    several are added. by_threads: opcodes are counted by threads rather than by warps. ptx: a
    regular expression that finds the opcodes of which `field` is counted.
    """

    label: str
    gpu: tuple[str, ...]
    ptx: str
    field: str = "instructions"
    by_threads: bool = False

    def on_gpu(self, name: str) -> int:
        launch = COUNTED[name]
        opcodes = launch.true if self.by_threads else launch.opcodes
        metrics = (int(launch.counts.get(f"{metric}.sum", 0)) for metric in self.gpu)
        return sum(metrics) + sum(
            int(n) for opcode, n in opcodes.items() if opcode.startswith(self.gpu)
        )

    def simulated(self, name: str) -> int:
        opcodes = simulate(name).by_opcode().items()
        return sum(getattr(c, self.field) for opcode, c in opcodes if re.match(self.ptx, opcode))


TMA, L1 = r"cp\.(reduce\.)?async\.bulk\.(tensor\.\dd\.)?", "l1tex__m_"
LOADS = TMA + r"shared::cluster\.global\."
SASS = "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_"
OPS = "sm__ops_path_tensor_op_hgmma_src_"
LOADED = "sectors of TMA loads"
LDS = "wavefronts of shared loads"
QUANTITIES = (
    Quantity("operations of `wgmma`", (f"{OPS}bf16_dst_fp32", f"{OPS}fp16"), "wgmma", "mma_flops"),
    Quantity(
        "bytes of its operands", ("sm__sass_data_bytes_mem_shared_op_gmma",), "wgmma", "wgmma_bytes"
    ),
    Quantity("`wgmma.fence`", ("WARPGROUP.ARRIVE",), r"wgmma\.fence"),
    Quantity("`wgmma.wait_group`", ("WARPGROUP.DEPBAR",), r"wgmma\.wait_group"),
    Quantity("TMA loads", ("UTMALDG", "UBLKCP.S.G"), LOADS, "tma_boxes", by_threads=True),
    Quantity(
        "TMA stores", ("UTMASTG", "UBLKCP.G.S"), rf"(?!.*reduce){TMA}global", "tma_boxes",
        by_threads=True,
    ),
    Quantity("TMA reductions", ("UBLKRED",), r"cp\.reduce", "tma_boxes", by_threads=True),
    Quantity(
        "TMA prefetches", ("UTMAPF", "UBLKPF"), r"cp\.async\.bulk\.prefetch", "tma_boxes",
        by_threads=True,
    ),
    Quantity(
        "copies between blocks", ("UBLKCP.S.S",), TMA + r"shared::cluster\.shared::cta",
        "tma_boxes", by_threads=True,
    ),
    Quantity(LOADED, (f"{L1}xbar2l1tex_read_sectors_mem_global_op_tma_ld",), LOADS, "tma_sectors"),
    Quantity(
        "sectors of TMA stores", (f"{L1}l1tex2xbar_write_sectors_mem_global_op_tma_st",),
        rf"(?!.*reduce){TMA}global", "tma_sectors",
    ),
    Quantity(
        "sectors of TMA reductions", (f"{L1}l1tex2xbar_write_sectors_mem_global_op_tma_red",),
        r"cp\.reduce", "tma_sectors",
    ),
    Quantity("`cp.async.bulk.wait_group`", ("DEPBAR",), r"cp\.async\.bulk\.wait_group"),
    Quantity("barriers of a block", ("BAR.",), r"bar(rier)?\.(sync|arrive)", "barriers"),
    Quantity("arrivals of a cluster", ("UCGABAR_ARV",), r"barrier\.cluster\.arrive"),
    Quantity("barriers of a cluster", ("UCGABAR_WAIT",), r"barrier\.cluster\.wait", "barriers"),
    Quantity("registers given back", ("USETMAXREG.DEALLOC",), r"setmaxnreg\.dec"),
    Quantity("`ldmatrix`", ("LDSM",), "ldmatrix"),
    Quantity("`stmatrix`", ("STSM",), "stmatrix"),
    Quantity("wavefronts of `ldmatrix`", (f"{SASS}ldsm",), "ldmatrix", "shared_wavefronts"),
    Quantity("wavefronts of `stmatrix`", (f"{SASS}stsm",), "stmatrix", "shared_wavefronts"),
    Quantity(LDS, (f"{SASS}ld",), r"ld\.shared", "shared_wavefronts"),
    Quantity("wavefronts of shared stores", (f"{SASS}st",), r"st\.shared", "shared_wavefronts"),
)  # fmt: skip

# What the GPU counts more; the page says why.
MORE: Mapping[tuple[str, str], int] = {
    # Rows that begin 16 bytes into a sector: in each of 7 steps 100 of A twice, for one block each,
    # and 68 of B for two.
    ("gemm_cluster_bf16", LOADED): 7 * (2 * 100 + 2 * 68),
    ("cluster_softmax", LDS): -80,
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_launch(name) -> None:
    on_gpu = {q.label: q.on_gpu(name) for q in QUANTITIES}
    assert {q.label: q.simulated(name) + MORE.get((name, q.label), 0) for q in QUANTITIES} == on_gpu


@pytest.mark.parametrize("name", [name for name in WHOLE if name.startswith("attention")])
class TestAttention:
    """Quantities that are compared in family hopper, in other kernels of that design."""

    def test_counters(self, name) -> None:
        counts = simulated_counts(simulate(name))
        compared = [q for q in compared_counts.QUANTITIES if q.tolerance == 0]
        record = CountedKernel(
            name=name,
            problem=AttentionForward(1, 1, 1).record(),
            predicted=counts,
            hardware=COUNTED[name].counts,
        )
        found = {q.name: record.counted(q) for q in compared if record.has(q)}
        assert len(found) == 7
        assert all(ours == theirs for ours, theirs in found.values()), found

    def test_opcodes(self, name) -> None:
        executed = simulate(name).by_opcode().items()
        for opcode, pattern in ONE_FOR_ONE.items():
            ours = sum(c.instructions for ptx, c in executed if re.match(pattern, ptx))
            theirs = (n for o, n in COUNTED[name].opcodes.items() if o.split(".")[0] == opcode)
            assert ours == sum(theirs) > 0, opcode


@pytest.mark.parametrize("name", WHOLE)
def test_products_by_shape(name) -> None:
    found: Counter[str] = Counter()
    for opcode, counts in simulate(name).by_opcode().items():
        if shape := re.search(r"\.m64n(\d+)k16\.f32\.(b?f16)", opcode):
            of = ".BF16" if shape[2] == "bf16" else ""
            found[f"HGMMA.64x{shape[1]}x16.F32{of}"] += counts.wgmma
    opcodes = COUNTED[name].opcodes
    assert found == {o: n for o, n in opcodes.items() if o.startswith("HGMMA")}


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda q: q.label)
def test_the_page_says_how_many_are_equal(quantity) -> None:
    there = [name for name in WHOLE if quantity.on_gpu(name) or quantity.simulated(name)]
    equal = sum((name, quantity.label) not in MORE for name in there)
    counters = " + ".join(f"`{name}`" for name in quantity.gpu)
    assert there
    assert f"| {quantity.label} | {equal} of {len(there)} | {counters} |" in PAGE
