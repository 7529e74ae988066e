"""Speeds by width of a row as SVG, in the style of `plots`, under the roof that a copy of the same
bytes is, measured in the same turns; and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING

from flash_helpers.compile.codegen import CONFIG_FOLDER
from flash_helpers.gpu import Device
from flash_helpers.kernel_configs import OPERATIONS, Config
from flash_helpers.measure.plots import (
    BLUE,
    ORANGE,
    TEXT,
    Numbers,
    drawn_figure,
    figure_svg,
    stale_pictures,
)
from flash_helpers.measure.training_plot import FOLDER as PICTURES
from flash_helpers.registry.problem import Problem
from flash_helpers.registry.row_threads import TWICE
from flash_helpers.tune.choices import Choices, load_choices
from flash_helpers.tune.winners import gpu_slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "ours"
TABLES = PurePosixPath("docs/data")

_SIZE = (9.0, 3.2)  # inches
_MARGIN = 1.3  # beside the narrowest and the widest row, as a factor
_MARKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"PyTorch": ("#8957e5", "v"), "torch.compile": (BLUE, "^"), "Triton": ("#2ea043", "s")}
)
_OTHER_MARK = ("#bf4b8a", "D")

Choose = Callable[[Problem, Device], Config]


def width_picture(group: str, gpu: str) -> PurePosixPath:
    """Path in the repository of the picture of a group of problems on a GPU."""
    return PICTURES / f"{group}_{gpu_slug(gpu)}.svg"


def width_table(group: str, gpu: str) -> PurePosixPath:
    """Path in the repository of the picture's numbers as CSV."""
    return TABLES / width_picture(group, gpu).with_suffix(".csv").name


def width_numbers(files: Sequence[Choices], choose: Choose) -> dict[tuple[str, str], Numbers]:
    """Numbers of the pictures, by group and GPU, of the groups whose problems have a width and
    whose operation has a ceiling: the widths, at each the kernel that `choose` takes, and the
    speeds of this kernel, of the copy and of the libraries; None where one was not measured. Of a
    width in several files the last measured counts. Groups of twice the rows have no picture."""
    measured = {
        (m.group, file.provenance.gpu, m.problem["width"]): (m, file)
        for file in sorted(files, key=lambda file: file.provenance.date)
        for m in file.problems
        if "width" in m.problem and OPERATIONS[m.asked.operation].ceiling
        if not m.group.endswith(TWICE)
    }
    found: dict[tuple[str, str], Numbers] = {}
    for (group, gpu, width), (m, file) in sorted(measured.items()):
        operation = OPERATIONS[m.asked.operation]
        kernel = choose(m.asked, file.provenance.device).short_form()
        times = {OURS: m.kernels.get(kernel), operation.ceiling: m.libraries[operation.ceiling]}
        start = {"gpu": gpu, "unit": operation.metric.unit, "widths": [], "kernels": []}
        own = found.setdefault((group, gpu), {**start, "roof": operation.ceiling, "speeds": {}})
        own["widths"].append(width)
        own["kernels"].append(kernel)
        for name, ms in {**times, **m.libraries}.items():
            line = own["speeds"].setdefault(operation.short_name(name), [])
            line += [None] * (len(own["widths"]) - 1 - len(line))
            line.append(None if ms is None else round(operation.metric.speed(m.asked, ms)))
    for own in found.values():
        for line in own["speeds"].values():
            line += [None] * (len(own["widths"]) - len(line))
    return found


def width_csv(numbers: Numbers) -> str:
    """The numbers as CSV: a row for each width."""
    text = io.StringIO()
    speeds = numbers["speeds"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["width", "kernel", *(f"{name} {numbers['unit']}" for name in speeds)])
    writer.writerows(zip(numbers["widths"], numbers["kernels"], *speeds.values(), strict=True))
    return text.getvalue()


def width_svg(numbers: Numbers) -> str:
    """Text of the picture's SVG file. Raises PlotError without matplotlib."""
    return figure_svg(width_figure(numbers), json.dumps(numbers))


def width_figure(numbers: Numbers) -> Figure:
    """Draw the picture. Raises PlotError without matplotlib."""
    widths, speeds = numbers["widths"], numbers["speeds"]
    others = [name for name in speeds if name not in (OURS, numbers["roof"])]

    def draw(axes: Axes) -> None:
        roof = speeds[numbers["roof"]]
        axes.fill_between(widths, roof, color=TEXT, alpha=0.12, linewidth=0)
        axes.plot(widths, roof, color=TEXT, linewidth=4, alpha=0.6, label=numbers["roof"])
        axes.plot(widths, speeds[OURS], color=ORANGE, linewidth=2, marker="o", label=OURS)
        for name in others:
            colour, mark = _MARKS.get(name, _OTHER_MARK)
            axes.plot(widths, speeds[name], color=colour, linewidth=2, marker=mark, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [f"{n:,}" for n in widths])
        axes.minorticks_off()
        axes.set_xlim(widths[0] / _MARGIN, widths[-1] * _MARGIN)
        axes.set_ylim(0, 1.1 * max(filter(None, roof)))
        axes.set_ylabel(numbers["unit"])
        axes.set_xlabel("width of a row")
        axes.figure.legend(
            *axes.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(speeds),
            frameon=False,
        )

    return drawn_figure(draw, _SIZE)


def width_alt(group: str, numbers: Numbers) -> str:
    """Text of the picture for those who do not see it."""
    roof, ours = numbers["speeds"][numbers["roof"]], numbers["speeds"][OURS]
    shares = [f"{100 * own / most:.0f}%" for own, most in zip(ours, roof, strict=True) if own]
    widths = [f"{n:,}" for n, own in zip(numbers["widths"], ours, strict=True) if own]
    return (
        f"{numbers['unit']} by width of a row on {numbers['gpu']}, {group}; of a "
        f"{numbers['roof']} with {widths[0]} columns {shares[0]}, with {widths[-1]} {shares[-1]}"
    )


def stale_widths(root: Path, choose: Choose) -> dict[Path, Numbers]:
    """Files of pictures that are absent or whose numbers differ from the measurements, with the
    numbers to draw. root: of the repository. Raises as `load_choices` does."""
    found = width_numbers(load_choices(root / CONFIG_FOLDER), choose)
    return stale_pictures((root / width_picture(*key), own) for key, own in found.items())


def stale_tables(root: Path, choose: Choose) -> dict[Path, Numbers]:
    """The same of the files of CSV."""
    found = width_numbers(load_choices(root / CONFIG_FOLDER), choose)
    tables = {root / width_table(*key): numbers for key, numbers in found.items()}
    return {
        path: numbers
        for path, numbers in tables.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != width_csv(numbers)
    }
