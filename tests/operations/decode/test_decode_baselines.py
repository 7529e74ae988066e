"""Libraries that decode is measured beside: what reaches them, and what they do not take."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_helpers.measure.benchmark import library_contenders, library_records
from flash_helpers.operations.decode import OPERATION, baselines
from flash_helpers.operations.decode.baselines import FLASHINFER, PACKAGES, run
from flash_helpers.operations.decode.inputs import draw
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.reference import reference

FP8 = {"fp8_cache": True}
USUAL = {"softmax_scale": 0.25, "causal": False, "window_size": (-1, -1), "softcap": 0.0}


@pytest.mark.parametrize("library", [name for name in PACKAGES if name != FLASHINFER])
@pytest.mark.parametrize(
    ("options", "passed", "tensors"),
    [
        ({}, {}, ()),  # an int for cache_seqlens would be a launch more, to fill a tensor
        ({"total_k": 30}, {}, ("cache_seqlens",)),
        ({"caches": 3}, {}, ("cache_batch_idx",)),
        ({"page_size": 4, "total_k": 30}, {}, ("cache_seqlens", "block_table")),
        (
            {"len_q": 3, "causal": True, "window_left": 4},
            {"causal": True, "window_size": (4, -1)},
            (),
        ),
        ({"softcap": 2.0, "softmax_scale": 0.5}, {"softcap": 2.0, "softmax_scale": 0.5}, ()),
    ],
    ids=str,
)
def test_a_package_gets_the_cache_and_the_options(
    monkeypatch, library, options, passed, tensors
) -> None:
    calls = []
    module = SimpleNamespace(
        flash_attn_with_kvcache=lambda *args, **rest: calls.append((args, rest))
    )
    monkeypatch.setitem(sys.modules, PACKAGES[library].module, module)
    problem = Decode(2, 2, d_head=16, len_k=20, **options)
    given = draw("normal", problem)
    run(library, problem, given)
    ((args, rest),) = calls
    assert all(a is b for a, b in zip(args, (given["q"], given["k"], given["v"]), strict=True))
    named = {"page_table" if (library, n) == ("fa3", "block_table") else n: n for n in tensors}
    assert all(rest.pop(name) is given[own] for name, own in named.items())
    assert rest == {**USUAL, **passed}


@pytest.mark.parametrize(
    ("library", "options", "message"),
    [
        ("flash_attn", {"sinks": True}, "sinks: flash_attn does not take them: leave out the lib"),
        (
            FLASHINFER,
            {"sinks": True},
            "sinks: flashinfer does not take them: leave out the library",
        ),
        (FLASHINFER, {"caches": 3}, "cache_batch_idx: flashinfer does not take them"),
        (FLASHINFER, {"len_q": 2}, "len_q 2, several queries of a sequence: flashinfer does not"),
        (
            FLASHINFER,
            {"fp8_cache": True, "v_scale": True},
            "k_scale and v_scale of each sequence: ",
        ),
        (
            "fa3",
            {"fp8_cache": True},
            "a cache in fp8: fa3 does not take it beside q in bf16: leave",
        ),
        ("pytorch_flash", {"fp8_cache": True}, "a cache in fp8: pytorch_flash does not take it"),
        ("pytorch_flash", {"total_k": 7}, "lengths that differ: pytorch_flash does not take them"),
        ("pytorch_cudnn", {"page_size": 4}, "pages: pytorch_cudnn does not take them: leave out"),
        ("pytorch_cudnn", {"caches": 3}, "cache_batch_idx: pytorch_cudnn does not take them"),
        ("pytorch_cudnn", {"window_left": 1}, r"window_size \(1, -1\): pytorch_cudnn does not"),
    ],
)
def test_an_option_that_a_library_lacks_is_refused(library, options, message) -> None:
    problem = Decode(2, 2, d_head=16, len_k=20, **options)
    with pytest.raises(ValueError, match=message):
        run(library, problem, draw("normal", problem))


def test_the_flash_backend_computes_the_problem() -> None:
    problem = Decode(2, 4, d_head=16, len_k=20, kv_heads=2, softmax_scale=0.5)
    given = draw("normal", problem)
    found = run("pytorch_flash", problem, given)["o"]
    wanted = reference(problem, given).expected["o"]
    torch.testing.assert_close(found.double(), wanted, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "options", [{}, {"total_k": 25, "page_size": 4}, {"caches": 3}, FP8], ids=str
)
def test_the_copy_moves_as_many_bytes_of_k_as_kernels_read_of_k_and_v(options) -> None:
    problem = Decode(2, 4, d_head=16, len_k=20, kv_heads=2, **options)
    given = draw("normal", problem)
    (copied,) = run(OPERATION.ceiling, problem, given).values()
    assert copied.data_ptr() != given["k"].data_ptr()
    small = (x for x in (*problem.inputs, *problem.outputs) if x.name not in ("k", "v"))
    assert 2 * copied.nbytes == problem.bytes - sum(x.bytes for x in small)


class _Wrapper:
    """What FlashInfer's wrapper is given, and what it would compute: attention by the planned pages
    alone. made: all of them."""

    made: list[_Wrapper]

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert not workspace.any()  # FlashInfer asks for zeros
        self.given = (layout, options)
        self.plans: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.made.append(self)

    def plan(self, *args: Any, **options: Any) -> None:
        self.plans.append((args, options))

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ((args, options),) = self.plans
        begins, pages, last, heads, kv_heads, d_head, page_size = args
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in args[:3])
        assert all(x.shape[1:] == (page_size, kv_heads, d_head) for x in cache)
        assert q.shape == (len(last), heads, d_head)
        rows = []
        for n, row in enumerate(q.double()):
            own = pages[begins[n] : begins[n + 1]]
            n_keys = max(len(own) - 1, 0) * page_size + int(last[n])
            k, v = (
                x[own].flatten(0, 1)[:n_keys].double().repeat_interleave(heads // kv_heads, 1)
                for x in cache
            )
            scores = options["sm_scale"] * torch.einsum("hd,nhd->hn", row, k)
            if options["logits_soft_cap"]:
                scores = options["logits_soft_cap"] * (scores / options["logits_soft_cap"]).tanh()
            if options["window_left"] >= 0:
                scores[:, : max(n_keys - 1 - options["window_left"], 0)] = -torch.inf
            rows.append(torch.einsum("hn,nhd->hd", scores.softmax(1), v))
        return torch.stack(rows).to(options["q_data_type"])


@pytest.fixture
def wrappers(monkeypatch) -> Iterator[list[_Wrapper]]:
    """Put a module in FlashInfer's place, and give its wrappers as they are made."""
    monkeypatch.setattr(_Wrapper, "made", [], raising=False)
    monkeypatch.setattr(baselines, "_WORKSPACE_BYTES", 1024)
    baselines._workspace.cache_clear()
    module = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=_Wrapper)
    monkeypatch.setitem(sys.modules, PACKAGES[FLASHINFER].module, module)
    yield _Wrapper.made
    baselines._workspace.cache_clear()


@pytest.mark.parametrize(
    ("options", "page_size"),
    [
        ({}, 4),
        ({"len_k": 48}, 16),
        ({"len_k": 7, "total_k": 11}, 1),
        ({"batch": 5, "total_k": 43}, 4),
        ({"batch": 5, "total_k": 0}, 4),
        ({"page_size": 10}, 10),
        (FP8, 4),
        ({"batch": 5, "page_size": 5, "pages": 40, "total_k": 43}, 5),
        ({"window_left": 6, "softcap": 2.0, "softmax_scale": 0.5, "total_k": 31}, 4),
    ],
    ids=str,
)
def test_flashinfer_gets_the_pages_that_hold_the_keys(wrappers, options, page_size) -> None:
    """Keys behind a sequence's end are NaN, and a first of three or more sequences has none."""
    problem = Decode(
        **{"batch": 2, "heads": 4, "kv_heads": 2, "d_head": 16, "len_k": 20, **options}
    )
    given = draw("normal", problem)
    found = run(FLASHINFER, problem, given)["o"]
    wanted = reference(problem, given).expected["o"]
    torch.testing.assert_close(found.double(), wanted, atol=0.01, rtol=0.01)
    (wrapper,) = wrappers
    assert wrapper.given == ("NHD", {"use_tensor_cores": True, "backend": "fa2"})
    assert wrapper.plans[0][0][-1] == page_size
    assert wrapper.plans[0][1]["kv_data_type"] == given["k"].dtype


def test_an_empty_sequence_has_no_page_for_flashinfer_and_a_full_page_is_the_last(wrappers) -> None:
    problem = Decode(4, 2, d_head=16, len_k=8, kv_heads=1, total_k=13, page_size=4, pages=9)
    lengths = torch.tensor([0, 8, 4, 1], dtype=torch.int32)
    table = torch.tensor([[-1, -1], [3, 8], [0, -1], [5, -1]], dtype=torch.int32)
    given = {**draw("normal", problem), "cache_seqlens": lengths, "block_table": table}
    run(FLASHINFER, problem, {**given, "k": given["k"].nan_to_num(), "v": given["v"].nan_to_num()})
    begins, pages, last = wrappers[0].plans[0][0][:3]
    assert begins.tolist() == [0, 0, 2, 3, 4]
    assert pages.tolist() == [3, 8, 0, 5]
    assert last.tolist() == [0, 4, 4, 1]


def test_flashinfer_plans_once_for_each_set_of_tensors_and_problem(wrappers) -> None:
    problem = Decode(3, 2, d_head=16, len_k=8, kv_heads=1, total_k=13, page_size=4)
    sets = [draw("normal", problem, seed=seed) for seed in range(2)]
    for _ in range(3):
        for given in sets:
            run(FLASHINFER, problem, given)
    assert len(wrappers) == 2
    for name in ("cache_seqlens", "block_table"):
        run(FLASHINFER, problem, {**sets[0], name: sets[0][name].clone()})
    run(FLASHINFER, replace(problem, softcap=2.0), sets[0])
    assert len(wrappers) == 5
    assert all(len(wrapper.plans) == 1 for wrapper in wrappers)


def test_a_plan_of_flashinfer_goes_with_its_cache(wrappers) -> None:
    problem = Decode(2, 2, d_head=16, len_k=8, kv_heads=1, total_k=13)
    given = draw("normal", problem)
    kept = len(baselines._PLANNED)
    run(FLASHINFER, problem, given)
    assert len(baselines._PLANNED) == kept + 1
    given.clear()
    gc.collect()
    assert len(baselines._PLANNED) == kept


def test_the_version_of_flashinfer_is_recorded(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flashinfer" or None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"version of {name}")
    (record,) = library_records(library_contenders(OPERATION), OPERATION)
    assert (record.name, record.version) == ("flashinfer-python", "version of flashinfer-python")
