"""Attention on parts of the keys, combined into attention on all of them."""

from __future__ import annotations

import math

import torch


def combined(
    o: torch.Tensor, lse: torch.Tensor, parts: int, names: tuple[str, str], *, base_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and lse of attention on all keys, both fp32.

    o: attention on parts of the keys, with these along dimension `parts`. lse: (..., parts, ...),
    the shape of o without its last dimension: logarithms of the sums of exponentials, in base 2 or
    natural. names: of both, for messages.

    o = Σ exp(lse_i - lse) o_i. A part without keys has an lse of -inf and whatever in o; a row
    whose parts are all so has 0 and -inf.

    Raises ValueError for shapes and devices that do not fit together.
    """
    if tuple(lse.shape) != tuple(o.shape[:-1]):
        raise ValueError(
            f"{names[1]} has shape {tuple(lse.shape)} and {names[0]} {tuple(o.shape)}: pass "
            f"{tuple(o.shape[:-1])}"
        )
    if lse.device != o.device:
        raise ValueError(
            f"{names[1]} is on {lse.device} and {names[0]} on {o.device}: move them to one device"
        )
    if o.shape[parts] == 0:
        raise ValueError(f"{names[0]} has no parts, shape {tuple(o.shape)}: pass 1 or more")
    lse = lse.float()
    largest = lse.amax(parts, keepdim=True)
    largest = torch.where(largest == -math.inf, 0.0, largest)  # -inf less -inf is no number
    weights = torch.exp2(lse - largest) if base_2 else torch.exp(lse - largest)
    total = weights.sum(parts, keepdim=True)
    shares = (weights / torch.where(total == 0, 1.0, total))[..., None]
    seen = torch.where(shares == 0, 0.0, o.float())  # 0 · NaN is NaN
    logs = torch.log2(total) if base_2 else torch.log(total)
    return (shares * seen).sum(parts), (largest + logs).squeeze(parts)
