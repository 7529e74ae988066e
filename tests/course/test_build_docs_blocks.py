"""Each kind of block shows the facts that its source holds."""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from benchmark_results import control, grouped_results, measurement, synthetic_results

from flash_helpers.compile.ptxas import parse_ptxas_log
from flash_helpers.course.arguments import parse_kernel
from flash_helpers.course.blocks import KINDS, render
from flash_helpers.course.clock_blocks import mean_change, speedup
from flash_helpers.course.evidence import PUBLISHED, Evidence, Published, count_kernel
from flash_helpers.course.excerpts import COLUMNS
from flash_helpers.course.links import minutes_text
from flash_helpers.course.metric import share
from flash_helpers.course.pages import page_of_step
from flash_helpers.course.sources import code_diff, without_comments
from flash_helpers.kernel_configs import LARGE_TILE, STEPS, AttentionForward, Config, Element
from flash_helpers.measure.benchmark_tables import lengths_table
from flash_helpers.measure.kernel_profile import profile_kernels
from flash_helpers.measure.results import FLASH, BenchmarkResults, Measurement, load_results
from flash_helpers.registry.family import LOGBOOK
from flash_helpers.registry.selection import UsageError
from flash_helpers.runtime.call import prepare

pytestmark = pytest.mark.slow

Show = Callable[..., str]
# what `counters` counts: one head of 512 rows, in tiles of 64, by 4 warps
BLOCKS = 512 // 64
WARPS = 4 * BLOCKS


def cells(table: str, label: str) -> list[str]:
    """The cells behind the label with that end, in its row of a Markdown table."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return next(
        row[1:]
        for row in rows
        if row and re.search(rf"(^|, ){re.escape(label)}$", row[0].replace("&nbsp;", ""))
    )


def numbers(table: str, label: str) -> list[int]:
    return [int(cell.replace(",", "").replace("=", "0")) for cell in cells(table, label)]


def test_every_kind_can_be_shown(show: Show) -> None:
    arguments = {
        "picture": 'swizzle "alt text"',
        "listing": "2 LDSM",
        "numbers": "2 sass=registers",
        "excerpt": "2 smem_offset",
        "loads": "rows_256_h200",
        "speeds": "hopper",
        "lengths": "rows_256_h200",
        "calls": "call_overhead_h100",
        "first_calls": "first_call_h100",
        "compilers": "compilers_h100",
        "training": "training_h200",
        "autograd": "autograd_h200",
        "multimodal": "multimodal_h200",
        "ring": "bytes",
        "rings": "long_sequences_h200",
        "best": "usual",
    }
    for kind, accepted in KINDS.items():
        words = arguments.get(kind, "2" if accepted.fewest else "")
        page = {"page": "docs/02_swizzle.md"} if kind == "nav" else {}
        assert show(f"{kind} {words}".strip(), **page).strip(), kind


def test_facts_tell_the_registers_that_ptxas_told(show: Show, package: Path) -> None:
    table = show("facts 8")
    logs = [
        parse_ptxas_log((package / f"ptxas/{parse_kernel(name).short_form()}.log").read_text())
        for name in ("7", "8")
    ]
    for architecture in ("sm_80", "sm_90"):
        told = [str(next(r.registers for r in log if r.target == architecture)) for log in logs]
        assert cells(table, f"registers per thread, {architecture}") == told


def test_facts_of_the_first_step_have_no_parent(show: Show) -> None:
    assert "changed" not in show("facts 1")
    assert "(parent)" not in show("facts 1")


PARENT = """\
// The parent.
namespace v1 {
/* a
   block */
int f() { return 1; } // one

constexpr char kText[] = "// no comment";
v1::g();
}
"""
CHILD = """\
// The child, with another comment.
namespace v2 {

int f() { return 2; } // two
constexpr char kText[] = "// no comment";
v2::g();
}
"""


def test_a_diff_shows_code_alone(tmp_path: Path) -> None:
    steps = STEPS["v1"], STEPS["v2"]
    for step, text in zip(steps, (PARENT, CHILD), strict=True):
        path = tmp_path / step.source
        path.parent.mkdir(parents=True)
        path.write_text(text)
    diff = code_diff(*steps, tmp_path)
    lines = diff.text.splitlines()
    assert [line for line in lines[2:] if re.match("[+-]", line)] == [
        "-int f() { return 1; }",
        "+int f() { return 2; }",
    ]
    assert (diff.removed, diff.added, diff.changed) == (1, 1, 2)
    assert ' constexpr char kText[] = "// no comment";' in lines


def test_comments_are_cut_and_lines_stay() -> None:
    text = 'a(); // x\n/* y\n z */ b("/* s */", \'"\'); // "\n'
    assert without_comments(text) == 'a(); \n\n b("/* s */", \'"\'); \n'


@pytest.mark.parametrize("step", [step.id for step in STEPS.values() if step.parent])
def test_every_step_has_a_diff_without_comments(show: Show, step: str) -> None:
    text = show(f"diff {step}")
    assert "//" not in text.replace("https://", "")
    assert f"namespace {step}" not in text


def test_counters_show_what_the_swizzle_is_for(show: Show) -> None:
    table = show("counters 2")
    loads = numbers(table, "warp instructions, of ldmatrix")[0]
    # of each of the 4 matrices of an ldmatrix.x4, 8 rows lie in the same banks: 7 wavefronts more
    assert numbers(table, "shared-memory bank conflicts, of ldmatrix")[:2] == [loads * 4 * 7, 0]
    of_all = numbers(table, "shared-memory bank conflicts")
    assert of_all[1] == 0
    assert of_all[2] == -of_all[0]


def test_counters_are_those_of_the_algorithm(show: Show) -> None:
    table = show("counters 1")
    config = parse_kernel("1")
    assert numbers(table, "mma") == [WARPS * BLOCKS * config.mma_per_key_block]
    row_bytes = config.d_head * 2
    # every block of rows reads Q once and all of K and V; O is written once
    read = (1 + 2 * BLOCKS) * 512 * row_bytes
    assert numbers(table, "global-memory sectors") == [(read + 512 * row_bytes) // 32]


def test_copies_are_counted_without_commits_and_waits(show: Show) -> None:
    table = show("counters 1")
    config = parse_kernel("1")
    chunks_per_thread = config.B_r * config.d_head * 2 // 16 // config.n_threads
    tiles = BLOCKS * (1 + 2 * BLOCKS)  # of Q, K and V, all of the same size
    assert numbers(table, "of cp.async")[:1] == [4 * tiles * chunks_per_thread]


def test_the_kernel_with_a_static_stride_is_counted_itself() -> None:
    config = parse_kernel("16")
    all_heads = AttentionForward(1, 16, 128)
    counted = count_kernel(config, AttentionForward(1, 1, 128), all_heads)
    (profile,) = profile_kernels(
        [config], all_heads, lambda config, inputs: prepare(config, *inputs).simulate()
    )
    assert profile.ran == config
    total, of_all_heads = counted.total, profile.run.counters.total
    for name in ("instructions", "mma", "shared_wavefronts", "global_sectors"):
        assert 16 * getattr(total, name) == getattr(of_all_heads, name), name


def test_sass_counts_the_tensor_instructions_of_a_block(show: Show) -> None:
    table = show("sass 8")
    per_block = parse_kernel("8").mma_per_key_block
    assert numbers(table, "HMMA") == [per_block, per_block, 0]
    loop, hmma = numbers(table, "instructions of the main loop"), numbers(table, "HMMA")
    assert cells(table, "per HMMA")[1] == f"{loop[1] / hmma[1]:.2f}"


def test_sass_of_another_architecture_is_another_text(show: Show) -> None:
    assert "sm_80, bf16" in show("sass 8 arch=sm_80")
    assert show("sass 8 arch=sm_80") != show("sass 8")


def test_bounds_grow_with_the_warps_of_an_sm(show: Show) -> None:
    table = show("bound 7 8")
    warps = numbers(table, "warps of an SM")
    tensor = numbers(table, "tensor pipe")
    assert tensor[1] / tensor[0] == pytest.approx(warps[1] / warps[0], rel=1e-3)


def test_a_listing_shows_the_first_that_match(show: Show) -> None:
    text = show(r"listing 2 ^LDSM\.16\.M lines=3")
    rows = [line for line in text.splitlines() if line.startswith("0x")]
    assert len(rows) == 3
    assert all("LDSM.16.M" in row for row in rows)
    assert "// previous_kernels/v2/forward_kernel.cuh:" in text


def test_a_listing_by_source_line_and_phase(show: Show) -> None:
    text = show('listing 12 at="reciprocal_approx\\(quad_sum" phase=epilogue')
    assert "MUFU.RCP" in text
    with pytest.raises(UsageError, match="of the prologue of v12"):
        show('listing 12 MUFU.RCP at="reciprocal_approx" phase=prologue')


def code_of(excerpt: str) -> list[str]:
    fence, *lines = excerpt.partition("\n```\n")[0].splitlines()
    assert fence == "```cpp"
    return lines


def test_an_excerpt_is_the_code_as_it_stands_in_the_file(show: Show, root: Path) -> None:
    text = show("excerpt 9 smem_offset add_product")
    path = root / STEPS["v9"].source
    source = path.read_text().splitlines()
    places = re.search(r"\), lines (\d+).(\d+), (\d+).(\d+)\.$", text)
    assert places is not None
    first, last, first_2, last_2 = map(int, places.groups())

    def words(lines: Sequence[str]) -> list[str]:
        return [word for line in lines for word in line.split() if word != "//"]

    shown = code_of(text)
    assert words(shown) == words([*source[first - 1 : last], *source[first_2 - 1 : last_2]])
    assert all(len(line) <= COLUMNS for line in shown if line.lstrip().startswith("//"))
    assert f"](../previous_kernels/v9/forward_kernel.cuh#L{first}-L{last})" in text


def test_an_excerpt_of_a_phase_ends_where_the_next_begins(show: Show) -> None:
    lines = code_of(show("excerpt 1 phase=3"))
    assert lines[0].startswith("// 3. S = Q @ K^T")
    assert not any(line.startswith("// 4.") for line in lines)
    assert lines[-1].strip()
    assert len(code_of(show("excerpt 1 phase=3 lines=2"))) == 2


def test_an_excerpt_of_a_phase_ends_with_the_block_that_it_stands_in(show: Show) -> None:
    last = code_of(show("excerpt 1 phase=5"))  # of the loop
    assert last[0].startswith("// 5. ") and not any("6. O = O / l" in line for line in last)


def test_an_excerpt_of_a_header_and_of_what_matches(show: Show) -> None:
    assert "mma.sync.aligned.m16n8k16" in show("excerpt mma.cuh mma_m16n8k16")
    assert code_of(show('excerpt 1 at="^namespace" lines=1')) == ["namespace v1 {"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("nothing.cuh f", "neither a step"),
        ("99 f", "the steps are v1 to v"),
        ("9", "nothing is chosen"),
        ("9 no_such_function", "no function 'no_such_function'"),
        ("9 phase=99", "no comment there begins with 99."),
        ("9 at=no_such_text", "no line there matches 'no_such_text'"),
        ("9 at=(", "is no regular expression"),
        ("9 at=^namespace lines=99", "99 lines are more than 40"),
    ],
)
def test_what_is_no_excerpt_is_refused(show: Show, arguments: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        show(f"excerpt {arguments}")


def test_of_two_kernels_equal_rows_are_folded_and_named_with_what_they_are_part_of(
    show: Show,
) -> None:
    shown, _, folded = show("counters 9").partition("<details")
    assert cells(shown, "warp instructions")[2].startswith("+")
    assert "| = |" not in shown and "&nbsp;" not in shown
    assert cells(folded, "warp instructions, of ldmatrix")[2] == "="
    assert "rows are equal</summary>" in folded
    assert "<details" not in show("counters 1") and "&nbsp;" in show("counters 1")


def test_a_footnote_stands_once_a_page(evidence: Evidence) -> None:
    said: set[str] = set()
    page = PurePosixPath("docs/page.md")
    first, second = (render(evidence, "sass", name, page, said) for name in ("8", "9"))
    assert "Classes: " in first and "Classes: " not in second
    assert "compiled by" in first and "compiled by" not in second


def test_a_launch_is_told_by_its_problem(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text() -> str:
        return render(evidence, "bound", "8", PurePosixPath("docs/page.md"))

    assert "The launch: batch 16, heads 16, seq 4096, d_head 128, on 132 SMs at " in text()
    facts = evidence.facts(parse_kernel("8"), "sm_90")
    assert facts.prediction is not None
    launch = replace(facts.prediction.launch, words="rows 8, width 1000")
    changed = replace(facts, prediction=replace(facts.prediction, launch=launch))
    monkeypatch.setattr(evidence, "facts", lambda config, architecture: changed)
    assert "The launch: rows 8, width 1000, on 132 SMs at " in text()


def test_stairs_tell_what_a_step_gained_at_each_tile(show: Show, evidence: Evidence) -> None:
    text = show("stairs 9")
    for tile, name in (("fixed", "9"), ("large", "9:large")):
        config, before = parse_kernel(name), parse_kernel(name.replace("9", "8"))
        found = share(evidence.results, config, "bf16")
        change = mean_change(evidence.results, before, config)
        assert f"**{100 * found:.1f}%** of [flash](" in text
        assert f"#{tile}-tile) ({100 * change:+.1f}% against v8)" in text
    assert "against v8" in text and "](images/stairs/ampere.svg#step-v9)" in text
    assert "against" not in show("stairs 1")
    assert "no change against v16" in show("stairs o1")  # at the large tile, the only one it has


def test_the_map_has_every_step_and_links_its_page(show: Show) -> None:
    rows = [line for line in show("map").splitlines() if line.startswith(("| [", "| **["))]
    named = [re.match(r"\| (?:\*\*)?\[(\w+)\]", row)[1] for row in rows]
    assert named == [*STEPS]
    assert "[v9](09_moves.md)" in rows[8] and "| core |" in rows[8]


def test_the_path_has_the_pages_of_each_evening_and_one_line_for_the_logbook(show: Show) -> None:
    text = show("path")
    first, second = (line for line in text.splitlines() if "evening**" in line)
    for line, steps in ((first, ("v1", "v9", "o5")), (second, ("h1", "h12"))):
        names = re.findall(r"\]\((\S+)\)", line)
        places = [names.index(page.path.name) for step in steps if (page := page_of_step(step))]
        assert places == sorted(places)
        minutes = sum(map(int, re.findall(r"\((\d+)\)", line)))
        assert minutes_text(minutes) in line
    logbook = [step for step in STEPS.values() if step.place == LOGBOOK]
    assert text.count("Logbook") == 1 and f"Logbook, {len(logbook)} pages" in text


def drifting(
    milliseconds: Sequence[float], ratio: float
) -> tuple[BenchmarkResults, Config, Config]:
    """Results in which v2 takes `ratio` of v1's time in every round, however long that is; flash is
    within 0.8% of itself."""
    before, after = parse_kernel("1"), parse_kernel("2")

    def measured(config: Config, factor: float) -> Measurement:
        found = measurement(config.short_form(), 4096, 100.0)
        return replace(found, samples_ms=tuple(factor * ms for ms in milliseconds), first_ms=())

    flash = measurement(FLASH, 4096, 300.0)
    rows = (measured(before, 1), measured(after, ratio), flash, control(4096))
    return synthetic_results(*rows), before, after


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(0.98, "faster"), (1.02, "slower"), (0.995, "="), (1.005, "=")]
)
def test_a_clock_that_drifts_hides_no_change_and_noise_is_none(ratio: float, verdict: str) -> None:
    results, before, after = drifting([10, 12, 9], ratio)
    found = speedup(results, before, after, 4096)
    assert found is not None
    assert found.verdict == verdict
    assert found.median == pytest.approx(1 / ratio - 1)
    assert mean_change(results, before, after) == pytest.approx(1 / ratio - 1)


def test_a_change_is_told_with_the_rounds_that_it_lies_in() -> None:
    results, before, after = drifting([10, 10, 10], 1)
    noisy = replace(results.measurements[1], samples_ms=(9.0, 11.0, 10.0))
    results = replace(results, measurements=(results.measurements[0], noisy))
    found = speedup(results, before, after, 4096)
    assert found is not None
    assert found.low < 0 < found.high and found.median == 0
    assert speedup(results, before, after, 512) is None


def test_clock_tells_the_measurement_and_what_was_published(show: Show, evidence: Evidence) -> None:
    text = show("clock 8")
    name = parse_kernel("8").short_form()
    assert cells(text, "4096")[1] == f"{evidence.results.speed(name, 'bf16', 4096):.0f}"
    assert cells(text, "A100") == ["80.3% (82.3%)", "87.8% (88.9%)"]
    assert evidence.results.provenance.gpu in text
    assert "faster" not in show("clock 1")


@pytest.fixture
def unmeasured(evidence: Evidence) -> Evidence:
    """The evidence before step 16 was measured."""
    found = type(evidence)(evidence.root)
    rows = (m for m in evidence.results.measurements if not m.name.startswith("v16_"))
    found.results = replace(evidence.results, measurements=tuple(rows))
    return found


@pytest.mark.parametrize(
    "block", ["clock 16", "stairs 16", "staircase", "progression", "facts 16", "bound 16"]
)
def test_a_step_that_was_not_measured_leaves_gaps(unmeasured: Evidence, block: str) -> None:
    kind, _, arguments = block.partition(" ")
    text = render(unmeasured, kind, arguments, PurePosixPath("docs/page.md"))
    if kind == "clock":
        assert "TFLOP/s" not in text and "Measured on" not in text
        assert text.startswith(
            "v16 was not measured on the GPU of the other steps.\n\n| published |"
        )
    if kind == "stairs":
        assert "step v16 lit](" in text
        assert "\n\nv16 was not measured on the GPU of the other steps." in text
    if kind == "staircase":
        assert "% at step v15 at the fixed tile" in text and "v16" not in text
    assert "measured ms" not in text


def test_published_figures_of_a_step_are_there_for_every_gpu(root: Path) -> None:
    published = Published.load(root / PUBLISHED)
    keys = [gpu.key for gpu in published.gpus]
    there = sorted((step.step, step.gpu) for step in published.steps)
    steps = {step.step for step in published.steps}
    assert steps and steps <= set(STEPS)
    assert there == sorted(itertools.product(steps, keys))
    assert published.source


def test_another_file_of_published_figures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "published.json"
    path.write_text(json.dumps({"format": 1, "source": ""}))
    with pytest.raises(ValueError, match="holds no published figures"):
        Published.load(path)


def test_results_by_length_are_those_of_a_dtype_and_a_load(show: Show, root: Path) -> None:
    results = load_results(root / "benchmarks/results/rows_256_h200.json")
    assert show("lengths rows_256_h200") == lengths_table(results, "bf16", "burst")
    text = show("lengths rows_256_h200 dtype=bf16 load=sustained")
    assert text == lengths_table(results, "bf16", "sustained")
    with pytest.raises(UsageError, match="dtype=fp16 is not one of bf16"):
        show("lengths rows_256_h200 dtype=fp16")


def test_results_by_length_say_which_problems_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks/results/hopper_causal_h200.json"
    path.parent.mkdir(parents=True)
    grouped_results().save(path)
    block = "hopper_causal_h200 h21 h24 dtype=bf16 load=sustained"
    text = render(Evidence(tmp_path), "lengths", block, PurePosixPath("docs/h22_tile_counter.md"))
    assert "| h24 " in text and "| h24 over it " in text
    assert "bf16, causal (TFLOP/s count the keys that a query sees), 32 heads on 8, batch" in text


def test_results_by_length_can_be_of_some_steps(show: Show) -> None:
    text = show("lengths hopper_h200 h16 h17")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| h")]
    assert {row.split()[0] for row in rows} == {"h16", "h17"}
    assert "FlashAttention-3" in text and "fastest of the others" in text
    assert "h13_bf16" not in text  # its larger tile is left out of some lengths
    with pytest.raises(UsageError, match=r"'h99': the steps are v1 to .*, h1 to h\d+"):
        show("lengths hopper_h200 h99")


def test_a_family_with_a_file_of_its_own_has_the_numbers_of_that_run(show: Show) -> None:
    assert all("NVIDIA H100" in show(f"clock {step}") for step in ("h5", "o5"))
    assert "not measured" not in show("stairs h5")
    assert float(cells(show("numbers h5 clock=TFLOP/s"), "harmonic mean")[1]) > 0


def test_the_staircase_is_linked_from_any_page(show: Show) -> None:
    assert "](images/progression.svg)" in show("staircase")
    assert "](docs/images/progression.svg)" in show("staircase", page="README.md")


def test_the_plot_of_speeds_tells_the_ends_of_its_lines(show: Show, evidence: Evidence) -> None:
    text = show("speeds hopper", page="README.md")
    assert "](docs/images/hopper.svg)" in text and evidence.results.provenance.gpu in text
    results, last = evidence.results_of(STEPS["h30"]), parse_kernel("h30").short_form()
    ends = [results.speed(last, "bf16", results.sizes[place]) for place in (0, -1)]
    assert f"h30 {ends[0]:.0f} to {ends[1]:.0f}" in text
    with pytest.raises(UsageError, match="'softmax' has no plot of speeds: ampere, hopper"):
        show("speeds softmax")


def test_kernels_are_named_by_step_variant_or_short_form() -> None:
    plain = parse_kernel("16")
    assert plain.dtype is Element.BF16
    assert parse_kernel("16") == parse_kernel(plain.short_form()) == plain
    assert parse_kernel("16:large") == plain.replace(**LARGE_TILE)
    assert parse_kernel("8:large").B_r == 128 and parse_kernel("o5").step.id == "o5"
    assert parse_kernel("v16") == plain and parse_kernel("v16:large") == parse_kernel("16:large")
    for wrong in ("6:large", "o5:large", "16:", "row_softmax"):
        with pytest.raises(UsageError, match="is no kernel"):
            parse_kernel(wrong)
    with pytest.raises(UsageError, match="'99': the steps are v1 to v"):
        parse_kernel("99")
    with pytest.raises(UsageError, match=r"'7\.\.9' is not a step"):
        parse_kernel("7..9")


def test_numbers_are_rows_of_the_other_tables(show: Show) -> None:
    """Equal ones too, which are folded there; and opcodes by phase."""
    table = show(
        'numbers 8 sass="main loop$|^registers|^main loop, HMMA" bound="least of measured" '
        'counters="^mma$" clock="^of flash, at"'
    )
    labels = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    loop, registers = "instructions of the main loop", "registers per thread"
    assert labels == [
        registers, loop, "main loop, HMMA", "least of measured", "mma", "of flash, at 4096"
    ]  # fmt: skip
    for block, label in (
        ("sass 8", loop),
        ("sass 8", registers),
        ("bound 8", "least of measured"),
        ("counters 8", "mma"),
    ):
        assert cells(table, label)[:2] == cells(show(block), label)[:2], label
    assert cells(table, "main loop, HMMA")[:2] == cells(show("sass 8"), "HMMA")[:2]
    assert cells(table, "of flash, at 4096")[1] == cells(show("clock 8"), "4096")[-1]


def test_the_target_is_named_that_the_kernel_was_compiled_for(show: Show) -> None:
    assert "sm_90a, bf16, compiled by" in show("sass h2")
    assert "sm_90, bf16, compiled by" in show("sass o5")


def test_products_of_a_warpgroup_are_named_and_weighed(show: Show) -> None:
    text = show("sass h2")
    assert cells(text, "instructions of the main loop, HGMMA")[:2] == ["16", "16"]
    assert "Per HMMA is per 4096 operations" in text and "Per HMMA is" not in show("sass o5")
    work, per_hmma = (
        cells(text, f"instructions of the main loop{part}")[1] for part in ("", ", per HMMA")
    )
    assert float(per_hmma) == pytest.approx(int(work) / (16 * 16), abs=0.005)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (
            "counters 2",
            "batch 1, heads 1, seq 512, d_head 128, bf16, in tensors of batch 1, heads 16, "
            "seq 512, d_head 128.",
        ),
        ("counters s2", "rows 8, width 4096, bf16."),
    ],
)
def test_counters_name_the_problem_of_the_operation(show: Show, block: str, problem: str) -> None:
    assert f"Counted in the simulator: {problem} An instruction of PTX counts" in show(block)


def test_counters_of_several_operations_are_refused(show: Show) -> None:
    with pytest.raises(UsageError, match="compute attention_forward, rows: name those of one"):
        show("counters 2 s2")


def test_what_tma_and_wgmma_move_is_counted(show: Show) -> None:
    """512 rows of one head: 8 blocks of 64 rows, each with 4 blocks of 128 keys."""
    text = show("counters h1")
    products = 8 * 4 * 4 * (8 + 8)  # of warps
    assert cells(text, "wgmma")[1] == f"{products:,}"
    tile = 128 * 128 * 2
    assert cells(text, "TMA bytes")[1] == f"{8 * (4 * 2 * tile + 2 * tile // 2):,}"
    assert cells(text, "mma")[1] == "0"


def test_the_staircase_tells_families_with_tiles_of_their_own_apart(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = [m for m in evidence.results.measurements if m.name == FLASH]
    own = parse_kernel("h2").short_form()
    measured = [replace(m, name=own) for m in flash]
    results = replace(
        evidence.results,
        measurements=tuple(m for m in evidence.results.measurements if not m.name.startswith("h")),
    )
    results = replace(results, measurements=(*results.measurements, *measured))
    monkeypatch.setitem(vars(evidence), "results", results)
    text = render(evidence, "staircase", "", PurePosixPath("docs/page.md"))
    assert "at step v16 at the fixed tile" in text
    assert "100% at step h2 to 100% at step h2 at tiles of their own" in text
