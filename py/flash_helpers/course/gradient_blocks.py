"""Blocks about trainings: their losses."""

from __future__ import annotations

from flash_helpers.course.arguments import Arguments
from flash_helpers.course.clock_blocks import result_path
from flash_helpers.course.evidence import Evidence
from flash_helpers.course.links import image
from flash_helpers.measure.training_plot import STRETCH, picture_path
from flash_helpers.measure.training_runs import FLOAT32, LAB, PYTORCH, TrainingRuns


def training_block(evidence: Evidence, arguments: Arguments) -> str:
    """The plot of trainings, whose text tells the last losses, and the table with distances."""
    path = result_path(evidence, arguments)
    runs = TrainingRuns.load(path)
    told = []
    for d_head in runs.d_heads:
        named = runs.by_attention(d_head)
        last = (f"{named[name][0].losses[-1]:.3f} with {name}" for name in (LAB, PYTORCH, FLOAT32))
        told.append(f"d_head {d_head}, last loss {', '.join(last)}")
    alt = f"Losses by step on {runs.provenance.gpu}, and their distances: {'; '.join(told)}"
    lower = f"The lower plots have the distance over each {STRETCH} steps"
    lower += ": the median of the trainings and their range." if runs.times > 1 else "."
    return f"{image(picture_path(path.stem), alt, arguments.page)}\n\n{runs.markdown()} {lower}"
