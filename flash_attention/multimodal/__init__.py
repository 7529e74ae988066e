"""A transformer block of a sequence and its context, in PyTorch, with attention by these kernels.

    import flash_attention.multimodal as multimodal

    model = multimodal.MultimodalTransformer()  # width 128, 8 heads, 12 layers, up to 186 tokens
    y = model(x, condition, context)

A model is of `MultimodalTransformer`, a layer of `TransformerBlock`; `SelfAttention`,
`CrossAttention` and `JointAttention` stand alone, too. Attention, and the linear layers before and
behind it, run in a kernel where the registry has one for the problem, and in PyTorch everywhere
else. All other parts run in PyTorch, on any of its devices. `places()` tells which part runs where.
"""

from flash_attention.multimodal._attend import Backend, attend
from flash_attention.multimodal._attention import CrossAttention, JointAttention, SelfAttention
from flash_attention.multimodal._block import (
    FeedForward,
    Modulation,
    MultimodalTransformer,
    TransformerBlock,
)
from flash_attention.multimodal._places import Place, places, places_table
from flash_attention.multimodal._rotary import RotaryTable, rotary_table, rotate

__all__ = [
    "Backend",
    "CrossAttention",
    "FeedForward",
    "JointAttention",
    "Modulation",
    "MultimodalTransformer",
    "Place",
    "RotaryTable",
    "SelfAttention",
    "TransformerBlock",
    "attend",
    "places",
    "places_table",
    "rotary_table",
    "rotate",
]
