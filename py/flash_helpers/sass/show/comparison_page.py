"""The page of a matrix: its picture above, and below the CUDA, PTX and SASS of each kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flash_helpers.console.tables import known
from flash_helpers.sass.analyse.matrix import KernelFacts, Matrix
from flash_helpers.sass.analyse.ptx_links import ptx_sources
from flash_helpers.sass.show.page import PageKernel, page_html
from flash_helpers.sass.show.picture import overview_html


def page_facts(facts: KernelFacts, timed: str) -> list[tuple[str, str]]:
    """Facts of a kernel above its panes. `timed`: the launch of the speed, in words."""
    resources, loop, occupancy = facts.kernel.resources, facts.phases.main_loop, facts.occupancy
    stored, loaded = resources.spill_store_bytes, resources.spill_load_bytes
    found = [
        ("architecture", facts.kernel.architecture),
        *((name, value) for name, value in facts.identity.items() if name == "dtype"),
        ("registers per thread", str(resources.registers)),
        ("spilled bytes", f"{known(stored)} out, {known(loaded)} in"),
        ("shared memory per block", f"{facts.smem_bytes:,} bytes"),
    ]
    if occupancy is not None:
        limiters = " and ".join(occupancy.limiters)
        found.append(("blocks per SM", f"{occupancy.blocks}, by {limiters}"))
    if loop is not None:
        found.append(("main loop", f"{loop.work} instructions, {loop.tensor} HMMA"))
        per_hmma = facts.per_hmma(loop.work)
        if per_hmma is not None:
            found.append(("instructions per HMMA", f"{per_hmma:.2f}"))
    if facts.bound_cycles:
        name, cycles = next(iter(facts.bound_cycles.items()))
        found.append(("bound of an iteration", f"{cycles:,.0f} cycles of the SM, by {name}"))
    if facts.measurement is not None:
        found.append((timed, facts.measurement.speed_text()))
    found.append(("compiled by", str(facts.kernel.compiler)))
    return found


def comparison_page(
    matrix: Matrix, ptx: Sequence[str], sources: Mapping[str, str], title: str
) -> str:
    """The page of all kernels of a matrix; the last one is shown first.

    `ptx`: PTX of each kernel, as nvcc wrote it, or ""; it has the CUDA lines of PTX that became no
    SASS. `sources`: as in `page.page_html`. `title`: title to which the architectures are added.
    """
    kernels = [
        PageKernel(
            kernel=facts.kernel,
            name=name,
            title=facts.note,
            facts=page_facts(facts, matrix.timed),
            ptx_sources=ptx_sources(facts.kernel, text) if text else {},
        )
        for (name, facts), text in zip(matrix.named, ptx, strict=True)
    ]
    architectures = ", ".join(dict.fromkeys(page.kernel.architecture for page in kernels))
    return page_html(
        kernels,
        sources,
        f"{title}, {architectures}",
        overview=overview_html(matrix) if len(kernels) > 1 else "",
        shown=len(kernels) - 1,
    )
