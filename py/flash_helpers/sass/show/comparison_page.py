"""The page of a matrix: its picture above, and below the CUDA, PTX and SASS of each kernel."""

from __future__ import annotations

from pathlib import Path

from flash_helpers.sass.analyse.matrix import KernelFacts, Matrix
from flash_helpers.sass.analyse.ptx_links import ptx_sources
from flash_helpers.sass.show.page import PageKernel, page_html
from flash_helpers.sass.show.picture import overview_html
from flash_helpers.sass.show.source_diff import read_sources


def page_facts(facts: KernelFacts) -> list[tuple[str, str]]:
    """What is told of a kernel above its panes."""
    resources, loop, occupancy = facts.kernel.resources, facts.phases.main_loop, facts.occupancy
    limiters = " and ".join(occupancy.limiters)
    found = [
        ("architecture", facts.kernel.architecture),
        ("dtype", facts.config.dtype.short),
        ("registers a thread", str(resources.registers)),
        ("spilled bytes", f"{resources.spill_store_bytes} out, {resources.spill_load_bytes} in"),
        ("shared memory a block", f"{facts.smem_bytes:,} bytes"),
        ("blocks an SM", f"{occupancy.blocks}, by {limiters}"),
    ]
    if loop is not None:
        found.append(("main loop", f"{loop.work} instructions, {loop.tensor} HMMA"))
        per_hmma = facts.per_hmma(loop.work)
        if per_hmma is not None:
            found.append(("instructions for each HMMA", f"{per_hmma:.2f}"))
    if facts.bound_cycles:
        name, cycles = next(iter(facts.bound_cycles.items()))
        found.append(("bound of an iteration", f"{cycles:,.0f} cycles of the SM, by {name}"))
    if facts.measurement is not None:
        found.append(
            (f"length {facts.measurement.seq_len}", f"{facts.measurement.tflops:.0f} TFLOP/s")
        )
    found.append(("compiled by", str(facts.kernel.compiler)))
    return found


def _page_kernel(name: str, facts: KernelFacts, ptx_folder: Path) -> PageKernel:
    path = ptx_folder / f"{facts.config.short_form()}.ptx"
    return PageKernel(
        kernel=facts.kernel,
        name=name,
        title=f"{name}: {facts.config.step.idea}",
        facts=page_facts(facts),
        ptx_sources=ptx_sources(facts.kernel, path.read_text()) if path.is_file() else {},
    )


def comparison_page(matrix: Matrix, root: Path, ptx_folder: Path) -> str:
    """The page of all kernels of a matrix; the last one is shown first.

    root: of the repository, whose sources are shown where they are at hand. ptx_folder: the PTX
    that ships with the library; it tells the CUDA lines of PTX that became no SASS.
    """
    kernels = [facts.kernel for facts in matrix.rows]
    architectures = ", ".join(dict.fromkeys(kernel.architecture for kernel in kernels))
    return page_html(
        [
            _page_kernel(name, facts, ptx_folder)
            for name, facts in zip(matrix.names, matrix.rows, strict=True)
        ],
        read_sources(kernels, root),
        f"FlashAttention-2 kernels, {architectures}",
        overview_html(matrix) if len(kernels) > 1 else "",
        len(kernels) - 1,
    )
