"""The gradients of norms by PyTorch's operators, one by one."""

from __future__ import annotations

import torch


def gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor | None,
    weight: torch.Tensor | None,
    *,
    of_x: bool = True,
    of_weight: bool = False,
    of_bias: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return dx, dweight and dbias, those that are asked for, by PyTorch's operators in fp32, each
    rounded once. They can be differentiated.

    dy, x: (rows, width). rstd: (rows), fp32. mean: the same, None for RMS norm. weight: (width) or
    None.
    """
    dtype = x.dtype
    dy, x = dy.float(), x.float()
    normed = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    dx = dweight = dbias = None
    if of_x:
        g = dy if weight is None else dy * weight.float()
        dx = g - normed * (g * normed).mean(-1, keepdim=True)
        if mean is not None:
            dx = dx - g.mean(-1, keepdim=True)
        dx = (dx * rstd[:, None]).to(dtype)
    if of_weight:
        dweight = (dy * normed).sum(0).to(dtype)
    if of_bias:
        dbias = dy.sum(0).to(dtype)
    return dx, dweight, dbias
