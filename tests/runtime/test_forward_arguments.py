"""Arguments that forward() accepts; the rest is refused before any launch, with the way out."""

import pytest
import torch
from attention_configs import attention_progression
from other_family import OTHER

import flash_attention
from flash_helpers.kernel_configs import AttentionForward, Element, get_kernel_progression_configs
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.runtime import tensors

CONFIG = next(
    config
    for config in get_kernel_progression_configs()
    if config.version == 7 and config.dtype == Element.BF16
)
SHAPE = (2, 128, 3, 128)  # batch, seq, heads, d_head


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.empty(shape or SHAPE, dtype=dtype, device=device)


@pytest.fixture(params=["forward", "forward_timed"])
def call(request):
    """Either function with good arguments, some of which are replaced."""

    def run(cfg: object = CONFIG, **changes: object) -> object:
        arguments = {"q": tensor(), "k": tensor(), "v": tensor(), **changes}
        return getattr(flash_attention, request.param)(cfg, **arguments)

    return run


class TestForward:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"q": None}, TypeError, "q is a NoneType: pass a torch.Tensor"),
            ({"v": [1.0]}, TypeError, "v is a list: pass a torch.Tensor"),
            ({"o": 3}, TypeError, "o is a int: pass a torch.Tensor"),
            ({"k": tensor().to_sparse()}, TypeError, "k has layout torch.sparse_coo"),
            (
                {"k": tensor(dtype=torch.float32)},
                TypeError,
                r"k is torch.float32 and v7_bf16.* takes torch.bfloat16: .*\.to\(torch.bfloat16\)",
            ),
            ({"q": tensor(dtype=torch.float16)}, TypeError, "q is torch.float16 and v7_bf16"),
            ({"o": tensor(dtype=torch.float16)}, TypeError, "o is torch.float16 and v7_bf16"),
            ({"v": tensor(device="meta")}, ValueError, "v is on meta and q on cpu"),
            ({"o": tensor(device="meta")}, ValueError, "o is on meta and q on cpu"),
            ({"q": tensor(128, 3, 128)}, ValueError, r"q has 3 dimensions, shape \(128, 3, 128\)"),
            ({"k": tensor(1, 128, 3, 128)}, ValueError, r"k has shape \(1, 128, 3, 128\) and q"),
            ({"k": tensor(2, 128, 3, 64)}, ValueError, r"k has .* batch and d_head must be equal"),
            ({"v": tensor(2, 64, 3, 128)}, ValueError, r"v has shape \(2, 64, 3, 128\) and k"),
            ({"v": tensor(2, 128, 1, 128)}, ValueError, r"v has shape \(2, 128, 1, 128\) and k"),
            ({"o": tensor(1, 128, 3, 128)}, ValueError, r"o has shape \(1, 128, 3, 128\) and q"),
        ],
    )
    def test_refuses_a_tensor_that_does_not_fit(self, call, changes, error, message):
        with pytest.raises(error, match=message):
            call(**changes)

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((2, 128, 3, 0), "q has d_head 0"),
            ((2, 128, 3, 64), "d_head 64 is not supported by .*: pad .* to 128"),
            ((2, 100, 3, 128), "seq_len 100 is not a multiple of B_r 64"),
            ((2, 32, 3, 128), "seq_len 32 is not a multiple of B_r 64"),
        ],
    )
    def test_refuses_a_shape_that_no_kernel_takes(self, call, shape, message):
        q = tensor(*shape)
        with pytest.raises(ValueError, match=message):
            call(q=q, k=q, v=q)

    @pytest.mark.parametrize(
        ("cfg", "error", "message"),
        [
            (7, TypeError, "cfg is a int"),
            (
                "s3_bf16_w8_c4",
                ValueError,
                r"s3_bf16_w8_c4 computes rows, .*: call run\(\), or choo",
            ),
            ("v7", ValueError, "'v7' is not a config's short form"),
            ("v7_bf16_d128_Br64_Bc48_w4", ValueError, "'v7_bf16_d128_Br64_Bc48_w4'"),
        ],
    )
    def test_refuses_a_config_that_there_is_not(self, call, cfg, error, message):
        with pytest.raises(error, match=message):
            call(cfg)


class TestTimed:
    def test_of_cpu_tensors_is_refused_because_the_simulator_has_no_clock(self):
        with pytest.raises(RuntimeError, match="needs a CUDA device and the tensors are on the"):
            flash_attention.forward_timed(CONFIG, tensor(), tensor(), tensor())

    def test_of_another_device_names_it(self):
        q = tensor(device="meta")
        with pytest.raises(RuntimeError, match=r"on meta, .* no data: make them on a CUDA device"):
            flash_attention.forward_timed(CONFIG, q, q, q)


def test_a_device_that_neither_runs_nor_simulates_is_named():
    with pytest.raises(
        RuntimeError, match=r"run on CUDA devices, and in the simulator .* on xpu:0"
    ):
        tensors.device_for(AMPERE, torch.device("xpu:0"))


class TestShapes:
    """Limits that need tensors without memory."""

    def check(self, *shape: int, config=CONFIG) -> None:
        q = tensor(*shape, device="meta")
        tensors.check_problem(config, {"q": q, "k": q, "v": q})

    @pytest.mark.parametrize("shape", [(1, 64, 1, 128), (70_000, 64, 1, 128), (1, 64, 65535, 128)])
    def test_up_to_the_limits_pass(self, shape):
        self.check(*shape)

    def test_over_the_limit_of_heads_are_refused(self):
        with pytest.raises(ValueError, match="heads 65536 is over the limit 65535"):
            self.check(1, 64, 65536, 128)

    def test_over_the_limit_of_the_sequence_are_refused(self):
        with pytest.raises(ValueError, match="seq_len 2147483648 is over the limit 2147483647"):
            self.check(1, 2**31, 1, 128)

    def test_follow_the_tile_of_the_config(self):
        wide = CONFIG.replace(B_c=128)
        self.check(1, 128, 1, 128, config=wide)
        with pytest.raises(ValueError, match="seq_len 192 is not a multiple of B_c 128"):
            self.check(1, 192, 1, 128, config=wide)


class TestMemory:
    def check(self, q: torch.Tensor) -> None:
        problem = AttentionForward(*(q.shape[i] for i in (0, 2, 1)), dtype=CONFIG.dtype)
        tensors.check_strides(CONFIG, problem, {"q": q})
        alignment = CONFIG.supports.alignment_of(problem.tensor("q"))
        tensors.check_alignment({"q": alignment}, {"q": q})

    @pytest.mark.parametrize(
        "q",
        [
            tensor(),
            tensor(2, 3, 128, 128).transpose(1, 2),  # head-major
            tensor(2, 128, 3, 3, 128)[:, :, 1],  # one of packed q, k, v
            tensor(2, 128, 3, 256)[..., 128:],
            tensor(2, 128, 1, 128).expand(2, 128, 3, 128),  # one head for all
            tensor(4, 256, 3, 128)[::2, ::2],
        ],
        ids=["contiguous", "head-major", "packed", "wide", "expanded", "stepped"],
    )
    def test_of_any_layout_that_16_byte_copies_can_read_is_accepted(self, q):
        self.check(q)

    @pytest.mark.parametrize(
        ("q", "message"),
        [
            (
                tensor(2, 128, 3, 256)[..., ::2],
                r"q has stride 2 in its last dimension .*\.contiguous\(\)",
            ),
            (tensor(2, 128, 128, 3).mT, "q has stride 3 in its last dimension"),
            (tensor(2, 128, 3, 132)[..., :128], "q has seq stride 396|q has heads stride 132"),
            (
                tensor(2 * 128 * 3 * 128 + 2 * 4).as_strided(
                    SHAPE, (128 * 3 * 128 + 4, 384, 128, 1)
                ),
                "q has batch stride 49156, not a multiple of 8",
            ),
            (
                tensor(2 * 128 * 3 * 128 + 4)[4:].view(SHAPE),
                r"q starts at address 0x\w+, not a multiple of 16 bytes: call \.clone\(\)",
            ),
        ],
    )
    def test_of_any_other_layout_is_refused(self, q, message):
        with pytest.raises(ValueError, match=message):
            self.check(q)

    def test_with_rows_too_far_apart_is_refused(self):
        storage = tensor(2**28 + 128, device="meta")
        q = storage.as_strided((1, 2, 1, 128), (0, 2**28, 0, 1))
        with pytest.raises(ValueError, match="seq stride 268435456, over the limit of 16777215"):
            self.check(q)

    def test_ignores_the_strides_of_single_items(self):
        q = tensor(64 * 128).as_strided((1, 64, 1, 128), (3, 128, 5, 1))
        self.check(q)
        assert tensors.kernel_strides(q) == (0, 128, 0, 1)

    def test_strides_are_batch_row_head(self):
        assert tensors.kernel_strides(tensor(2, 3, 128, 128).transpose(1, 2)) == (
            *(3 * 128 * 128, 128, 128 * 128, 1),
        )


def whole_row_views(count: int) -> tuple[torch.Tensor, ...]:
    """Tensors of SHAPE that share one buffer, row by row."""
    batch, seq, heads, d_head = SHAPE
    return tensor(batch, seq, count, heads, d_head).unbind(2)


class TestOutput:
    def check(self, o: torch.Tensor, *inputs: torch.Tensor) -> None:
        tensors.check_output(dict(zip("qkv", inputs, strict=False)), "o", o)

    @pytest.mark.parametrize(
        "o",
        [tensor(), tensor(2, 3, 128, 128).transpose(1, 2), tensor(4, 256, 3, 128)[::2, ::2]],
        ids=["contiguous", "head-major", "stepped"],
    )
    def test_of_its_own_is_accepted(self, o):
        self.check(o, tensor(), tensor(), tensor())

    def test_interleaved_with_the_inputs_is_accepted(self):
        q, k, v, o = whole_row_views(4)
        self.check(o, q, k, v)

    def test_next_to_an_input_is_accepted(self):
        q, o = tensor(2, *SHAPE).unbind(0)
        self.check(o, q)
        self.check(q, o)

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_that_is_an_input_is_refused(self, name):
        inputs = {letter: tensor() for letter in "qkv"}
        with pytest.raises(ValueError, match=f"o overlaps {name} in memory.*leave o out"):
            tensors.check_output(inputs, "o", inputs[name])

    def test_that_shares_one_row_with_an_input_is_refused(self):
        heads = 3
        memory = tensor(1, 64 * 2 - 1, heads, 128)
        with pytest.raises(ValueError, match="o overlaps q"):
            self.check(memory[:, 63:], memory[:, :64])

    def test_that_shares_interleaved_elements_is_refused(self):
        memory = tensor(2, 128, 4, 128)
        with pytest.raises(ValueError, match="o overlaps q"):
            self.check(memory[:, :, 1:4], memory[:, :, 0:3])

    def test_in_another_layout_of_the_same_memory_is_refused(self):
        memory = tensor(2 * 128 * 3 * 128)
        o = memory.view(2, 3, 128, 128).transpose(1, 2)
        with pytest.raises(ValueError, match="o overlaps q"):
            self.check(o, memory.view(SHAPE))

    @pytest.mark.parametrize(
        "o",
        [
            tensor(2, 128, 1, 128).expand(SHAPE),
            tensor(1, 128, 3, 128).expand(SHAPE),
            tensor(2 * 128 * 3 * 128).as_strided(SHAPE, (128 * 3 * 128, 384, 64, 1)),
        ],
        ids=["expanded heads", "expanded batch", "overlapping heads"],
    )
    def test_that_overlaps_itself_is_refused(self, o):
        with pytest.raises(ValueError, match="elements share memory or are interleaved"):
            self.check(o, tensor())

    def test_that_requires_grad_is_refused(self):
        with pytest.raises(ValueError, match=r"o requires grad .*o\.detach\(\)"):
            self.check(tensor().requires_grad_(), tensor())


class TestDevice:
    def test_below_compute_capability_8_is_refused_by_name(self):
        with pytest.raises(RuntimeError, match=r"Tesla T4 has compute capability 7\.5 .* 8\.0"):
            tensors.check_capability(AMPERE, "Tesla T4", (7, 5))

    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
    def test_of_compute_capability_8_or_higher_is_accepted(self, capability):
        tensors.check_capability(AMPERE, "a GPU", capability)

    def test_runs_a_family_only_where_its_own_instructions_are(self):
        tensors.check_capability(OTHER, "NVIDIA H100", (9, 0))
        with pytest.raises(RuntimeError, match=r"B200 has .* 10\.0 .* family other need 9\.0: use"):
            tensors.check_capability(OTHER, "NVIDIA B200", (10, 0))

    def test_is_named_or_numbered(self):
        assert tensors.device_index(3) == 3
        assert tensors.device_index("cuda:2") == 2
        with pytest.raises(ValueError, match="device cpu is not a CUDA device"):
            tensors.device_index("cpu")


class Graphs:
    """A torch.compile backend that keeps the graphs and runs nothing."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        self.graphs.append(graph)
        return lambda *_: (torch.zeros(SHAPE),)

    def targets(self) -> list[object]:
        (graph,) = self.graphs
        return [node.target for node in graph.graph.nodes if node.op == "call_function"]


class TestCompile:
    """torch.compile sees one operator; its fake gives the shape without a GPU."""

    @pytest.fixture(autouse=True)
    def reset(self):
        torch._dynamo.reset()

    @pytest.mark.parametrize("cfg", [CONFIG, CONFIG.short_form()], ids=["config", "short form"])
    def test_takes_forward_whole(self, cfg):
        graphs = Graphs()
        function = torch.compile(
            lambda q, k, v: flash_attention.forward(cfg, q, k, v) * 2,
            fullgraph=True,
            backend=graphs,
        )
        function(tensor(), tensor(), tensor())
        assert torch.ops.flash_attention.forward.default in graphs.targets()

    def test_takes_one_config_after_another(self):
        # A second config that differs in a number makes dynamo take that number for a variable.
        def function(cfg, q):
            return flash_attention.forward(cfg, q, q, q) * 2

        compiled = torch.compile(function, fullgraph=True, backend=Graphs())
        configs = [c for c in attention_progression() if c.dtype is Element.BF16]
        for cfg in (configs[0], configs[2], configs[-1]):
            compiled(cfg, tensor(1, 128, 1, 128))

    def test_takes_forward_with_output_whole(self):
        graphs = Graphs()
        function = torch.compile(
            lambda q, k, v, o: flash_attention.forward(CONFIG, q, k, v, o) * 2,
            fullgraph=True,
            backend=graphs,
        )
        function(tensor(), tensor(), tensor(), tensor())
        assert torch.ops.flash_attention.forward_out.default in graphs.targets()

    def test_with_autograd_runs_the_kernel(self):
        function = torch.compile(
            lambda q: flash_attention.forward(CONFIG, q, q, q) * 2,
            fullgraph=True,
            backend="aot_eager",
        )
        q = torch.randn(1, 64, 1, 128, dtype=torch.bfloat16)
        assert torch.equal(function(q), flash_attention.forward(CONFIG, q, q, q) * 2)

    def test_gets_a_contiguous_result_of_the_shape_of_q(self):
        q = tensor(2, 3, 128, 128, device="meta").transpose(1, 2)
        o = torch.ops.flash_attention.forward(CONFIG.short_form(), q, q, q, None)
        assert (o.shape, o.dtype, o.device, o.is_contiguous()) == (
            q.shape,
            q.dtype,
            q.device,
            True,
        )

    def test_is_refused_what_the_kernel_would_be(self):
        q = tensor(2, 100, 3, 128, device="meta")
        with pytest.raises(ValueError, match="seq_len 100 is not a multiple"):
            torch.ops.flash_attention.forward(CONFIG.short_form(), q, q, q, None)


def test_backward_is_an_error_and_no_wrong_gradient():
    q = tensor(device="meta").requires_grad_()
    o = torch.ops.flash_attention.forward(CONFIG.short_form(), q, q, q, None)
    with pytest.raises(RuntimeError, match=r"backward|grad"):
        o.sum().backward()
