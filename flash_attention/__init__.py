"""FlashAttention-2 forward kernels, every step of the progression side by side.

    import flash_attention
    o = flash_attention.attention(q, k, v)  # by the best kernel for these tensors
    o = flash_attention.forward("v16_bf16_...", q, k, v)  # by the named kernel
    o = flash_attention.flash_attn.flash_attn_func(q, k, v)  # with FlashAttention-2's arguments
    C = flash_attention.ops.diagonal_matmul(a, B)  # functions on matrices
    y = flash_attention.run("s3_bf16_w8_c4", x)["y"]  # another operation: softmax along rows
    model = flash_attention.multimodal.MultimodalTransformer()  # blocks of a sequence and a context

On CPU tensors a kernel's PTX is simulated: no GPU is needed, and `simulate()` gives the counts too.
`kernels()` lists the kernels; `python -m flash_attention` prints them. One that the library does
not hold is compiled at its first call, or by `prepare()` before.
`best_config()` gives the fastest config of a step on a GPU, according to sweeps.
FLASH_ATTENTION_LOGLEVEL, read at import, makes a log of calls (`flash_helpers.runtime.call_log`).
"""

import importlib
import sys
from typing import Any

if sys.argv[:1] == ["-m"] and __name__ in sys.orig_argv:
    # On the way to __main__, which needs none of these imports and imports torch later.
    import flash_helpers.console.quiet_start  # noqa: F401
else:
    from flash_attention import flash_attn, flash_attn_3, flashinfer, ops
    from flash_attention._bundle import export_bundle
    from flash_attention._decode import decode
    from flash_attention._forward import (
        attention,
        forward,
        forward_timed,
        prepare,
        run,
        simulate,
    )
    from flash_helpers import __version__
    from flash_helpers.runtime.call import resources
    from flash_helpers.runtime.library import KernelResources, kernels
    from flash_helpers.tune.best import best_config

__all__ = [
    "KernelResources",
    "__version__",
    "attention",
    "best_config",
    "decode",
    "export_bundle",
    "flash_attn",
    "flash_attn_3",
    "flashinfer",
    "forward",
    "forward_timed",
    "kernels",
    "multimodal",
    "ops",
    "prepare",
    "resources",
    "run",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Return the modules that are imported when they are first used."""
    if name == "multimodal":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
