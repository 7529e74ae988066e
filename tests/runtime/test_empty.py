"""Empty tensors: attention() and forward() answer without a kernel, also what no kernel takes."""

import math

import pytest
import torch
from torch.export import Dim

import flash_attention
from flash_helpers.runtime import call, call_log

CONFIG = "o5_bf16_d128_Br128_Bc64_w4"

# Shapes of q and k: (batch, seq, heads, d_head).
SHAPES = [
    ((0, 128, 2, 128), (0, 128, 2, 128)),
    ((1, 100, 0, 64), (1, 100, 0, 64)),
    ((1, 100, 0, 64), (1, 100, 2, 64)),
    ((2, 0, 4, 128), (2, 7, 2, 128)),
    ((2, 0, 4, 128), (2, 0, 4, 128)),
    ((2, 5, 4, 96), (2, 0, 2, 96)),  # the only one with elements in o
]
each_shape = pytest.mark.parametrize(("q", "k"), SHAPES, ids=str)


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.fixture
def no_kernel(monkeypatch) -> None:
    """Fail where a call asks for a kernel."""
    monkeypatch.setattr(call, "_plans", {})
    monkeypatch.setattr(call, "_make_plan", lambda *_: pytest.fail("a kernel was asked for"))


def check(o: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor) -> None:
    assert (o.shape, o.dtype, o.is_contiguous()) == (q.shape, q.dtype, True)
    assert torch.equal(o, torch.zeros_like(o))
    if lse is not None:
        batch, len_q, heads, _ = q.shape
        assert (lse.shape, lse.dtype) == ((batch, heads, len_q), torch.float32)
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


@pytest.mark.usefixtures("no_kernel")
@each_shape
class TestResult:
    @pytest.mark.parametrize("causal", [False, True])
    def test_of_attention(self, q, k, causal):
        q, k = ones(*q), ones(*k)
        for _ in range(2):  # by a new plan and by the one that was kept
            o, lse = flash_attention.attention(
                q, k, k, causal=causal, softmax_scale=0.3, return_lse=True
            )
            check(o, lse, q)
        check(flash_attention.attention(q, k, k), None, q)

    def test_of_forward_into_given_memory(self, q, k):
        q, k = ones(*q), ones(*k)
        check(flash_attention.forward(CONFIG, q, k, k), None, q)
        batch, len_q, heads, _ = q.shape
        lse, o = ones(batch, heads, len_q, dtype=torch.float32), torch.ones_like(q)
        assert flash_attention.forward(CONFIG, q, k, k, o, lse=lse) is o
        check(o, lse, q)

    def test_of_fake_tensors(self, q, k):
        q, k = ones(*q), ones(*k)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in (q, k, k)]
            o, lse = flash_attention.attention(*fakes, causal=True, return_lse=True)
            assert o.shape == flash_attention.forward(CONFIG, *fakes).shape == q.shape
            assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])


@pytest.mark.parametrize(("q", "k"), [SHAPES[0], SHAPES[-1]], ids=str)
def test_compiled_code_computes_them(no_kernel, q, k):
    torch._dynamo.reset()
    q, k = ones(*q), ones(*k)
    compiled = torch.compile(
        lambda q, k: flash_attention.attention(q, k, k, return_lse=True),
        fullgraph=True,
        backend="aot_eager",
    )
    check(*compiled(q, k), q)


def test_an_exported_program_computes_them(no_kernel):
    class Block(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return flash_attention.attention(q, k, k) + 1

    sizes = ({0: Dim("batch", max=8)}, {0: Dim.AUTO})
    q, k = ones(2, 5, 4, 64), ones(2, 0, 4, 64)
    exported = torch.export.export(Block(), (q, k), dynamic_shapes=sizes)
    assert torch.equal(exported.module()(q[:1], k[:1]), torch.ones(1, 5, 4, 64).bfloat16())


def test_a_given_output_may_be_an_inference_tensor_and_its_change_is_seen():
    q, k = ones(1, 5, 1, 64), ones(1, 0, 1, 64)
    with torch.inference_mode():
        o = torch.ones_like(q)
    check(flash_attention.forward(CONFIG, q, k, k, o), None, q)
    weight = torch.ones(q.shape, requires_grad=True)
    o = torch.ones_like(q)
    loss = (weight * o).sum()
    flash_attention.forward(CONFIG, q, k, k, o)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_operation_of_the_face_answers():
    q, k = ones(1, 5, 1, 64), ones(1, 0, 1, 64)
    check(flash_attention.run(CONFIG, q, k, k)["o"], None, q)
    with pytest.raises(ValueError, match=r"no kernel runs on .* k \(1, 0, 1, 64\).*nothing to cou"):
        flash_attention.simulate(CONFIG, q, k, k)


@pytest.mark.parametrize("level", [call_log.NAMES, call_log.TENSORS])
def test_a_log_tells_of_a_call_without_a_kernel(tmp_path, level):
    path = tmp_path / "calls.log"
    log = call_log.CallLog(level, call_log.Destination.from_text(str(path)))
    q = ones(1, 0, 2, 64)
    with call.calls_logged(log):
        flash_attention.attention(q, q, q)
    first, *rest = path.read_text().splitlines()
    assert "attention() at" in first and first.endswith(", without a kernel")
    assert len(rest) == (4 if level == call_log.TENSORS else 0)


class TestRefusal:
    """Empty tensors must fit together as all others do."""

    @pytest.mark.parametrize(
        ("q", "k", "v", "message"),
        [
            ((1, 5, 4, 0), (1, 5, 4, 0), None, r"q has d_head 0, shape \(1, 5, 4, 0\).*at least 1"),
            ((1, 5, 4, 64), (1, 5, 0, 64), None, "k has heads 0, .* q has 4: use a divisor of 4"),
            ((1, 5, 4, 64), (0, 5, 4, 64), None, r"k has shape .*equal, k \(1, 5, 4, 64\)"),
            ((1, 5, 4, 64), (1, 0, 4, 64), (1, 5, 4, 64), r"v has shape .*equal, v \(1, 0, 4, 64"),
            ((0, 4, 64), (0, 4, 64), None, "q has 3 dimensions"),
        ],
    )
    @pytest.mark.parametrize("is_fake", [False, True])
    def test_of_a_shape(self, q, k, v, message, is_fake):
        given = [ones(*shape) for shape in (q, k, v or k)]
        mode = torch._subclasses.FakeTensorMode()
        given = [mode.from_tensor(x) for x in given] if is_fake else given
        for function in (
            flash_attention.attention,
            lambda *given: flash_attention.forward(CONFIG, *given),
        ):
            with pytest.raises(ValueError, match=message):
                function(*given)

    def test_of_a_dtype(self):
        q, k = ones(1, 5, 1, 64), ones(1, 0, 1, 64)
        with pytest.raises(
            TypeError, match=r"q is torch\.float32 and the kernels take torch.float"
        ):
            flash_attention.attention(q.float(), k, k)
        with pytest.raises(TypeError, match=r"k is torch.float16 and attention_forward takes tor"):
            flash_attention.attention(q, k.half(), k)
        with pytest.raises(TypeError, match=r"q is torch.float16 and o5_bf16.*of its own dtype"):
            flash_attention.forward(CONFIG, q.half(), k, k)

    def test_of_an_option(self):
        q = ones(1, 0, 1, 64)
        with pytest.raises(ValueError, match="softmax_scale -1 is negative"):
            flash_attention.attention(q, q, q, softmax_scale=-1)

    def test_of_an_output(self):
        q, k = ones(1, 5, 2, 64), ones(1, 0, 2, 64)
        for o, message in (
            (ones(1, 5, 1, 64).expand(1, 5, 2, 64), "elements share memory"),
            (torch.ones_like(q).requires_grad_(), "o requires grad and is overwritten"),
            (q, "o overlaps q in memory"),
            (ones(1, 5, 2, 32), r"o has shape \(1, 5, 2, 32\)"),
        ):
            with pytest.raises(ValueError, match=message):
                flash_attention.forward(CONFIG, q, k, k, o)


def test_an_input_that_is_missing_is_named():
    with pytest.raises(ValueError, match="v is missing: attention_forward takes it, pass it"):
        flash_attention.run(CONFIG, ones(1, 0, 1, 128), ones(1, 0, 1, 128))
