"""Changes to inputs of any operation."""

from __future__ import annotations

import torch


def with_mantissa_bits(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return x rounded to `bits` bits behind the leading one, if its type has more."""
    if 2.0**-bits <= torch.finfo(x.dtype).eps:
        return x
    mantissa, exponent = torch.frexp(x.float())  # mantissas from 1/2 on
    scale = 2.0 ** (bits + 1)
    return torch.ldexp(mantissa.mul(scale).round_().div_(scale), exponent).to(x.dtype)
