"""Models of transformers and diffusers, of random weights, with the kernels as their attention.

The importing of both libraries is most of this file's time, so that all of it stands here.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

import toy_models
import transformers
from diffusers.models import attention_dispatch
from toy_models import MODELS, Model
from transformers import masking_utils

from flash_attention import flash_attn
from flash_attention.integrations import NAME
from flash_attention.integrations import diffusers as for_diffusers
from flash_attention.integrations import transformers as for_transformers
from flash_helpers.operations.attention_forward.reference import attention_reference
from flash_helpers.runtime import call
from flash_helpers.tune.best import choose_config

pytestmark = pytest.mark.slow
TOKENS = 9
DOCS = Path(__file__).resolve().parents[2] / "docs/using.md"


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> None:
    for_transformers.register()
    for_diffusers.register()
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


@pytest.fixture(scope="module", autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def without_onednn(monkeypatch) -> None:
    """On CPUs with AMX its convolution in bf16, which a ViT begins with, reads memory that nobody
    wrote: PyTorch 2.13, Conv2d(3, 256, 4, 4) on (2, 3, 76, 4) has a relative error of 1."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


# -- by kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_its_own_attention_does(name):
    """The error against float64 is at most twice that of the model's own attention in bf16."""
    model = MODELS[name]
    for problem in model.problems(1, TOKENS):
        try:
            choose_config(problem, torch.device("cpu"))
        except ValueError as refusal:
            pytest.skip(str(refusal))
    usual, lab = toy_models.errors(model, batch=1, tokens=TOKENS, device="cpu")
    assert lab <= 2 * usual


# -- by float64, in place of kernels ---------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch) -> list[SimpleNamespace]:
    """The calls of attention(), and the sequences of varlen_attention(), which are computed in
    float64."""
    found: list[SimpleNamespace] = []

    def attention(
        *tensors: torch.Tensor,
        window_size,
        deterministic: bool,
        return_lse: bool = False,
        **options,
    ) -> Any:
        assert not return_lse
        q, k, v = tensors
        found.append(
            SimpleNamespace(
                sizes=(len(q), q.shape[1], k.shape[1]),
                window=window_size,
                deterministic=deterministic,
            )
        )
        if 0 in (*q.shape, *k.shape):
            return q.new_zeros(*q.shape[:3], v.shape[3])
        left, right = (None if bound < 0 else bound for bound in window_size)
        window = {"window_left": left, "window_right": right}
        return attention_reference(q, k, v, **window, **options).expected["o"].to(q.dtype)

    def varlen_attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begins_q, begins_k, *_: int, **options
    ) -> torch.Tensor:
        pairs = zip(pairwise(begins_q.tolist()), pairwise(begins_k.tolist()), strict=True)
        places = [(slice(*rows), slice(*keys)) for rows, keys in pairs]
        return torch.cat(
            [attention(q[None, r], k[None, c], v[None, c], **options)[0] for r, c in places]
        )

    for module in (for_transformers, flash_attn):
        monkeypatch.setattr(module, "attention", attention)
        monkeypatch.setattr(module, "varlen_attention", varlen_attention)
    return found


def check(model: Model, seen: torch.Tensor | None = None, **inputs: Any) -> None:
    """Compare the outputs of both implementations, where `seen`, in float32."""
    network = model.build()
    found = [model.run(network, name, **inputs) for name in (model.own, NAME)]
    usual, lab = (x if seen is None else x[seen] for x in found)
    torch.testing.assert_close(lab, usual, rtol=0, atol=1e-4 * float(usual.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_options_are_passed(calls, name):
    check(MODELS[name], **MODELS[name].inputs(2, TOKENS))
    assert calls


PADDING = {
    "left": ([3, 0], [9, 9], [(1, 6, 6), (1, 9, 9)]),
    "right": ([0, 0], [7, 9], [(1, 7, 7), (1, 9, 9)]),
    "both": ([1, 0], [9, 5], [(1, 8, 8), (1, 5, 5)]),
    "whole": ([9, 0], [9, 9], [(1, 0, 0), (1, 9, 9)]),
}


def padded(begins: list[int], ends: list[int]) -> torch.Tensor:
    at, begin, end = torch.arange(TOKENS), torch.tensor(begins), torch.tensor(ends)
    return ((at >= begin[:, None]) & (at < end[:, None])).long()


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS"])
@pytest.mark.parametrize("side", PADDING)
def test_padding_is_left_out(calls, name, side):
    begins, ends, sizes = PADDING[side]
    model, mask = MODELS[name], padded(begins, ends)
    check(model, mask.bool(), attention_mask=mask, **model.inputs(2, TOKENS))
    assert [call.sizes for call in calls[:2]] == sizes


def test_padding_between_tokens_is_left_out(calls):
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, [0, 3, 4, 8]] = 0
    check(MODELS["Llama"], mask.bool(), attention_mask=mask, **MODELS["Llama"].inputs(2, TOKENS))


@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_packed_sequences_do_not_see_each_other(calls, name):
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
    model = MODELS[name]
    check(model, position_ids=positions, use_cache=False, **model.inputs(2, TOKENS))
    lengths = (6, 3, 1, 8)
    assert [call.sizes for call in calls[:4]] == [(1, n, n) for n in lengths]


def test_packed_sequences_of_given_lengths(calls):
    model = MODELS["Llama"]
    inputs, network = model.inputs(1, TOKENS), model.build()
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])
    begins = torch.tensor([0, 6, 9])
    lengths = dict(cu_seq_lens_q=begins, cu_seq_lens_k=begins, max_length_q=6, max_length_k=6)
    usual = model.run(network, model.own, position_ids=positions, use_cache=False, **inputs)
    lab = model.run(network, NAME, position_ids=positions, **lengths, **inputs)
    torch.testing.assert_close(lab, usual, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS"])
def test_tokens_are_generated(calls, name):
    """A cache has more keys than there are queries; with padding, and beyond the window."""
    model = MODELS[name]
    network, mask = model.build(), padded([3, 0], [9, 9])
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask, "eos_token_id": 99}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    found = []
    for attention in (model.own, NAME):
        network.set_attn_implementation(attention)
        found.append(network.generate(**model.inputs(2, TOKENS), **options).logits)
    for usual, lab in zip(*found, strict=True):
        torch.testing.assert_close(lab, usual, rtol=0, atol=1e-4 * float(usual.abs().max()))
    assert calls[-1].sizes[1] == 1 < calls[-1].sizes[2]


def test_a_window_has_two_sides(calls):
    model, mask = toy_models.MODERN_BERT, padded([0, 0], [6, 9])
    check(model, mask.bool(), attention_mask=mask, **model.inputs(2, TOKENS))
    assert {call.window for call in calls} == {(2, 2), (-1, -1)}


def test_padding_of_keys_alone(calls):
    model, mask = toy_models.BART, padded([0, 0], [6, 9])
    check(model, attention_mask=mask, **model.inputs(2, TOKENS))
    assert (1, 5, 6) in [call.sizes for call in calls]


@pytest.fixture
def llama() -> torch.nn.Module:
    network = MODELS["Llama"].build()
    network.set_attn_implementation(NAME)
    return network


IDS = torch.ones(1, TOKENS, dtype=torch.long)


def test_a_compiled_model_is_one_graph(llama, monkeypatch):
    """The kernels' operator is in it, and is causal. No kernel runs."""
    monkeypatch.setattr(call.ReadyCall, "simulate", lambda *_: None)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(llama.bfloat16(), fullgraph=True, backend=keep)(input_ids=IDS)
    (graph,) = graphs
    operators = [n for n in graph.graph.nodes if "flash_attention" in str(n.target)]
    assert [(str(n.target), n.args[3]) for n in operators] == [
        ("flash_attention.attention.default", True)
    ] * len(llama.model.layers)


# -- refusals --------------------------------------------------------------------------------------


def refused(network: torch.nn.Module, **inputs: Any) -> str:
    with pytest.raises(ValueError) as error:
        network(**inputs)
    return str(error.value)


def test_padding_between_the_tokens_of_a_window_is_refused():
    network = MODELS["Mistral"].build()
    network.set_attn_implementation(NAME)
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    mask[0, 4] = 0
    text = refused(network, input_ids=IDS, attention_mask=mask)
    assert "between the tokens of row 0" in text and "pad on one side" in text


@pytest.mark.parametrize("shape", [(1, 5), (2, 8), (1, 1, 8)])
def test_a_padding_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"pass \(batch, keys\), \(1, 8\)"):
        for_transformers.attention_mask(1, 8, 8, attention_mask=torch.ones(shape))


def test_a_mask_of_numbers_is_refused(llama):
    mask = torch.zeros(1, 1, TOKENS, TOKENS)
    text = refused(llama, input_ids=IDS, attention_mask=mask)
    assert "(1, 1, 9, 9)" in text and 'attn_implementation="sdpa"' in text


def test_probabilities_are_refused(llama):
    assert "output_attentions" in refused(llama, input_ids=IDS, output_attentions=True)


def test_dropout_is_refused(llama):
    llama.config.attention_dropout = 0.25
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.25
    text = refused(llama.train(), input_ids=IDS)
    assert "dropout 0.25" in text and "model.eval()" in text


def test_a_static_cache_is_refused(llama):
    cache = transformers.StaticCache(config=llama.config, max_cache_len=32)
    assert "use a dynamic cache" in refused(llama, input_ids=IDS, cache=cache)


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1)),
        masking_utils.or_masks(masking_utils.causal_mask_function, lambda *_: True),
        lambda *_: True,
        len,
    ],
)
def test_a_mask_function_that_is_not_known_is_refused(function):
    with pytest.raises(ValueError, match="no kernel takes the mask of transformers' "):
        for_transformers.attention_mask(1, 8, 8, mask_function=function)


def test_a_mask_of_other_sizes_is_refused():
    mask = for_transformers.attention_mask(1, 8, 8)
    x = torch.zeros(1, 2, 9, 128)
    with pytest.raises(ValueError, match=re.escape("(1, 8, 8) and the layer has (1, 9, 9)")):
        for_transformers.attention_forward(torch.nn.Module(), x, x, x, mask)


def test_deterministic_gradients_are_asked_for_with_a_keyword(calls):
    x = torch.zeros(1, 2, TOKENS, 128, dtype=torch.bfloat16)
    kept = torch.arange(TOKENS)[None] > 0  # the first token is padding
    padded = for_transformers.attention_mask(1, TOKENS, TOKENS, attention_mask=kept)
    assert padded.ragged is not None
    for options in ({}, {"deterministic": True}):
        for_transformers.attention_forward(torch.nn.Module(), x, x, x, None, **options)
        for_transformers.attention_forward(torch.nn.Module(), x, x, x, padded, **options)
        attention_dispatch.dispatch_attention_fn(
            *3 * [x.transpose(1, 2)], backend=NAME, attention_kwargs=options
        )
    assert [found.deterministic for found in calls] == 3 * [False] + 3 * [True]


@pytest.mark.parametrize("name", for_transformers._UNBUILT)
def test_attention_of_another_kind_is_refused(name):
    x = torch.zeros(1, 2, 9, 128)
    with pytest.raises(ValueError, match=f"{name} is not built: load the model with"):
        for_transformers.attention_forward(torch.nn.Module(), x, x, x, None, **{name: x})


def test_what_attention_refuses_has_its_text(llama):
    model = toy_models.of_head_size(80)
    network = model.build().bfloat16()
    network.set_attn_implementation(NAME)
    assert "d_head 80" in refused(network, **model.inputs(1, TOKENS))
    with pytest.raises(TypeError, match="float32"):
        llama(input_ids=IDS)


def gradients(attention: str, dtype: torch.dtype, **inputs: Any) -> torch.Tensor:
    """Return the gradients of a ViT's queries, keys and values, in all layers, in float64."""
    network = MODELS["ViT"].build().to(dtype)
    with torch.enable_grad():
        # some columns: the norm of all is fixed by the last layer
        MODELS["ViT"].run(network, attention, **inputs)[..., ::3].square().sum().backward()
    of_attention = [
        weights.grad.flatten()
        for name, weights in network.named_parameters()
        if re.search(r"(query|key|value|[qkv]_proj)\.weight", name) and weights.grad is not None
    ]
    assert of_attention
    return torch.cat(of_attention).double()


def test_a_model_can_be_trained():
    """The error of the gradients is at most twice that of the model's own attention in bf16."""
    inputs = MODELS["ViT"].inputs(1, TOKENS)
    right = gradients("eager", torch.float64, **inputs)
    usual, lab = (
        (gradients(name, torch.bfloat16, **inputs) - right).norm() for name in ("eager", NAME)
    )
    assert lab <= 2 * usual < right.norm()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.ones(1, 9)}, r"attn_mask is a tensor, \(1, 9\)"),
        ({"dropout_p": 0.25}, r"dropout_p 0.25 .* model.eval\(\)"),
        ({"is_causal": True}, "8 queries and 9 keys"),
        ({"parallel_config": object()}, "context parallelism"),
    ],
)
def test_of_diffusers_is_refused(arguments, message):
    q, k = torch.zeros(1, 8, 2, 128), torch.zeros(1, 9, 2, 128)
    with attention_dispatch.attention_backend(NAME), pytest.raises(ValueError, match=message):
        attention_dispatch.dispatch_attention_fn(q, k, k, **arguments)


# -- the page --------------------------------------------------------------------------------------


def test_the_examples_of_the_page_run(calls):
    section = DOCS.read_text().partition("## In transformers and diffusers\n")[2]
    blocks = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {"torch": torch}
    exec(blocks[0], names)
    assert len(calls) == 1 and names["logits"].shape == (1, 8, 100)
    exec(blocks[1], names)
    assert names["model"].transformer_blocks[0].attn.processor._attention_backend == NAME


# -- the libraries ---------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_a_library_that_is_not_there_is_told(monkeypatch, library):
    module = sys.modules[f"flash_attention.integrations.{library}"]
    for name in [n for n in sys.modules if n.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install '?{library}"):
        importlib.reload(module)


def test_transformers_that_is_too_old_is_told(monkeypatch):
    project = (DOCS.parents[1] / "pyproject.toml").read_text()
    needed = re.search(r"transformers>=[\d.]+", project)
    assert needed
    monkeypatch.delattr(masking_utils, "remap_positions_for_packed_sequence")
    with pytest.raises(ImportError, match=f"pip install '{re.escape(needed[0])}'"):
        importlib.reload(for_transformers)
