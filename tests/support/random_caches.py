"""Random caches of decode, drawn from a seed, and what a kernel makes of them.

Each tensor lies in memory of its own, with strides of its own. What is around and between its
elements is NaN, or a number that is too large for an index.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tiers import committed

from flash_helpers.check.errors import measure_error
from flash_helpers.check.tensors import unwritten
from flash_helpers.kernel_configs import Config
from flash_helpers.operations.decode.inputs import draw
from flash_helpers.operations.decode.problem import Decode
from flash_helpers.operations.decode.problems import DISTRIBUTIONS
from flash_helpers.operations.decode.reference import caches_of, lengths_of, reference
from flash_helpers.registry.family import HELD_BACK, Family
from flash_helpers.registry.problem import Role, Strides, Tensor
from flash_helpers.runtime.backend import find_backend
from flash_helpers.runtime.tensors import torch_dtype

MARGIN = 64  # elements before and behind a tensor
NO_PAGE = 2**31 - 1
GAP_BYTES = 16  # gaps between rows and between heads are multiples of it


@dataclass(frozen=True)
class Cache:
    """A problem, and how its tensors lie in memory. `strides`: of q, k, v and o. `unused`: what
    block_table has where no query sees a key of the page; None for what it was drawn with, where
    pages that a window hides hold NaN."""

    problem: Decode
    distribution: str
    strides: Strides
    seed: int
    unused: int | None = NO_PAGE

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.distribution}: {self.problem}, strides {self.strides}"


@dataclass(frozen=True)
class Placed:
    """A tensor and all of the memory that it lies in."""

    tensor: torch.Tensor
    memory: torch.Tensor

    @property
    def is_alone(self) -> bool:
        """Whether nothing is written around and between the elements of a float tensor."""
        rest = self.memory.clone()
        rest.as_strided(
            self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()
        ).fill_(torch.nan)
        return bool(rest.isnan().all())


def placed(
    tensor: Tensor, strides: Sequence[int], values: torch.Tensor | None, device: torch.device | str
) -> Placed:
    """Return a tensor with these strides that has the values, or `unwritten` where there are
    none."""
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True))
    dtype = torch_dtype(tensor.element)
    memory = torch.full((extent + 2 * MARGIN,), unwritten(tensor), dtype=dtype, device=device)
    view = memory.as_strided(tensor.shape, strides, MARGIN)
    if values is not None:
        view.copy_(values)
    return Placed(view, memory)


def place_all(
    cache: Cache, given: Mapping[str, torch.Tensor], device: torch.device | str
) -> dict[str, Placed]:
    """Return the tensors of a call by name; the outputs are not written yet."""
    return {
        x.name: placed(x, cache.strides.get(x.name, x.strides), given.get(x.name), device)
        for x in cache.problem.tensors
        if x.role is not Role.OPTIONAL
    }


class _Draw(random.Random):
    """The choices of one cache."""

    def chance(self, share: float) -> bool:
        """Return True in a share of the caches."""
        return self.random() < share

    def sizes(self, config: Config, keys: int) -> dict[str, Any]:
        """Draw sizes; room for `keys` keys at most, and one in eight times for five times as many,
        which fewer sequences have."""
        is_long = self.chance(1 / 8)
        kv_heads, group = self.choice((1, 1, 1, 2)), self.randint(1, 16)
        return {
            "batch": self.randint(1, 2 if is_long else 5),
            "heads": group * kv_heads,
            "kv_heads": kv_heads,
            "len_q": self.choice((1, 1, 1, self.randint(2, 16))),
            "len_k": self.randint(1, 5 * keys if is_long else keys),
            "d_head": config.supports.d_heads[0],
            "dtype": config.dtype,
            **self.scales(config),
        }

    def scales(self, config: Config) -> dict[str, bool]:
        """Draw the scales of a cache in fp8, if the config takes one."""
        if not config.supports.fp8_cache:
            return {}
        return {"fp8_cache": True} | {name: self.chance(0.5) for name in ("k_scale", "v_scale")}

    def places(self, sizes: Mapping[str, Any], has_pages: bool) -> dict[str, Any]:
        """Draw where the keys lie, and how many there are; without pages for a kernel that takes
        none."""
        batch, found = sizes["batch"], dict(sizes)
        kind = self.choice(("pages", "pages", "rows", "plain") if has_pages else ("rows", "plain"))
        if kind == "pages":
            size = self.choice((1, 2, 4, 16, 64, self.randint(1, 64)))
            blocks = -(-sizes["len_k"] // size)
            needed = batch * blocks
            found |= {"page_size": size, "len_k": blocks * size}
            found["pages"] = needed + self.choice((0, 1, 5))
        elif kind == "rows":
            found["caches"] = self.randint(1, batch + 2)
        if self.chance(0.8):
            most = batch * found["len_k"]
            found["total_k"] = self.choice((0, most, *[self.randint(0, most) for _ in range(6)]))
        return found

    def options(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Draw masks, scale, softcap, sinks and LSE."""
        found: dict[str, Any] = {"return_lse": self.chance(0.5), "sinks": self.chance(0.25)}
        if self.chance(0.4):
            found["window_left"] = self.randint(0, sizes["len_k"])
        mask = self.choice(("causal", "right", "none"))
        if mask == "causal":
            found["causal"] = True
        elif mask == "right" and sizes["len_q"] > 1:
            found["window_right"] = self.randint(0, sizes["len_q"])
        if self.chance(0.25):
            found["softcap"] = self.choice((0.5, 2.0, 30.0))
        if self.chance(0.25):
            found["softmax_scale"] = self.choice((0.02, 0.2, 0.5))
        return found

    def pieces(self, config: Config) -> dict[str, int]:
        """Draw how keys are cut, of what the config takes."""
        supports = config.supports
        if supports.keys_per_piece and self.chance(0.6):
            return {"keys_per_piece": supports.B_c * self.randint(1, 3)}
        if supports.max_pieces > 1 and self.chance(0.4):
            return {"pieces": self.randint(1, 9)}
        return {}

    def strides(self, tensor: Tensor) -> tuple[int, ...]:
        """Draw strides: rows within heads or heads within rows, with gaps or without."""
        gap = GAP_BYTES // tensor.element.bytes
        _, rows, heads, d_head = tensor.shape
        sizes = {"rows": rows, "heads": heads}
        inner = self.choice(("rows", "heads", "heads"))
        outer = "heads" if inner == "rows" else "rows"
        of_inner = d_head + gap * self.choice((0, 0, 1, 3))
        of_outer = sizes[inner] * of_inner + gap * self.choice((0, 0, 1, 2))
        found = {inner: of_inner, outer: of_outer}
        batch = sizes[outer] * of_outer + gap * self.choice((0, 0, 5))
        return batch, found["rows"], found["heads"], 1


def last_configs(family: Family[Any]) -> list[Config]:
    """Return the committed configs of a family's last step, in both dtypes and of every head size,
    of those that calls take, and of the last that is held back."""
    *_, last = family.steps.values()
    held_back = [step for step in family.steps.values() if HELD_BACK in step.traits]
    steps = last, *family.preferred, *held_back[-1:]
    return [c for c in committed(family.operation) if c.step in steps]


def drawn(seed: int, config: Config, keys: int = 0) -> Cache:
    """Return the cache of a seed, for a config. `keys`: room of a sequence at most, for most
    caches; 0 for three blocks."""
    own = _Draw(seed)
    sizes = own.sizes(config, keys or 3 * config.supports.B_c)
    sizes = own.places(sizes, config.supports.pages)
    problem = Decode(**sizes, **own.options(sizes))
    of_heads = [x for x in problem.tensors if x.name in "qkvo"]
    distribution = own.choice((*4 * ["normal"], *DISTRIBUTIONS))
    strides = {x.name: own.strides(x) for x in of_heads}
    unused = own.choice((NO_PAGE, -1, None))
    problem = replace(problem, **own.pieces(config))
    return Cache(problem, distribution, strides, seed, unused)


def drawn_inputs(cache: Cache, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return the inputs of a cache, whose keys that no query needs are in no page, or in one of
    NaN."""
    given = draw(cache.distribution, cache.problem, device, cache.seed)
    if (table := given.get("block_table")) is None:
        return given
    is_unused = torch.ones_like(table, dtype=torch.bool)
    for row, length in zip(is_unused, lengths_of(cache.problem, given), strict=True):
        row[[*cache.problem.needed_blocks(length)]] = False
    if cache.unused is not None:
        table[is_unused] = cache.unused
        return given
    hidden = table[is_unused & (table >= 0)].long()
    for name in "kv":
        given[name][hidden] = torch.nan
    return given


def computed(
    config: Config, problem: Decode, tensors: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Run a config on the tensors' device; return what the simulator finds on the CPU."""
    backend = find_backend(tensors["q"].device.type)
    return backend.execute(config, problem.arranged(tensors), problem.call_options()).faults


def wrong_outputs(
    problem: Decode, given: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return what is wrong with the outputs, in words."""
    right = reference(problem, given)
    errors = {
        x.name: measure_error(tensors[x.name], right.expected[x.name]) for x in problem.outputs
    }
    return [
        f"{name}: {error.excess(right.bounds[name]) or error}"
        for name, error in errors.items()
        if not error.within(right.bounds[name])
    ]


def asked(config: Config, blocks: int = 2, pieces: int = 3) -> dict[str, int]:
    """Return the option by which a call of a config says how keys are cut."""
    if config.supports.keys_per_piece:
        return {"keys_per_piece": blocks * config.supports.B_c}
    return {"pieces": pieces}


def alone(
    problem: Decode,
    given: Mapping[str, torch.Tensor],
    number: int,
    room: int,
    page_size: int = 0,
) -> tuple[Decode, dict[str, torch.Tensor]]:
    """Return one sequence of a problem as a problem of its own, and its inputs. Its cache has a
    room for other keys, and lies in one row, or in pages in reverse."""
    keys, values = [*caches_of(problem, given)][number]
    length = keys.shape[1]
    sizes = {"batch": 1, "len_k": room, "total_k": length, "page_size": page_size}
    own = replace(problem, **sizes, pages=0, caches=0)
    found = {"q": given["q"][number : number + 1]}
    for name, x in (("k", keys), ("v", values)):
        found[name] = x.new_full((1, room, *x.shape[2:]), torch.nan)
        found[name][:, :length] = x
        if page_size:
            found[name] = found[name].unflatten(1, (own.blocks, page_size))[0].flip(0)
    places = {"cache_seqlens": [length], "block_table": [[*reversed(range(own.blocks))]]}
    for name in places if page_size else ("cache_seqlens",):
        found[name] = torch.tensor(places[name], dtype=torch.int32, device=keys.device)
    if problem.sinks:
        found["sinks"] = given["sinks"]
    scales = {name for name in ("k_scale", "v_scale") if name in given}
    return own, found | {name: given[name][number : number + 1] for name in scales}


def faults_of(cache: Cache, config: Config, device: torch.device | str) -> list[str]:
    """Run a config on a cache; return what is wrong, in words."""
    given = drawn_inputs(cache, device)
    places = place_all(cache, given, device)
    tensors = {name: place.tensor for name, place in places.items()}
    found = [*computed(config, cache.problem, tensors)]
    found += wrong_outputs(cache.problem, given, tensors)
    found += [
        f"{x.name}: written beside its elements"
        for x in cache.problem.outputs
        if not places[x.name].is_alone
    ]
    return [f"{config.short_form()}, {cache}: {fault}" for fault in found]


def faults(
    seeds: Iterable[int],
    configs: Sequence[Config],
    keys: int = 0,
    device: torch.device | str = "cpu",
) -> list[str]:
    """Run the configs in turn, each on the cache of a seed (`drawn`); return what is wrong, in
    words."""
    found = []
    for seed in seeds:
        config = configs[seed % len(configs)]
        found += faults_of(drawn(seed, config, keys), config, device)
    return found
