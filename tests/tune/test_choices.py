"""The choice of a kernel from times on a grid of problems."""

from dataclasses import replace
from pathlib import Path

import pytest

from flash_helpers.compile.codegen import CONFIG_FOLDER
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import FAMILIES, OPERATIONS, AttentionForward, Element
from flash_helpers.measure.choice_table import grid_tables
from flash_helpers.measure.results import Protocol
from flash_helpers.operations.attention_forward.grid import distance
from flash_helpers.tune import best
from flash_helpers.tune.best import config_for
from flash_helpers.tune.choices import Choices, MeasuredProblem, competitors, load_choices

FILES = load_choices(Path(__file__).resolve().parents[2] / CONFIG_FOLDER)
H100 = largest_device(90)
MOST_BEHIND = 0.02
GRID = {
    f"{operation.name} {name}": problems
    for operation in OPERATIONS.values()
    if operation.has_part("grid")
    for name, problems in operation.part("grid").GROUPS.items()
}
SHORT = AttentionForward(64, 12, 77)
LONG = AttentionForward(4, 16, 16384)
GENERAL, HOPPER = FAMILIES["general"], FAMILIES["hopper"]


@pytest.fixture
def measured() -> Choices:
    """A narrow tile is the fastest on short problems, and a step of family hopper on long ones."""
    general = [c for c in competitors(SHORT) if c.family is GENERAL]
    narrow, wide = general[4], general[0]
    hopper = next(c for c in competitors(LONG) if c.family is HOPPER)
    times = {SHORT: {narrow: 1.0, wide: 1.01}, LONG: {narrow: 9.0, hopper: 8.0}}
    rows = (
        MeasuredProblem(
            *("usual", problem.record(), {c.short_form(): ms for c, ms in own.items()}),
            *({"fa3": 2.0}, 1700.0, {}),
        )
        for problem, own in times.items()
    )
    return replace(FILES[0], protocol=Protocol(), problems=tuple(rows))


@pytest.mark.parametrize(
    "file", FILES, ids=lambda file: f"{file.problems[0].asked.operation} {file.provenance.gpu}"
)
def test_what_is_taken_is_hardly_behind_the_fastest_anywhere_on_the_grid(file) -> None:
    asked = {problem for group in GRID.values() for problem in group}
    assert {measured.asked for measured in file.problems} <= asked
    device = file.provenance.device
    behind = {m.asked: m.behind(config_for(m.asked, device)) for m in file.problems}
    assert {problem: by for problem, by in behind.items() if not by <= MOST_BEHIND} == {}


@pytest.mark.parametrize("group", GRID)
def test_what_competes_takes_the_problem(group) -> None:
    for problem in GRID[group]:
        found = competitors(problem)
        assert len(found) > 1 and len({*found}) == len(found)
        assert not any(config.refusal(problem) for config in found)


def test_the_nearest_problem_gives_the_order(measured) -> None:
    short, _ = measured.problems
    assert measured.ranked(SHORT, H100) == [*short.configs]
    assert measured.ranked(replace(SHORT, heads=16, kv_heads=16), H100) == [*short.configs]
    longer = AttentionForward(2, 16, 20000)
    assert [config.family for config in measured.ranked(longer, H100)] == [HOPPER, GENERAL]
    assert measured.without(LONG).problems == (short,)


def test_a_file_of_other_head_sizes_comes_behind_those_of_other_gpus(measured, monkeypatch) -> None:
    wide = replace(SHORT, d_head=256, d_v=256)
    config = competitors(wide)[1]
    row = replace(measured.problems[0], problem=wide.record(), kernels={config.short_form(): 1.0})
    other = replace(measured.provenance, gpu="another")
    files = (measured, replace(measured, provenance=other, problems=(row,)))
    monkeypatch.setattr(best, "load_choices", lambda folder: files)
    assert config_for(wide, other.device) == config
    for gpu in (other.device, measured.provenance.device):
        assert config_for(SHORT, gpu) == next(iter(measured.problems[0].configs))
    assert not files[1].tells_of(SHORT) and files[1].tells_of(replace(wide, causal=True))


def test_of_several_files_of_a_gpu_that_with_the_nearest_problem_counts(
    measured, monkeypatch
) -> None:
    short, long = measured.problems
    files = tuple(replace(measured, problems=(each,)) for each in (long, short))
    monkeypatch.setattr(best, "load_choices", lambda folder: files)
    gpu = measured.provenance.device
    assert config_for(SHORT, gpu) == next(iter(short.configs))
    assert config_for(LONG, gpu) == measured.ranked(LONG, gpu)[0] != next(iter(short.configs))


def test_a_much_nearer_problem_of_another_gpu_counts_before_one_of_this_gpu(
    measured, monkeypatch
) -> None:
    short, long = measured.problems
    other = replace(measured.provenance, gpu="another")
    files = (
        replace(measured, problems=(long,)),
        replace(measured, provenance=other, problems=(short,)),
    )
    monkeypatch.setattr(best, "load_choices", lambda folder: files)
    gpu = measured.provenance.device
    assert config_for(SHORT, gpu) == next(iter(short.configs))
    between = AttentionForward(16, 12, 1024)
    assert distance(between, SHORT) < distance(between, LONG) < distance(between, SHORT) + 3
    own, others = (file.ranked(between, gpu)[0] for file in files)
    assert config_for(between, gpu) == own != others
    assert config_for(between, other.device) == others


@pytest.mark.parametrize("operation", ["norm", "norm_backward"])
@pytest.mark.parametrize("function", ["layer", "rms"])
def test_a_file_of_fp32_gives_calls_in_fp32_their_config(
    operation: str, function: str, measured, monkeypatch
) -> None:
    files = []
    backward = "_backward" if operation == "norm_backward" else ""
    for dtype in (Element.BF16, Element.FP32):
        group = f"{function}_norm{backward}_{dtype.short}"
        problems = OPERATIONS[operation].part("grid").GROUPS[group]
        assert {problem.tensor("x").bytes for problem in problems} == {2**28}
        rows = tuple(
            replace(
                measured.problems[0],
                group=group,
                problem=problem.record(),
                kernels={config.short_form(): 1.0 + n for n, config in enumerate(own)},
            )
            for problem in problems
            for own in (competitors(problem)[:: 1 if dtype is Element.BF16 else -1],)
        )
        files.append(replace(measured, problems=rows))
    monkeypatch.setattr(best, "load_choices", lambda folder: tuple(files))
    gpu = measured.provenance.device
    for row in files[1].problems:
        wanted = competitors(row.asked)[-1]
        assert config_for(row.asked, gpu) == wanted
        assert config_for(replace(row.asked, rows=row.asked.rows * 3 // 4), gpu) == wanted


def test_a_config_stands_for_the_one_of_its_tile_that_takes_the_problem(measured) -> None:
    asked = AttentionForward(64, 12, 77, dtype=Element.FP16, sinks=True, window_left=10)
    found = measured.ranked(asked, H100)
    own = [*measured.problems[0].configs]
    assert [(c.B_r, c.B_c, c.Q_slots) for c in found] == [(c.B_r, c.B_c, c.Q_slots) for c in own]
    assert not any(config.refusal(asked) for config in found)


def test_kernels_are_ahead_where_the_nearest_problem_says_so(measured, monkeypatch) -> None:
    long = measured.problems[1]  # libraries take 2 ms, kernels 8, and 1 on the other
    gpu = measured.provenance.device
    monkeypatch.setattr(best, "load_choices", lambda folder: (measured,))
    monkeypatch.setattr(best, "_gpu", lambda device: gpu if device == "cuda" else None)
    assert best.is_ahead(SHORT, "cuda") and not best.is_ahead(LONG, "cuda")
    assert not best.is_ahead(replace(LONG, batch=3), "cuda") and best.is_ahead(LONG, "cpu")
    alone = (replace(measured, problems=(replace(long, libraries={}),)),)
    monkeypatch.setattr(best, "load_choices", lambda folder: alone)
    assert best.is_ahead(LONG, "cuda")
    monkeypatch.setattr(best, "load_choices", lambda folder: ())
    assert best.is_ahead(LONG, "cuda")


def test_times_grow_with_the_work(measured) -> None:
    short, _ = measured.problems
    expected = short.expected(replace(SHORT, batch=640), H100)
    for config, ms in short.configs.items():
        assert expected[config] == pytest.approx(10 * ms, rel=0.2)


@pytest.mark.parametrize(
    ("near", "far"),
    [
        ({"len_q": 154, "len_k": 154}, {"len_q": 300, "len_k": 300}),
        ({"batch": 1}, {"causal": True}),
        ({"causal": True}, {"d_head": 64, "d_v": 64}),
    ],
)
def test_sizes_are_nearer_than_masks_and_these_than_head_sizes(near, far) -> None:
    assert distance(SHORT, SHORT) == 0
    assert distance(SHORT, replace(SHORT, **near)) < distance(SHORT, replace(SHORT, **far))


def test_a_run_goes_on_with_the_problems_of_its_commit(measured, tmp_path) -> None:
    path = tmp_path / "choice.json"
    begun = replace(measured, problems=())
    assert begun.continued(path).problems == ()
    measured.save(path)
    assert begun.continued(path) == measured
    other = replace(begun, provenance=replace(begun.provenance, commit="another"))
    assert other.continued(path).problems == ()
    other = replace(begun, provenance=replace(begun.provenance, gpu="another"))
    with pytest.raises(ValueError, match="results of two GPUs are never mixed"):
        other.continued(path)
    again = replace(measured.problems[0], sm_mhz=1.0)
    assert measured.updated(again).problems == (measured.problems[1], again)


def test_a_problem_is_told_in_a_line(measured) -> None:
    first, *_ = measured.problems[0].kernels
    text = replace(measured.problems[0], failures={"pytorch_cudnn": "none"}).text()
    assert text.startswith(f"{SHORT}: fa3 2.0000 ms; {first} 2.000, ")
    assert text.endswith("; pytorch_cudnn failed: none")


def test_the_table_has_the_share_of_a_copy_where_it_is_measured() -> None:
    first = next(m for file in FILES for m in file.problems if m.group == "softmax_bf16")
    libraries = dict(first.libraries)
    copy, (ms, *_) = libraries.pop("copy"), first.kernels.values()
    table = grid_tables(FILES, config_for, ["softmax_bf16"])
    header, (row,) = table.splitlines()[0], [x for x in table.splitlines() if str(first.asked) in x]
    assert header.endswith("| ratio | of copy |")
    assert row.endswith(f"| {min(libraries.values()) / ms:.2f} | {copy / ms:.2f} |")


def test_the_table_has_the_speed_of_what_is_taken(measured) -> None:
    table = grid_tables([measured], lambda problem, _: measured.ranked(problem, H100)[0], ["usual"])
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {SHORT} ")]
    speed = SHORT.operations / 1e-3 / 1e12
    step = measured.ranked(SHORT, H100)[0].step.id
    assert row == f"| {SHORT} | {step} | {speed:.0f} | {speed / 2:.0f} | 2.00 |"
