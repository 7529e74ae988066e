"""FlashAttention-2 forward kernels, every step of the progression side by side.

    import flash_attention
    o = flash_attention.attention(q, k, v)  # by the best kernel for them
    o = flash_attention.forward("v16_bf16_...", q, k, v)  # by this one
    y = flash_attention.run("s3_bf16_w8_c4", x)["y"]  # another operation: softmax along rows

On CPU tensors a kernel's PTX is simulated: no GPU is needed, and `simulate()` gives the counts too.
`kernels()` lists what the library was built with; `python -m flash_attention` prints it.
`best_config()` is the fastest of a version on a GPU, as far as sweeps have found out.
"""

import sys

if sys.argv[:1] == ["-m"] and __name__ in sys.orig_argv:
    # on the way to __main__, which needs nothing of this, and torch later if at all
    import flash_helpers.console.quiet_start  # noqa: F401
else:
    from flash_attention._forward import attention, forward, forward_timed, run, simulate
    from flash_helpers import __version__
    from flash_helpers.runtime.call import resources
    from flash_helpers.runtime.library import KernelResources, kernels
    from flash_helpers.tune.best import best_config

__all__ = [
    "KernelResources",
    "__version__",
    "attention",
    "best_config",
    "forward",
    "forward_timed",
    "kernels",
    "resources",
    "run",
    "simulate",
]
