"""Small models of transformers and diffusers with random weights, made from their configs."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
import transformers

from flash_attention.integrations import NAME
from flash_helpers.kernel_configs import AttentionForward

_VOCABULARY, _CHANNELS, _TEXT, _PATCH = 64, 8, 3, 4
_HIDDEN, _HEADS, _WINDOW = 256, 2, 4
_SIZES = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": _HEADS,
    "initializer_range": 0.1,  # so that probabilities differ from one another
}
_DECODER = {
    **_SIZES,
    "vocab_size": _VOCABULARY,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_ALTERNATING = {
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}

Network = torch.nn.Module
Inputs = dict[str, Any]


def _tokens(batch: int, tokens: int) -> Inputs:
    return {"input_ids": torch.arange(batch * tokens).view(batch, tokens) * 7 % 63 + 1}


def _pixels(batch: int, tokens: int) -> Inputs:
    """A column of patches: one less than tokens, since the class is a token too."""
    return {"pixel_values": torch.randn(batch, 3, (tokens - 1) * _PATCH, _PATCH)}


def _latents(batch: int, tokens: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, tokens - _TEXT, _CHANNELS),
        "encoder_hidden_states": torch.randn(batch, _TEXT, _CHANNELS),
        "pooled_projections": torch.randn(batch, _CHANNELS),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": torch.arange(3 * (tokens - _TEXT)).view(-1, 3).float(),
        "txt_ids": torch.zeros(_TEXT, 3),
    }


@dataclass(frozen=True)
class Model:
    """A model.

    make: makes it for a number of tokens. inputs: makes its inputs, (batch, tokens).
    options: of the problems of its layers, for a number of tokens.
    own: the name of the library's attention that it is compared with.
    """

    make: Callable[[int], Network]
    inputs: Callable[[int, int], Inputs] = _tokens
    options: Callable[[int], Iterable[Inputs]] = lambda tokens: ()
    own: str = field(default="eager")

    def build(self, tokens: int = 9) -> Network:
        """Return the model in float32, for inference, with the same weights at each call."""
        torch.manual_seed(1)
        return self.make(tokens).eval()

    def problems(self, batch: int, tokens: int) -> list[AttentionForward]:
        return [AttentionForward(batch, _HEADS, tokens, **each) for each in self.options(tokens)]

    @staticmethod
    def run(network: Network, attention: str, **inputs: Any) -> torch.Tensor:
        """Return the logits, or the last layer's states of a model that makes none."""
        weights = next(network.parameters())
        given = {
            name: x.to(weights.device, weights.dtype if x.is_floating_point() else x.dtype)
            if isinstance(x, torch.Tensor)
            else x
            for name, x in inputs.items()
        }
        if isinstance(network, diffusers.ModelMixin):
            network.set_attention_backend(attention)
            return network(**given).sample
        network.set_attn_implementation(attention)
        return network(**given)[0]


def _decoder(kind: str, **options: Any) -> Callable[[int], Network]:
    def make(_: int) -> Network:
        config = getattr(transformers, f"{kind}Config")(**{**_DECODER, **options})
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return make


def _causal(**options: Any) -> Callable[[int], Iterable[Inputs]]:
    grouped = {"kv_heads": 1, "causal": True, **options}
    full = {name: x for name, x in grouped.items() if name != "window_left"}
    return lambda tokens: [full] if full == grouped else [grouped, full]


def _vit(tokens: int) -> Network:
    size = ((tokens - 1) * _PATCH, _PATCH)
    config = transformers.ViTConfig(**_SIZES, image_size=size, patch_size=_PATCH)
    return transformers.ViTModel(config, add_pooling_layer=False)


def _flux(_: int) -> Network:
    return diffusers.FluxTransformer2DModel(
        in_channels=_CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=_HIDDEN // _HEADS,
        num_attention_heads=_HEADS,
        joint_attention_dim=_CHANNELS,
        pooled_projection_dim=_CHANNELS,
    )


MODELS = {
    "Llama": Model(_decoder("Llama"), options=_causal()),
    "Gemma 2": Model(
        _decoder(
            "Gemma2",
            **_ALTERNATING,
            head_dim=256,
            query_pre_attn_scalar=64,
            attn_logit_softcapping=2.0,
        ),
        options=_causal(window_left=_WINDOW - 1, softcap=2.0, softmax_scale=64**-0.5, d_head=256),
    ),
    "Mistral": Model(
        _decoder("Mistral", sliding_window=_WINDOW), options=_causal(window_left=_WINDOW - 1)
    ),
    "GPT-OSS": Model(
        _decoder(
            "GptOss",
            **_ALTERNATING,
            head_dim=64,
            num_local_experts=2,
            num_experts_per_tok=2,  # all experts, so that rounding does not choose others
            experts_implementation="eager",  # which computes in float64 too
        ),
        options=_causal(window_left=_WINDOW - 1, sinks=True, d_head=64),
    ),
    "ViT": Model(_vit, _pixels, lambda tokens: [{}]),
    "Flux, a DiT": Model(_flux, _latents, lambda tokens: [{}], own="native"),
}
"""Models by their names."""


def _modern_bert(_: int) -> Network:
    config = transformers.ModernBertConfig(
        **_SIZES,
        vocab_size=_VOCABULARY,
        local_attention=_WINDOW,
        pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
    )
    return transformers.ModernBertModel(config)


def _bart(_: int) -> Network:
    config = transformers.BartConfig(
        vocab_size=_VOCABULARY,
        d_model=_HIDDEN,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=_HEADS,
        decoder_attention_heads=_HEADS,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        init_std=0.1,
    )
    return transformers.BartModel(config)


MODERN_BERT = Model(_modern_bert)
"""An encoder with a window on both sides."""
BART = Model(_bart, lambda b, n: {**_tokens(b, n), "decoder_input_ids": _tokens(b, 5)["input_ids"]})
"""An encoder and a decoder, whose queries are fewer than the encoder's keys."""


def of_head_size(d_head: int) -> Model:
    return Model(_decoder("Llama", head_dim=d_head))


def errors(model: Model, batch: int, tokens: int, device: str) -> tuple[float, float]:
    """Return the errors of a model in bf16 with its library's attention and with these kernels:
    relative Frobenius norms of the difference from float64."""
    network = model.build(tokens).bfloat16().to(device)
    inputs = model.inputs(batch, tokens)
    inputs = {n: x.bfloat16() if x.is_floating_point() else x for n, x in inputs.items()}
    exact = model.run(copy.deepcopy(network).double(), model.own, **inputs)
    usual, lab = (
        float((model.run(network, name, **inputs).double() - exact).norm() / exact.norm())
        for name in (model.own, NAME)
    )
    return usual, lab
