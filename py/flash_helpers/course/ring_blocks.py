"""Blocks about sequences that several GPUs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flash_helpers.console.tables import Table
from flash_helpers.course.arguments import Arguments
from flash_helpers.course.clock_blocks import result_path
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.links import image
from flash_helpers.measure.ring_costs import bytes_table, hidden_table, scale_table
from flash_helpers.measure.ring_speeds import BOTH, RING, RingSpeeds
from flash_helpers.measure.training_plot import picture_path
from flash_helpers.registry.selection import UsageError

TABLES: Mapping[str, Callable[[], Table]] = {
    "bytes": bytes_table,
    "hidden": hidden_table,
    "scale": scale_table,
}


def ring_block(_evidence: Evidence, arguments: Arguments) -> str:
    """A table of the arithmetic, by its name."""
    (name,) = arguments.words
    if name not in TABLES:
        raise UsageError(f"there is no table {name!r}: the tables are {', '.join(TABLES)}")
    return TABLES[name]().markdown()


def rings_block(evidence: Evidence, arguments: Arguments) -> str:
    """The plot of what was measured, whose text tells the speeds of the longest sequence, and the
    table."""
    path = result_path(evidence, arguments)
    found = RingSpeeds.load(path)
    longest = max(speed.tokens for speed in found.speeds)
    told = [
        f"{speed.tflops:.0f} {'causal' if speed.causal else 'without a mask'}"
        for speed in found.speeds
        if (speed.name, speed.tokens, speed.passes) == (RING, longest, BOTH) and speed.tflops
    ]
    alt = (
        f"TFLOP/s of each GPU by tokens per GPU on {found.provenance.gpu}; of a ring with "
        f"{longest:,}, forward and backward: {', '.join(told)}"
    )
    return f"{image(picture_path(path.stem), alt, arguments.page)}\n\n{found.markdown()}"
