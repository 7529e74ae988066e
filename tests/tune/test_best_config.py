"""Which config best_config() picks: the fastest known for a GPU, never one that is not listed."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from general_hopper import GENERAL, WITH_CAUSAL, general
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from flash_helpers.compile.codegen import CONFIG_FOLDER
from flash_helpers.gpu import Device, largest_device
from flash_helpers.kernel_configs import (
    FAMILIES,
    STEPS,
    AttentionForward,
    Config,
    Element,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
    get_listed_configs,
    read_configs,
)
from flash_helpers.operations.attention_backward.problem import AttentionBackward
from flash_helpers.operations.attention_forward import OPERATION
from flash_helpers.operations.attention_forward.problems import default_shape
from flash_helpers.registry.ampere import AMPERE
from flash_helpers.registry.choice import preferred_steps
from flash_helpers.registry.hopper import HOPPER, LONG_TILE
from flash_helpers.runtime import library, tensors
from flash_helpers.tune import best
from flash_helpers.tune.best import best_config, choose_config, config_for
from flash_helpers.tune.winners import BestAtSize, BestConfig, BestConfigs, best_file, load_best

LISTED = get_listed_configs()
FIXED = {(c.step.id, c.dtype): c for c in get_kernel_progression_configs()}
LARGE = next(c for c in LISTED if c.step.id == "v7" and c.B_r == 128 and c.dtype == Element.BF16)
UNLISTED = LARGE.replace(B_c=32)
H100, H200, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"


def entry(config: FlashForwardKernelConfig) -> BestConfig:
    return BestConfig(
        step=config.step.id,
        problem=config.measured(512).record(),
        config=config.short_form(),
        mean_speed=333.0,
        of_first=1.05,
        n_candidates=100,
        sizes=(512, 4096),
        date="2026-01-02",
        commit="abc",
        driver="580.1",
        compiler="13.0",
        torch="2.13.0",
    )


@pytest.fixture
def found(tmp_path: Path, monkeypatch):
    """(GPU, compute capability, *configs) puts a file of winners into the package."""
    monkeypatch.setattr(library, "_listed", lambda: frozenset(LISTED))
    monkeypatch.setattr(best, "sources_root", lambda package: tmp_path)

    def put(gpu: str, capability: str, *configs: FlashForwardKernelConfig) -> None:
        best._files.cache_clear()
        file = BestConfigs(gpu, capability, tuple(map(entry, configs)))
        file.save(best_file(tmp_path / "configs", gpu))

    yield put
    best._files.cache_clear()


@pytest.fixture
def on(monkeypatch):
    """(GPU, compute capability) is the current device."""

    def use(gpu: str, capability: str) -> None:
        major, minor = map(int, capability.split("."))
        properties = SimpleNamespace(name=gpu, major=major, minor=minor, multi_processor_count=132)
        tensors.gpu_device.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(tensors, "_counted_clusters", lambda index, capability: ())

    return use


def test_the_winner_on_this_gpu_is_picked(found, on) -> None:
    found(H100, "9.0", LARGE)
    found(H200, "9.0", FIXED["v7", Element.BF16])
    on(H100, "9.0")
    assert best_config(7, torch.bfloat16) == LARGE


@pytest.mark.parametrize("dtype", [torch.bfloat16, Element.BF16, "bf16", "bfloat16"])
@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", 0, torch.device("cuda", 0)])
def test_dtype_and_device_are_taken_in_every_form(found, on, dtype, device) -> None:
    found(H100, "9.0", LARGE)
    on(H100, "9.0")
    assert best_config(7, dtype, device) == LARGE


@pytest.mark.parametrize(
    ("gpu", "capability", "asked", "wanted"),
    [
        (H100, "9.0", (7, torch.float16), FIXED["v7", Element.FP16]),
        (H100, "9.0", (8, torch.bfloat16), FIXED["v8", Element.BF16]),
        (H100, "9.0", (7, "bf16", "cpu"), FIXED["v7", Element.BF16]),
        (H100, "9.0", (7, "bf16", torch.device("cpu")), FIXED["v7", Element.BF16]),
        # a GPU without a file takes the winner of its compute capability
        (H200, "9.0", (7, "bf16"), LARGE),
        (A100, "8.0", (7, "bf16"), FIXED["v7", Element.BF16]),
    ],
)
def test_a_winner_counts_for_its_step_dtype_and_compute_capability(
    found, on, gpu, capability, asked, wanted
) -> None:
    found(H100, "9.0", LARGE)
    on(gpu, capability)
    assert best_config(*asked) == wanted


def test_a_winner_that_is_not_listed_is_passed_over(found, on) -> None:
    found(H100, "9.0", UNLISTED)
    found(H200, "9.0", LARGE)
    on("NVIDIA H800", "9.0")
    assert best_config(7, "bf16") == LARGE


def test_without_a_gpu_and_without_files_there_is_still_a_config(found, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, step in STEPS.items():
        for dtype in FAMILIES[step.family].dtypes_of(step):
            assert best_config(name, dtype) == FIXED[name, dtype]


def test_a_winner_that_the_registry_has_no_more_is_passed_over(found, on, tmp_path) -> None:
    found(H100, "9.0", LARGE)
    path = best_file(tmp_path / "configs", H100)
    path.write_text(path.read_text().replace("_Br128_", "_Br127_"))
    on(H100, "9.0")
    assert best_config(7, "bf16") == FIXED["v7", Element.BF16]


@pytest.mark.parametrize(
    ("step", "dtype", "message"),
    [
        (0, "bf16", "'0': the steps are v1 to .* the nearest is v1"),
        ("v99", "bf16", "'v99': the steps are v1 to"),
        ("v7..9", "bf16", r"step 'v7\.\.9' is not one of v1, "),
        (7.5, "bf16", r"step 7\.5 is not one of v1, "),
        (7, torch.float32, "dtype fp32: family ampere has fp16 and bf16"),
    ],
)
def test_what_does_not_exist_is_refused(found, step, dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        best_config(step, dtype)


def test_causal_problems_and_lengths_have_winners_of_their_own(found, on, tmp_path) -> None:
    plain, causal = FIXED["h24", Element.BF16].variants()
    long = plain.replace(**LONG_TILE)
    found(H200, "9.0", plain)
    path = best_file(tmp_path / "configs", H200)
    file = load_best(path)
    at_sizes = (BestAtSize(4096, long.short_form(), 1.02),)
    plain_entry = dataclasses.replace(file.best[0], at_sizes=at_sizes)
    file.updated([plain_entry, entry(causal)]).save(path)
    assert len(load_best(path).best) == 2
    best._files.cache_clear()
    on(H200, "9.0")
    assert best_config("h24", "bf16") == best_config("h24", "bf16", seq_len=600) == plain
    assert best_config("h24", "bf16", seq_len=3000) == long
    assert best_config("h24", "bf16", causal=True, seq_len=3000) == causal


def test_of_two_lengths_that_are_as_near_the_longer_one_counts() -> None:
    found = dataclasses.replace(entry(FIXED["h24", Element.BF16]), sizes=(1024, 4096, 16384))
    assert [found.nearest(n) for n in (1, 2047, 2048, 8191, 8192, 10**6)] == [
        *(1024, 1024, 4096, 4096, 16384, 16384)
    ]


def test_a_tile_that_a_problem_fills_better_may_be_the_faster_one_there() -> None:
    plain = FIXED["h28", Element.BF16]
    long = FIXED["h26", Element.BF16].replace(**LONG_TILE)
    at_sizes = tuple(
        BestAtSize(n, long.short_form(), of_mean)
        for n, of_mean in ((1024, 0.93), (4096, 0.97), (16384, 1.03))
    )
    found = dataclasses.replace(entry(plain), sizes=(1024, 4096, 16384), at_sizes=at_sizes)
    # as measured, the problems of the sweep decide as the sweep did
    for n, fastest in ((1024, plain), (4096, plain), (16384, long)):
        assert found.for_problem(default_shape(n), largest_device(90)) == found.at_size(n)
        assert found.at_size(n)[0] == fastest
    # 4000 rows are 20.8 tiles of 192 rows and 31.25 of 128, each two by two: 22 and 32
    assert found.for_problem(default_shape(4000), largest_device(90))[0] == long
    # of one sequence there is a tile for half of the thread blocks at the end
    assert found.for_problem(AttentionForward(1, 16, 16384), largest_device(90))[0] == plain
    # no tile of 192 rows is filled by so few
    assert (
        found.for_problem(AttentionForward(16, 16, 200, len_k=16384), largest_device(90))[0]
        == plain
    )


def test_a_winner_with_a_mask_is_compared_on_problems_with_one() -> None:
    _, wide = FIXED["h28", Element.BF16].variants()
    narrow = FIXED["h24", Element.BF16].replace(B_c=64, V_slots=3, causal=True)
    at_sizes = (BestAtSize(512, narrow.short_form(), 1.02),)
    found = dataclasses.replace(entry(wide), at_sizes=at_sizes)
    problem = AttentionForward(2, 4, 300, causal=True)
    assert found.for_problem(problem, largest_device(90)) == [narrow, wide]
    assert found.for_problem(dataclasses.replace(problem, len_k=30), largest_device(90)) == [
        narrow,
        wide,
    ]
    assert found.for_problem(AttentionForward(2, 4, 4096, causal=True), largest_device(90)) == [
        wide
    ]


def test_without_winners_a_causal_problem_gets_the_fixed_config_with_a_mask(found) -> None:
    plain, causal = FIXED["h24", Element.BF16].variants()
    assert best_config("h24", "bf16", "cpu", causal=True) == causal
    assert best_config("h24", "bf16", "cpu") == plain
    with pytest.raises(ValueError, match="step v16 has no causal kernel"):
        best_config("v16", "bf16", "cpu", causal=True)


# The file


def test_a_file_is_read_back_and_is_what_the_generator_reads(tmp_path: Path) -> None:
    import json

    path = tmp_path / "best.json"
    configs = BestConfigs(H100, "9.0", (entry(LARGE), entry(FIXED["v8", Element.BF16])))
    configs.save(path)
    assert load_best(path) == configs
    assert read_configs(json.loads(path.read_text())) == [LARGE, FIXED["v8", Element.BF16]]


def test_a_file_from_before_winners_at_sizes_is_read_as_without(tmp_path: Path) -> None:
    import json

    path = tmp_path / "best.json"
    configs = BestConfigs(H100, "9.0", (entry(LARGE),))
    data = json.loads(configs.to_json())
    del data["best"][0]["at_sizes"]
    path.write_text(json.dumps(data))
    assert load_best(path) == configs


def test_a_winner_takes_the_place_of_the_one_before_in_order() -> None:
    first = BestConfigs(H100, "9.0", (entry(FIXED["v8", Element.BF16]), entry(LARGE)))
    better = dataclasses.replace(entry(LARGE), of_first=1.2)
    fp16 = entry(FIXED["v7", Element.FP16])
    assert first.updated([better, fp16]).best == (better, fp16, entry(FIXED["v8", Element.BF16]))


def test_committed_files_are_named_by_their_gpu_and_hold_configs_of_the_registry(root) -> None:
    for path in (root / CONFIG_FOLDER).glob("best_*.json"):
        file = load_best(path)
        assert path == best_file(path.parent, file.gpu)
        for found in file.best:
            assert file.find(found.step, found.dtype, **found.options) is found
            (config,) = found.at_size()
            assert config.step.id == found.step and config.supports.options == found.options
            assert config.measured(found.sizes[0]) == found.asked


class TestChoice:
    """choose_config(): the winners of this GPU before the fixed configs, if they take the
    problem."""

    CUDA = torch.device("cuda", 0)
    NEWEST = FIXED[preferred_steps(OPERATION, (8, 0))[0].id, Element.BF16]
    NEWEST_ON_HOPPER = FIXED[preferred_steps(OPERATION, (9, 0))[0].id, Element.BF16]
    ON_HOPPER = FIXED[[*HOPPER.steps][-1], Element.BF16]

    @pytest.fixture
    def on(self, on, monkeypatch):
        def use(gpu: str, capability: str) -> None:
            on(gpu, capability)
            found = tuple(map(int, capability.split(".")))
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)

        return use

    def winner(self) -> Config:
        """Of the newest step, and not its fixed config."""
        return self.NEWEST.replace(B_c=128, n_warps=8)

    @pytest.mark.parametrize(
        ("gpu", "capability", "seq_len", "wanted"),
        [
            (A100, "8.0", 256, NEWEST),
            (A100, "8.0", 77, NEWEST),
            (H100, "9.0", 256, NEWEST_ON_HOPPER),
            (H100, "9.0", 192, NEWEST_ON_HOPPER),
        ],
    )
    def test_without_winners_is_the_fixed_config_that_takes_the_problem(
        self, found, on, gpu, capability, seq_len, wanted
    ) -> None:
        on(gpu, capability)
        assert choose_config(AttentionForward(1, 1, seq_len), self.CUDA) == wanted

    def test_a_size_that_is_a_symbol_has_no_condition_but_those_of_refusals(self) -> None:
        shapes = ShapeEnv()
        symbolic = FakeTensorMode(shape_env=shapes).from_tensor(
            torch.empty(2, 1),
            symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC]),
        )
        problem = AttentionForward(symbolic.shape[0], 4, 256)  # as measured on H100s
        chosen = config_for(problem, Device(H100, (9, 0), 132))
        assert chosen == config_for(AttentionForward(2, 4, 256), Device(H100, (9, 0), 132))
        assert {guard.sloc.framework_loc.name for guard in shapes.guards} <= {"refusal"}

    def test_on_hopper_families_of_its_own_come_first(self) -> None:
        assert not self.NEWEST_ON_HOPPER.family.is_portable
        assert self.NEWEST.family.is_portable

    def test_a_family_that_no_sweep_measured_comes_behind_a_winner(self, found, on) -> None:
        assert self.NEWEST_ON_HOPPER.family.rank > self.ON_HOPPER.family.rank
        found(H100, "9.0", self.ON_HOPPER)
        on(H100, "9.0")
        assert choose_config(AttentionForward(1, 1, 256), self.CUDA) == self.ON_HOPPER
        # of another dtype there is no winner
        problem = AttentionForward(1, 1, 256, dtype=Element.FP16)
        assert choose_config(problem, self.CUDA).family is self.NEWEST_ON_HOPPER.family

    def test_is_the_winner_of_this_gpu(self, found, on, monkeypatch) -> None:
        monkeypatch.setattr(library, "kernels", lambda: [*LISTED, self.winner()])
        found(A100, "8.0", self.winner())
        on(A100, "8.0")
        problem = AttentionForward(1, 1, 256)
        assert choose_config(problem, self.CUDA) == self.winner()
        fp16 = problem.in_dtype(Element.FP16)
        assert choose_config(fp16, self.CUDA) == FIXED[self.NEWEST.step.id, Element.FP16]

    def test_passes_over_a_winner_that_does_not_take_the_problem(
        self, found, on, monkeypatch
    ) -> None:
        wide = FIXED["o5", Element.BF16].replace(B_c=128, n_warps=8)
        monkeypatch.setattr(library, "kernels", lambda: [*LISTED, wide])
        monkeypatch.setattr(best, "preferred_steps", lambda *_: [STEPS["o5"], STEPS["v16"]])
        found(A100, "8.0", wide)
        on(A100, "8.0")
        assert choose_config(AttentionForward(1, 1, 256), self.CUDA) == wide
        v16 = choose_config(AttentionForward(1, 1, 192), self.CUDA)
        assert v16 == FIXED["v16", Element.BF16]

    def test_passes_over_a_family_that_is_not_listed(self, found, on, monkeypatch) -> None:
        ampere = [config for config in LISTED if config.family.name == "ampere"]
        monkeypatch.setattr(library, "kernels", lambda: ampere)
        on(H100, "9.0")
        chosen = choose_config(AttentionForward(1, 1, 256), self.CUDA)
        assert chosen == FIXED["v16", Element.BF16]

    def test_of_a_causal_problem_is_the_config_with_a_mask_listed_or_not(
        self, found, on, monkeypatch
    ) -> None:
        plain, masked = general(WITH_CAUSAL).variants()
        monkeypatch.setattr(best, "FAMILIES", {"ampere": AMPERE, "hopper": GENERAL})
        monkeypatch.setattr(best, "preferred_steps", lambda *_: [WITH_CAUSAL])
        monkeypatch.setattr(best, "_winners", lambda *asked: [(plain, masked)[asked[3]["causal"]]])
        monkeypatch.setattr(library, "kernels", lambda: [plain, masked])
        on(H100, "9.0")
        problem = AttentionForward(1, 1, 100)
        assert choose_config(problem, self.CUDA) == plain
        assert choose_config(dataclasses.replace(problem, causal=True), self.CUDA) == masked
        monkeypatch.setattr(library, "kernels", lambda: [plain])
        assert choose_config(dataclasses.replace(problem, causal=True), self.CUDA) == masked

    def test_is_the_winner_at_the_length_and_one_with_a_mask_for_causal_problems(
        self, found, on, tmp_path, monkeypatch
    ) -> None:
        plain, causal = self.ON_HOPPER, self.NEWEST_ON_HOPPER.replace(causal=True)
        long = plain.replace(**LONG_TILE)
        monkeypatch.setattr(library, "kernels", lambda: [*LISTED, long])
        found(H200, "9.0", long)
        on(H200, "9.0")
        problem = AttentionForward(1, 1, 100)
        # the tile has no mask: that of the newest family's fixed config
        assert choose_config(problem, self.CUDA) == long
        assert choose_config(dataclasses.replace(problem, causal=True), self.CUDA) == causal
        path = best_file(tmp_path / "configs", H200)
        at_sizes = (BestAtSize(512, plain.short_form(), 1.02),)
        file = load_best(path)
        file.updated([dataclasses.replace(file.best[0], at_sizes=at_sizes)]).save(path)
        best._files.cache_clear()
        assert choose_config(problem, self.CUDA) == plain
        assert choose_config(AttentionForward(1, 1, 5000), self.CUDA) == long

    def test_before_a_sweep_looks_at_the_newest_step_is_of_the_tiles_of_the_one_before(
        self, found, on, tmp_path
    ) -> None:
        before, long = FIXED["h26", Element.BF16], FIXED["h24", Element.BF16].replace(**LONG_TILE)
        found(H200, "9.0", FIXED["h25", Element.BF16], before)
        path = best_file(tmp_path / "configs", H200)
        file = load_best(path)
        at_sizes = (BestAtSize(4096, long.short_form(), 1.05),)
        file.updated([dataclasses.replace(file.best[-1], at_sizes=at_sizes)]).save(path)
        best._files.cache_clear()
        on(H200, "9.0")
        # its own kernel where h26's is the fastest, an earlier step's where that is
        assert choose_config(AttentionForward(1, 1, 512), self.CUDA) == self.ON_HOPPER
        assert choose_config(default_shape(4096), self.CUDA) == long

    def test_a_tile_that_the_newest_step_cannot_have_is_taken_of_the_one_before(
        self, found, on, tmp_path
    ) -> None:
        _, long = FIXED["h24", Element.BF16].replace(**LONG_TILE).variants()
        with pytest.raises(ValueError, match="slots of K"):
            long.at_step(self.ON_HOPPER.step)
        path = best_file(tmp_path / "configs", H200)
        found(H200, "9.0")
        load_best(path).updated([entry(long)]).save(path)
        best._files.cache_clear()
        on(H200, "9.0")
        assert choose_config(AttentionForward(1, 1, 512, causal=True), self.CUDA) == long

    def test_on_the_cpu_is_the_newest_steps_fixed_config(self, found) -> None:
        found(H100, "9.0", self.winner())
        chosen = choose_config(AttentionForward(1, 1, 256), torch.device("cpu"))
        assert chosen == self.NEWEST

    def test_on_a_gpu_that_is_too_old_is_refused_by_name(self, found, on) -> None:
        on("Tesla T4", "7.5")
        with pytest.raises(RuntimeError, match=r"Tesla T4 has compute capability 7\.5 .* 8\.0"):
            choose_config(AttentionForward(1, 1, 256), self.CUDA)

    def test_of_no_kernel_says_so(self, found, monkeypatch) -> None:
        monkeypatch.setattr(library, "kernels", lambda: [])
        with pytest.raises(RuntimeError, match="there is no kernel for the CPU in bf16: `python"):
            choose_config(AttentionForward(1, 1, 256), torch.device("cpu"))


class TestChoiceOfGradients:
    """choose_config() of the backward pass: kernels that add dQ in any order are for calls that do
    not ask for the same bits in every call."""

    CUDA = torch.device("cuda", 0)

    @pytest.mark.parametrize("dtype", [Element.FP16, Element.BF16])
    @pytest.mark.parametrize(
        ("gpu", "capability", "options", "wanted"),
        [
            (H200, "9.0", {}, ("b17", "b17")),
            (H200, "9.0", {"kv_heads": 1, "len_k": 512}, ("b17", "b17")),
            (H200, "9.0", {"softmax_scale": 2.0**-110}, ("b4", "b4")),  # less than b17 takes
            (H200, "9.0", {"causal": True}, ("b17", "b17")),
            (H200, "9.0", {"len_k": 200}, ("b17", "b17")),
            (H200, "9.0", {"window_left": 100}, ("b17", "b17")),
            (H200, "9.0", {"softcap": 20.0}, ("b17", "b17")),
            (H200, "9.0", {"d_head": 64}, ("b17", "b17")),
            (H200, "9.0", {"d_head": 256}, ("m1", "m1")),
            (H200, "9.0", {"d_head": 256, "softcap": 20.0}, ("p5", "p3")),
            (A100, "8.0", {}, ("p5", "p3")),
        ],
        ids=str,
    )
    def test_is_of_the_newest_step_that_may_be_asked(
        self, found, on, gpu, capability, options, wanted, dtype
    ) -> None:
        on(gpu, capability)
        problem = AttentionBackward(1, 2, 256, dtype=dtype, **options)
        asked = [dataclasses.replace(problem, deterministic=flag) for flag in (False, True)]
        chosen = [choose_config(each, self.CUDA) for each in asked]
        assert tuple(config.step.id for config in chosen) == wanted
        assert chosen[1].is_deterministic

    def test_is_no_winner_that_adds_in_any_order_if_the_bits_must_be_the_same(
        self, found, on, tmp_path
    ) -> None:
        last, earlier = FIXED["b17", Element.BF16], FIXED["b6", Element.BF16]
        found(H200, "9.0")
        path = best_file(tmp_path / "configs", H200)
        winner = dataclasses.replace(entry(last), config=earlier.short_form())
        load_best(path).updated([winner]).save(path)
        best._files.cache_clear()
        on(H200, "9.0")
        problem = AttentionBackward(1, 2, 256)
        assert choose_config(problem, self.CUDA) == earlier
        deterministic = dataclasses.replace(problem, deterministic=True)
        assert choose_config(deterministic, self.CUDA) == last.replace(in_turn=True)

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_on_the_cpu_is_of_the_portable_family(self, found, deterministic) -> None:
        problem = AttentionBackward(1, 2, 256, deterministic=deterministic)
        step = "p3" if deterministic else "p5"
        assert choose_config(problem, torch.device("cpu")) == FIXED[step, Element.BF16]
