"""flash_attn_with_kvcache appends and turns by one kernel, where the registry has one, with the
bits of PyTorch's operators, which compute all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flash_attention import _append, _kvcache, flash_attn, flash_attn_3
from flash_helpers.operations.append.problem import Append
from flash_helpers.registry.append import APPEND

BATCH, ROOM, KV_HEADS, HEADS, D_HEAD = 3, 24, 2, 4, 32
PAGES, PAGE_SIZE = 8, 8
TABLE = torch.tensor([[7, 2, 4], [0, 99, -3], [5, 1, 3]]).int()
LENGTHS = torch.tensor([5, 7, 23]).int()
ANGLES = torch.linspace(0, 9, ROOM * 16).view(ROOM, 16)
TABLES = {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin()}

Tensors = dict[str, torch.Tensor]
with_kvcache = flash_attn_3.flash_attn_with_kvcache


def _forget() -> None:
    _append._has_kernel.cache_clear()
    _append._config_of.cache_clear()


@pytest.fixture
def forced(monkeypatch) -> Iterator[list[tuple[str, ...]]]:
    """Calls take the kernel, in the simulator. Returns the names of the tensors of each."""
    calls: list[tuple[str, ...]] = []
    compute = _append.compute

    def counted(kind: type[Append], asked: Any, names: tuple[str, ...], *rest: Any) -> Any:
        calls.append(names)
        return compute(kind, asked, names, *rest)

    def choose(problem: Append, _: torch.device) -> Any:
        config = APPEND.fixed_config(APPEND.steps["ka1"], problem.dtype)
        if reason := config.refusal(problem):
            raise ValueError(reason)
        return config

    monkeypatch.setattr(_append, "_choose", choose)
    monkeypatch.setattr(_append, "compute", counted)
    _forget()
    yield calls
    _forget()


@pytest.fixture
def returned_q(monkeypatch) -> None:
    """Attention is left out, and functions return q as it is turned."""
    monkeypatch.setattr(_kvcache, "decode", lambda q, *_, **__: q)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def drawn(*of_cache: int, new: int = 2) -> Tensors:
    """Queries, new keys and values, and caches of K and V."""
    torch.manual_seed(1)
    new_rows = {n: randn(BATCH, new, KV_HEADS, D_HEAD) for n in "kv"}
    caches = {n: randn(*(of_cache or (BATCH, ROOM)), KV_HEADS, D_HEAD) for n in ("kc", "vc")}
    return {"q": randn(BATCH, new, HEADS, D_HEAD), **new_rows, **caches}


def call(given: Tensors, function: Callable[..., Any] = with_kvcache, **options: Any) -> Any:
    order = (given[name] for name in ("q", "kc", "vc", "k", "v"))
    return function(*order, cache_seqlens=options.pop("cache_seqlens", LENGTHS), **options)


def by_pytorch(given: Tensors, **options: Any) -> torch.Tensor:
    """`call`, by PyTorch's operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_append, "is_taken", lambda *_: False)
        return call(given, **options)


def assert_equal(given: Tensors, **options: Any) -> None:
    """Both ways give the same bits: of q as it is turned, and of both caches."""
    copies = {name: x.detach().clone() for name, x in given.items()}
    expected = [by_pytorch(copies, **options), copies["kc"], copies["vc"]]
    found = [call(given, **options), given["kc"], given["vc"]]
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.contiguous().view(torch.int16), y.contiguous().view(torch.int16))


def test_on_the_cpu_pytorch_appends(monkeypatch, returned_q) -> None:
    monkeypatch.setattr(_append, "compute", None)
    _forget()
    call(drawn(), **TABLES)


PLACES: dict[str, tuple[tuple[int, ...], dict[str, torch.Tensor]]] = {
    "rows": ((), {}),
    "chosen rows": ((5, ROOM), {"cache_batch_idx": torch.tensor([4, 0, 2]).int()}),
    "pages": ((PAGES, PAGE_SIZE), {"page_table": TABLE}),
}


@pytest.mark.usefixtures("returned_q")
class TestBothWays:
    @pytest.mark.parametrize("places", PLACES)
    @pytest.mark.parametrize("new", [1, 3])
    def test_without_rotary_embedding(self, forced, places, new):
        shape, options = PLACES[places]
        assert_equal(drawn(*shape, new=new), **options)
        assert len(forced) == 1 and "q" not in forced[0]

    @pytest.mark.parametrize("places", PLACES)
    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize("pairs", [8, 16])
    @pytest.mark.parametrize(
        "options", [{}, {"causal": True}, {"window_size": (4, -1)}], ids=["all", "causal", "local"]
    )
    def test_with_rotary_embedding(self, forced, places, interleaved, pairs, options):
        shape, own = PLACES[places]
        dtype = torch.float32 if pairs == 16 else torch.bfloat16
        tables = {name: x[:, :pairs].contiguous().to(dtype) for name, x in TABLES.items()}
        asked = {"rotary_interleaved": interleaved, **own, **options, **tables}
        assert_equal(drawn(*shape), **asked)
        assert len(forced) == 1 and "q_rotated" in forced[0]

    def test_at_positions_of_their_own_and_beyond_the_tables(self, forced):
        own = torch.tensor([-4, 23, 2**31 - 1]).int()
        assert_equal(drawn(), rotary_seqlens=own, **TABLES)
        assert "rotary_seqlens" in forced[0]

    @pytest.mark.parametrize("begins", [(24, 40, 2**31 - 9), (-3, -1, -2), (0, 23, 22)])
    def test_of_sequences_with_little_room(self, forced, begins):
        assert_equal(drawn(), cache_seqlens=torch.tensor(begins).int(), **TABLES)
        assert forced

    def test_in_pages_with_heads_before_keys_and_in_parts_of_other_tensors(self, forced):
        given = drawn(PAGES, PAGE_SIZE)
        for name in ("kc", "vc"):
            given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
        qkv = torch.cat([given[name] for name in "qkv"], 2)
        parts = qkv.split([HEADS, KV_HEADS, KV_HEADS], 2)
        given |= dict(zip("qkv", parts, strict=True))
        assert_equal(given, page_table=TABLE, **TABLES)
        assert forced

    def test_it_tells_autograd_that_the_caches_were_written(self, forced):
        given = drawn()
        versions = given["kc"]._version, given["vc"]._version
        before = given["q"].clone()
        call(given, **TABLES)
        assert given["kc"]._version > versions[0] and given["vc"]._version > versions[1]
        assert torch.equal(given["q"], before)
        with torch.inference_mode():
            assert_equal(drawn(), **TABLES)


def _misaligned(given: Tensors) -> None:
    memory = torch.zeros(given["kc"].numel() + 1, dtype=torch.bfloat16)
    given["kc"] = memory[1:].view(given["kc"].shape).copy_(given["kc"])


def _in_one_tensor(given: Tensors) -> None:
    given["kc"], given["vc"] = torch.stack((given["kc"], given["vc"]), 1).unbind(1)


def _from_the_cache(given: Tensors) -> None:
    given["k"] = given["kc"][:, 3:5]


def _expanded(given: Tensors) -> None:
    given["v"] = given["v"][..., :1].expand(-1, -1, -1, D_HEAD)


def _with_gradients(given: Tensors) -> None:
    given["vc"].requires_grad_()


@pytest.mark.usefixtures("returned_q")
class TestPyTorch:
    """PyTorch's operators compute what the kernel does not take."""

    @pytest.mark.parametrize(
        "change", [_misaligned, _in_one_tensor, _from_the_cache, _expanded, _with_gradients]
    )
    def test_tensors_that_lie_otherwise(self, forced, change):
        given = drawn()
        change(given)
        with torch.no_grad():
            assert_equal(given, **TABLES)
        assert not forced

    @pytest.mark.parametrize("pairs", [1, 4])
    def test_few_pairs(self, forced, pairs):
        assert_equal(drawn(), **{name: x[:, :pairs] for name, x in TABLES.items()})
        assert not forced

    def test_tables_of_other_dtypes(self, forced):
        for dtype in (torch.float64, torch.float16):
            assert_equal(drawn(), **{name: x.to(dtype) for name, x in TABLES.items()})
        assert not forced

    def test_heads_of_other_sizes(self, forced):
        given = {name: x[..., :20].contiguous() for name, x in drawn().items()}
        assert_equal(given)
        assert not forced

    def test_no_new_keys(self, forced):
        given = drawn(new=0)
        before = given["kc"].clone()
        assert call(given, **TABLES).shape == (BATCH, 0, HEADS, D_HEAD)
        assert torch.equal(given["kc"], before) and not forced


# -- the rest of what torch wants ------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_code_takes_the_kernel_too(forced, returned_q, dynamic: bool | None) -> None:
    def function(given: Tensors, begins: torch.Tensor) -> torch.Tensor:
        return call(given, flash_attn.flash_attn_with_kvcache, cache_seqlens=begins, **TABLES)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for new in (1, 2, 3):  # of another size the second time, and of any from then on
        eager, traced = drawn(new=new), drawn(new=new)
        expected = function(eager, LENGTHS)
        assert torch.equal(compiled(traced, LENGTHS), expected)
        assert torch.equal(traced["kc"], eager["kc"]) and torch.equal(traced["vc"], eager["vc"])
    assert len(forced) == 6


def test_compiled_code_goes_on_without_it(returned_q) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for new in (1, 2):
        eager, traced = drawn(new=new), drawn(new=new)
        assert torch.equal(compiled(traced, **TABLES), call(eager, **TABLES))
        assert torch.equal(traced["kc"], eager["kc"])


def test_fake_tensors_pose_the_same_call(forced, returned_q) -> None:
    def function(*tensors: torch.Tensor) -> Any:
        return flash_attn.flash_attn_with_kvcache(*tensors)

    given = drawn()
    order = [given[name] for name in ("q", "kc", "vc", "k", "v")]
    with torch._subclasses.FakeTensorMode() as mode:
        make_fx: Callable[..., Any] = torch.fx.experimental.proxy_tensor.make_fx
        fake = map(mode.from_tensor, (*order, *TABLES.values(), LENGTHS))
        graph = make_fx(function)(*fake).graph
    names = [str(node.target) for node in graph.nodes if "flash_attention" in str(node.target)]
    assert names == ["flash_attention.append_rotated.default"] and not forced


@pytest.mark.slow
def test_it_is_what_torch_expects_of_an_operator(forced) -> None:
    given = drawn(PAGES, PAGE_SIZE)
    new, caches = (given["k"], given["v"]), (given["kc"], given["vc"])
    operator = torch.ops.flash_attention.append_rotated.default
    places = LENGTHS, None, TABLE, None
    turned = given["q"], *TABLES.values()
    torch.library.opcheck(
        operator, (*new, *turned, *places, True, True, *caches, torch.empty_like(given["q"]))
    )
    torch.library.opcheck(operator, (*new, None, None, None, *places, True, True, *caches, None))


@pytest.mark.parametrize(
    "changes",
    [
        {"k": randn(BATCH, 2, KV_HEADS, D_HEAD).half()},
        {"k": randn(BATCH, 2, 4, D_HEAD)},
        {"v": randn(BATCH, 1, KV_HEADS, D_HEAD)},
        {"vc": randn(BATCH, 9, KV_HEADS, D_HEAD)},
        {"kc": randn(2, ROOM, KV_HEADS, D_HEAD), "vc": randn(2, ROOM, KV_HEADS, D_HEAD)},
        {"kc": randn(1, ROOM, KV_HEADS, D_HEAD).expand(BATCH, -1, -1, -1)},
        {"cache_batch_idx": LENGTHS[:2]},
        {"cache_batch_idx": LENGTHS, "page_table": TABLE},
        {"rotary_seqlens": LENGTHS.long(), **TABLES},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_it_is_refused_as_before(forced, returned_q, changes: dict[str, Any]) -> None:
    given = {name: changes.get(name, x) for name, x in drawn().items()}
    options = {name: x for name, x in changes.items() if name not in given}
    with pytest.raises((TypeError, ValueError)) as expected:
        by_pytorch(given, **options)
    before = given["kc"].clone()
    with pytest.raises(type(expected.value)) as found:
        call(given, **options)
    assert str(found.value) == str(expected.value)
    assert torch.equal(given["kc"], before) and not forced


def test_gradients_are_refused_as_before(forced, returned_q) -> None:
    given = drawn()
    given["k"].requires_grad_()
    with pytest.raises(RuntimeError, match="what is written into k_cache or v_cache"):
        call(given, **TABLES)
