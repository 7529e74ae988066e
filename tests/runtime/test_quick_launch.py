"""A launch that is repeated from C: for which tensors, with which bytes, and when Python asks for
it. What it computes is in tests/gpu."""

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flash_attention
from flash_helpers.gpu import largest_device
from flash_helpers.kernel_configs import AttentionForward, Config, Element
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.registry.call import Launch, TensorMap
from flash_helpers.registry.choice import preferred_steps
from flash_helpers.runtime import call, library
from flash_helpers.runtime.tensors import kernel_strides, span_bytes

NO_SUCH_DEVICE = 9999
CONFIG = flash_attention.best_config(preferred_steps(OPERATION, None)[0].id, "bf16", "cpu")
PROBLEM = AttentionForward(2, 1, 128)
SHAPE = PROBLEM.shape

needs_exchange = pytest.mark.skipif(
    call._exchange() is None, reason="PyTorch describes tensors to C since 2.10"
)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape or SHAPE, dtype=dtype)


def four() -> dict[str, torch.Tensor]:
    """q, k, v and o, one of them not contiguous."""
    return {
        "q": tensor(),
        "k": tensor(2, 1, 128, 128).transpose(1, 2),
        "v": tensor(),
        "o": tensor(),
    }


def launch_of(tensors: dict[str, torch.Tensor]) -> Launch:
    strides = {name: kernel_strides(x) for name, x in tensors.items()}
    (launch,) = CONFIG.call(PROBLEM, strides, largest_device(90)).launches
    return launch


def quick_launch(
    tensors: dict[str, torch.Tensor], launch: Launch | None = None, **alignments: int
) -> library.QuickLaunch | None:
    return library.Launcher(launch or launch_of(tensors), 0, NO_SUCH_DEVICE).quick(
        call._exchange(),
        tensors["q"].__dlpack_device__(),
        [
            library.Described(
                *(name, Element.BF16, tuple(x.shape), x.stride(), span_bytes(x), name == "o"),
                alignment=alignments.get(name, 16),
            )
            for name, x in tensors.items()
        ],
    )


def bound(quick: library.QuickLaunch, *tensors: object) -> bytes | None:
    """The bytes of the launch that it would make."""
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)
    data = ctypes.create_string_buffer(4096)
    size = library._Ready.from_buffer_copy(quick.__self__).launch_bytes
    objects = (ctypes.py_object * 4)(*tensors)
    is_bound = prototype(("flash_bind", library.load()))(quick.__self__, objects, data)
    return data.raw[:size] if is_bound else None


@needs_exchange
class TestBytes:
    def test_are_those_of_the_launcher(self, monkeypatch):
        tensors = four()
        sent: list[bytes] = []
        monkeypatch.setattr(library.load(), "flash_launch", lambda data: sent.append(data))
        quick = quick_launch(tensors)
        for now in (tensors, {**tensors, "q": tensor(), "o": tensor()}):
            addresses = {name: x.data_ptr() for name, x in now.items()}
            library.Launcher(launch_of(now), 0, NO_SUCH_DEVICE).run(
                {**addresses, library.STREAM: 0}
            )
            assert bound(quick, *now.values()) == sent[-1]
        assert sent[0] != sent[1]

    def test_are_none_for_a_launch_that_takes_more(self):
        plain = launch_of(four())
        first, *others = plain.addresses
        q_map = TensorMap(
            "q", Element.BF16, dims=(128, 128), strides=(256,), box=(64, 64), offset=-256
        )
        assert quick_launch(four(), plain) is not None
        assert quick_launch(four(), replace(plain, tensor_maps=((0, q_map),) * 5)) is not None
        for more in (
            replace(plain, addresses=(*others, replace(first, tensor="buffer"))),
            replace(plain, addresses=(*plain.addresses, first)),
            replace(plain, addresses=(replace(first, offset=16), *others)),
        ):
            assert quick_launch(four(), more) is None


@needs_exchange
class TestOther:
    """Tensors that a call was not checked for are left to those who can say what is wrong."""

    @pytest.fixture
    def tensors(self) -> dict[str, torch.Tensor]:
        return four()

    @pytest.fixture
    def is_taken(self, tensors) -> Callable[..., bool]:
        quick = quick_launch(tensors)
        return lambda **changes: bound(quick, *{**tensors, **changes}.values()) is not None

    def test_only_than_the_same_again(self, is_taken):
        assert is_taken()
        assert is_taken(**four())

    @pytest.mark.parametrize("name", "qkvo")
    def test_in_layout(self, tensors, is_taken, name):
        own = tensors[name]
        for other in (
            tensor(dtype=torch.float16),
            tensor(dtype=torch.int16),
            tensor(2, 256, 1, 128),
            tensor(2, 128, 128),
            tensor(2, 128, 1, 256)[..., ::2],
            tensor(2, 256, 1, 128)[:, ::2],
            own.as_strided(SHAPE, (*own.stride()[:2], own.stride()[2] + 8, 1)),  # of a single head
            tensor().to("meta"),
            tensor().to_sparse(),
        ):
            assert not is_taken(**{name: other}), other.stride()

    @pytest.mark.parametrize("name", "kv")
    def test_in_a_shape_that_is_another_tensors(self, name):
        long = {"k": tensor(2, 256, 3, 128), "v": tensor(2, 256, 3, 128)}
        tensors = {**four(), **long}
        quick = quick_launch(tensors)
        assert bound(quick, *tensors.values()) is not None
        assert bound(quick, *{**tensors, name: tensor()}.values()) is None
        assert bound(quick, *{**tensors, "q": long["k"]}.values()) is None

    @pytest.mark.parametrize("name", "qkvo")
    def test_in_being_none(self, is_taken, name):
        assert not is_taken(**{name: None})
        with FakeTensorMode():
            assert not is_taken(**{name: tensor()})

    @pytest.mark.parametrize("name", "qkvo")
    def test_in_alignment(self, tensors, is_taken, name):
        strides = tensors[name].stride()
        memory = tensor(2 * 128 * 128 + 8)
        assert is_taken(**{name: memory[8:].as_strided(SHAPE, strides)})
        assert not is_taken(**{name: memory[4:].as_strided(SHAPE, strides)})

    @pytest.mark.parametrize("name", "qkvo")
    def test_in_the_alignment_of_each_tensor(self, tensors, name):
        quick = quick_launch(tensors, **{name: 4})
        memory = tensor(2 * 128 * 128 + 8)

        def is_taken(other: str, first: int) -> bool:
            moved = memory[first:].as_strided(SHAPE, tensors[other].stride())
            return bound(quick, *{**tensors, other: moved}.values()) is not None

        assert is_taken(name, 2) and not is_taken(name, 1)
        assert not any(is_taken(other, 2) for other in tensors if other != name)

    @pytest.mark.parametrize("name", "qkv")
    def test_in_overlapping(self, tensors, is_taken, name):
        memory = tensor(4 * 128 * 128)
        at = [memory[n * 128 * 128 :].as_strided(SHAPE, tensors[name].stride()) for n in range(3)]
        o = [memory[n * 128 * 128 :][: 2 * 128 * 128].view(SHAPE) for n in range(3)]
        assert is_taken(**{name: at[0]}, o=o[2])
        assert is_taken(**{name: at[2]}, o=o[0])
        for own, output in ((0, 0), (0, 1), (1, 0)):
            assert not is_taken(**{name: at[own]}, o=o[output])


@needs_exchange
class TestFunction:
    def test_tells_that_cuda_refuses(self):
        tensors = four()
        assert bound(quick_launch(tensors), *tensors.values())
        assert quick_launch(tensors)(*tensors.values()) is False

    def test_takes_four_tensors(self):
        assert quick_launch(four())(*[*four().values()][:3]) is False


class Quick:
    """In place of a quick launch: says what it is told to."""

    def __init__(self, launches: bool) -> None:
        self.launches = launches
        self.given: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, *tensors: torch.Tensor) -> bool:
        self.given.append(tensors)
        return self.launches


class TestCall:
    @pytest.fixture(autouse=True)
    def ran(self, monkeypatch) -> list[Config]:
        """The runs in the ordinary way."""
        ran: list[Config] = []
        monkeypatch.setattr(call.ReadyCall, "run", lambda self: ran.append(self.config))
        monkeypatch.setattr(call, "_plans", {})
        monkeypatch.setattr(call, "_quick_plans", {})
        return ran

    @pytest.fixture
    def quick(self) -> Callable[[bool], Quick]:
        """Makes one, as if a call on contiguous tensors had been there before."""

        def make(launches: bool) -> Quick:
            quick = Quick(launches)
            plan = call.prepare(CONFIG, tensor(), tensor(), tensor()).plan
            asked = CONFIG.short_form(), (("softmax_scale", None),)
            call._quick_plans[AttentionForward, asked, tensor().shape, tuple("qkvo")] = replace(
                plan, quick=quick
            )
            return quick

        return make

    @pytest.mark.parametrize("output", [True, False], ids=["given", "new"])
    def test_that_is_launched_is_done(self, ran, quick, output):
        found = quick(launches=True)
        q, k, v = tensor(), tensor(), tensor()
        o = tensor() if output else None
        result = flash_attention.forward(CONFIG, q, k, v, o)
        ((*inputs, written),) = found.given
        assert all(x is y for x, y in zip(inputs, (q, k, v), strict=True))
        assert result.data_ptr() == written.data_ptr()
        assert o is None or written is o
        assert (result.shape, result.dtype, result.is_contiguous()) == (q.shape, q.dtype, True)
        assert ran == []

    def test_that_is_not_launched_is_run_as_the_first(self, ran, quick):
        found = quick(launches=False)
        flash_attention.forward(CONFIG, tensor(), tensor(), tensor())
        assert (len(found.given), ran) == (1, [CONFIG.general()])

    def test_that_is_not_launched_is_refused_in_words(self, quick):
        quick(launches=False)
        with pytest.raises(TypeError, match=r"k is torch\.float16"):
            flash_attention.forward(CONFIG, tensor(), tensor().half(), tensor())

    def test_with_an_output_that_requires_grad_is_refused(self, quick):
        found = quick(launches=True)
        with pytest.raises(ValueError, match="o requires grad"):
            flash_attention.forward(CONFIG, tensor(), tensor(), tensor(), tensor().requires_grad_())
        assert found.given == []

    def test_bumps_the_version_of_its_output(self, quick):
        quick(launches=True)
        o = tensor()
        version = o._version
        flash_attention.forward(CONFIG, tensor(), tensor(), tensor(), o)
        assert o._version == version + 1

    def test_with_a_gradient_has_none(self, quick):
        quick(launches=True)
        o = flash_attention.forward(CONFIG, tensor().requires_grad_(), tensor(), tensor())
        with pytest.raises(RuntimeError, match="flash_attention has no backward pass"):
            o.sum().backward()

    def test_of_other_options_or_another_shape_has_its_own(self, ran, quick):
        found = quick(launches=True)
        flash_attention.attention(tensor(), tensor(), tensor())
        flash_attention.forward(CONFIG, *(tensor(1, 128, 1, 128) for _ in range(3)))
        assert (found.given, ran) == ([], 2 * [CONFIG.general()])

    def test_is_forgotten_with_the_plans(self, monkeypatch, quick):
        monkeypatch.setattr(call, "_PLANS_KEPT", 1)
        found = quick(launches=True)
        flash_attention.forward(CONFIG, *(tensor(1, 128, 1, 128) for _ in range(3)))
        flash_attention.forward(CONFIG, tensor(), tensor(), tensor())
        assert found.given == []
