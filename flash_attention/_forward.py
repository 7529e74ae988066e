"""forward() and its registration as torch custom operators."""

from __future__ import annotations

import torch

from flash_helpers.kernel_configs import Config
from flash_helpers.ptx import Run
from flash_helpers.runtime.call import prepare
from flash_helpers.runtime.library import resolve
from flash_helpers.runtime.tensors import check_shapes, check_types


@torch.library.custom_op("flash_attention::forward", mutates_args=())
def _forward(cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    call = prepare(cfg, {"q": q, "k": k, "v": v}, None)
    call.run()
    return call.output


@_forward.register_fake
def _(cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    check_shapes(resolve(cfg), {"q": q, "k": k, "v": v})
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@torch.library.custom_op("flash_attention::forward_out", mutates_args=("o",))
def _forward_out(
    cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor
) -> None:
    prepare(cfg, {"q": q, "k": k, "v": v}, o).run()


@_forward_out.register_fake
def _(cfg: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> None:
    check_shapes(resolve(cfg), {"q": q, "k": k, "v": v, "o": o})


def forward(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(d_head)) v for every batch and head, by the kernel of `cfg`.

    cfg: a config, or its short form, that the library was built with (`kernels()`).
    q, k, v: (batch, seq, heads, d_head), of the config's dtype, on one device; d_head 128,
        seq a multiple of B_r and B_c. Any strides that are multiples of 8 elements, 1 in the last
        dimension, from 16-byte aligned memory.
    o: written and returned if given, with the same shape, dtype and device, overlapping nothing;
        otherwise a new contiguous tensor.

    Runs on a CUDA device's current stream, without synchronising. On CPU tensors it runs the
    kernel's PTX in the simulator (see `simulate`), which needs no GPU; a large shape is announced
    with an estimate and a progress bar on stderr. There is no backward pass: differentiating
    through the result raises RuntimeError.

    Raises TypeError for a wrong type or dtype; ValueError for any other wrong argument and for a
    config that was not built; RuntimeError on a device that is neither the CPU nor CUDA of compute
    capability 8.0, or with CUDA's text when the launch fails. Nothing is launched then. A fault
    that the simulator finds in the kernel is a RuntimeError with its text, and `o` is as before.
    """
    name = cfg if isinstance(cfg, str) else _short_form(cfg)
    if o is None:
        check_types({"q": q, "k": k, "v": v})
        return _forward(name, q, k, v)
    check_types({"q": q, "k": k, "v": v, "o": o})
    _forward_out(name, q, k, v, o)
    return o


def forward_timed(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float]:
    """As `forward`, and how long the kernel took on the GPU, in milliseconds (CUDA events).

    Waits for the kernel to end. One launch on an idle GPU includes the time to launch it.
    Raises RuntimeError for CPU tensors too: the simulator has no clock.
    """
    inputs = {"q": q, "k": k, "v": v}
    check_types(inputs if o is None else {**inputs, "o": o})
    name = cfg if isinstance(cfg, str) else _short_form(cfg)
    call = prepare(name, inputs, o)
    if call.is_simulated:
        raise RuntimeError(
            "forward_timed needs a CUDA device and the tensors are on the CPU, where kernels are "
            "simulated without a clock: move them to a GPU, or count with simulate()"
        )
    stream = torch.cuda.current_stream(q.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    call.run()
    end.record(stream)
    end.synchronize()
    return call.output, begin.elapsed_time(end)


def simulate(
    cfg: Config | str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    *,
    keep_going: bool = False,
) -> tuple[torch.Tensor, Run]:
    """As `forward` on CPU tensors, and what the simulator counted.

    keep_going: collect the faults of the kernel in `Run.faults` rather than raise the first one.

    Raises what `forward` raises, and ValueError for tensors that are not on the CPU.
    """
    inputs = {"q": q, "k": k, "v": v}
    check_types(inputs if o is None else {**inputs, "o": o})
    if q.device.type != "cpu":
        raise ValueError(f"q is on {q.device} and the simulator runs on the CPU: call .cpu()")
    name = cfg if isinstance(cfg, str) else _short_form(cfg)
    call = prepare(name, inputs, o)
    return call.output, call.simulate(keep_going)


def _short_form(cfg: object) -> str:
    if isinstance(cfg, Config):
        return cfg.short_form()
    raise TypeError(
        f"cfg is a {type(cfg).__name__}: pass a FlashForwardKernelConfig or its short form"
    )
