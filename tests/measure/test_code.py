"""Digests of machine code: of libraries and cubins, and beside what was measured."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmark_results import BF16, STAIRS, full_results, measurement, synthetic_results
from fake_backend import fake_backend
from fake_cubin import cubin

from flash_helpers.kernel_configs import Config, Element
from flash_helpers.measure import code
from flash_helpers.measure.benchmark import contenders_for
from flash_helpers.measure.benchmark_tables import (
    CHANGED,
    header_lines,
    lengths_table,
    loads_table,
    progression_table,
    report_text,
)
from flash_helpers.measure.code import (
    DAGGER,
    changed_names,
    codes_of,
    codes_today,
    cubin_code,
)
from flash_helpers.measure.machine_code import code_digest
from flash_helpers.measure.results import SUSTAINED, BenchmarkResults
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.registry.hopper import HOPPER
from flash_helpers.registry.rows import SOFTMAX
from flash_helpers.runtime import library
from flash_helpers.sass.read.containers import cubins_of
from flash_helpers.sass.read.elf import read_sections
from flash_helpers.sass.read.records import SassError

V1, V2 = BF16[:2]
OLD, NEW = "0123456789abcdef", "fedcba9876543210"


def with_code(results: BenchmarkResults, codes: dict[Config, str]) -> BenchmarkResults:
    """The results, measured with code of these digests."""
    by_name = {config.short_form(): digest for config, digest in codes.items()}
    rows = (replace(m, code=by_name.get(m.ran, "")) for m in results.measurements)
    return replace(results, measurements=tuple(rows))


@pytest.fixture
def today(monkeypatch) -> dict[Config, str]:
    """The digests of today, for every GPU."""
    found: dict[Config, str] = {}
    monkeypatch.setattr(code, "codes_today", lambda configs, compute_capability: found)
    return found


# Digests


def test_a_digest_is_of_the_sections_alone_in_the_order_of_their_symbols() -> None:
    wanted = hashlib.sha256(b"onetwo").hexdigest()[:16]
    assert code_digest([("a", b"one"), ("b", b"two")]) == wanted
    assert code_digest([("b", b"two"), ("a", b"one")]) == wanted
    assert code_digest([("a", b"one")]) != wanted


def test_each_config_has_a_digest_of_the_library_or_of_what_is_compiled_now(package: Path) -> None:
    s1, h1 = SOFTMAX.progression()[0], HOPPER.progression()[0]
    found = codes_of([V1, s1, h1], "9.0")
    sections = [
        section
        for member in cubins_of(package / "libflash_attention.so", 90)
        for section in read_sections(member.read(), member.origin)
        if section.name.startswith(".text.") and V1.short_form() in section.name
    ]
    assert [hashlib.sha256(s.data).hexdigest()[:16] for s in sections] == [found[V1]]
    paths = library.code_paths([s1, h1], "sm_90")
    for config in (s1, h1):
        assert cubin_code(paths[config.short_form()]) == found[config]
    other = codes_of([V1, h1], "8.0")
    assert {*other} == {V1}  # those of Hopper alone are not there for other GPUs
    assert other[V1] != found[V1]


def test_a_kernel_that_is_made_from_the_same_as_the_recorded_one_is_not_compiled(
    monkeypatch, tmp_path: Path
) -> None:
    made_from = {V1: "as recorded", V2: "other"}
    monkeypatch.setattr(code, "origins", lambda configs, architecture: made_from)
    monkeypatch.setattr(code, "codes_of", lambda configs, capability: dict.fromkeys(configs, NEW))
    figures = SimpleNamespace(code=OLD)
    baseline = SimpleNamespace(by_origin={"as recorded": [(None, figures)]})
    monkeypatch.setattr(code, "load_baseline", lambda path: baseline)
    assert codes_today([V1, V2], "9.0") == {V1: OLD, V2: NEW}


def test_a_cubin_has_the_digest_that_a_library_of_it_would_have(tmp_path: Path) -> None:
    path = tmp_path / "a.cubin"
    path.write_bytes(cubin("_Zk", b"instructions", registers=99, constants=b"\x01"))
    assert cubin_code(path) == hashlib.sha256(b"instructions").hexdigest()[:16]
    path.write_bytes(b"no cubin")
    with pytest.raises(SassError):
        cubin_code(path)


def test_a_contender_tells_the_code_of_the_config_that_is_launched() -> None:
    static = next(config for config in reversed(BF16) if config.siblings() != (config,))
    codes = {static: OLD, static.general(): NEW}
    every = contenders_for([static], Element.BF16, fake_backend(), OPERATION, codes)
    *libraries, kernel = every
    assert (kernel.code(static), kernel.code(static.general())) == (OLD, NEW)
    assert kernel.code(V1) == ""
    assert {contender.code(None) for contender in libraries} == {""}


# Beside what was measured


@pytest.mark.parametrize(
    ("measured", "now", "has_changed"),
    [(OLD, {V1: NEW}, True), (OLD, {V1: OLD}, False), (OLD, {}, False), ("", {V1: NEW}, False)],
)
def test_only_known_code_that_is_another_now_has_changed(
    today, measured: str, now: dict[Config, str], has_changed: bool
) -> None:
    today.update(now)
    found = with_code(full_results(), {V1: measured})
    assert changed_names(found) == ({V1.short_form()} if has_changed else set())


def test_code_of_another_compiler_that_was_measured_to_be_as_fast_has_not_changed(
    today, monkeypatch
) -> None:
    today |= {V1: NEW, V2: NEW}
    monkeypatch.setattr(code, "equal_codes", lambda root: {frozenset((OLD, NEW))})
    found = with_code(full_results(), {V1: OLD, V2: "0" * 16})
    assert changed_names(found) == {V2.short_form()}


def test_nothing_is_compiled_for_results_without_digests(monkeypatch) -> None:
    def compiled(configs: Iterable[Config], compute_capability: str) -> dict[Config, str]:
        assert not [*configs]
        return {}

    monkeypatch.setattr(code, "codes_today", compiled)
    assert changed_names(full_results()) == set()


def marked(table: str) -> list[str]:
    """First cells of the rows that have a dagger."""
    rows = [line for line in table.splitlines() if line.startswith("|") and DAGGER in line]
    return [row.strip("|").split("|")[0].strip() for row in rows]


def test_tables_mark_the_rows_whose_code_has_changed_and_say_so_below(today) -> None:
    o1 = STAIRS["o1"].large
    today |= {V1: NEW, o1: NEW, V2: OLD}
    results = with_code(full_results(), {V1: OLD, o1: OLD, V2: OLD})
    assert marked(progression_table(results)) == [f"v1 {DAGGER}", f"o1 {DAGGER}"]
    assert marked(loads_table(results)) == [f"o1 {DAGGER}"]  # v1 has no large tile
    lengths = lengths_table(results, "bf16", SUSTAINED)
    assert marked(lengths)[:1] == [f"v1 {DAGGER}"]
    for text in (progression_table(results), loads_table(results), lengths, report_text(results)):
        assert text.count(CHANGED) == 1
    assert f"{V1.short_form()} {DAGGER}" in report_text(results)
    first, second = (
        header_lines(results, STAIRS[step].step, changed_names(results)) for step in ("v1", "v2")
    )
    assert "has changed since." in first and "has changed since" not in second
    assert all(line.startswith("//") for line in first.splitlines())


def test_unchanged_results_have_neither_dagger_nor_line(today) -> None:
    today[V1] = OLD
    results = with_code(full_results(), {V1: OLD})
    for text in (progression_table(results), loads_table(results), report_text(results)):
        assert text and DAGGER not in text and CHANGED not in text
    assert progression_table(results) == progression_table(full_results())


def test_a_digest_survives_the_file(tmp_path: Path) -> None:
    results = with_code(synthetic_results(measurement(V1.short_form(), 1024, 100.0)), {V1: OLD})
    results.save(tmp_path / "a.json")
    assert BenchmarkResults.load(tmp_path / "a.json").measurements[0].code == OLD
