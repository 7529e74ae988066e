"""Statistics of a tensor that tell whether its values can be right."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorStatistics:
    """Counts of a tensor's elements that are no finite numbers; least, largest and mean value of
    the others, which are None if there are no others."""

    least: float | None
    largest: float | None
    mean: float | None
    n_nan: int
    n_inf: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorStatistics:
        """Return the statistics of a tensor. Waits for its device."""
        x = tensor.detach()
        if x.element_size() == 1:
            x = x.float()  # PyTorch neither compares nor adds fp8
        n_nan, n_inf = torch.stack([x.isnan().sum(), x.isinf().sum()]).tolist()
        if n_nan or n_inf:
            x = x[x.isfinite()]
        if not x.numel():
            return cls(None, None, None, n_nan, n_inf)
        # For two-byte types PyTorch adds in fp32 on the fly; for fp64 it would make a copy, which
        # is four times the tensor.
        total = x.sum(dtype=torch.float64 if x.element_size() > 2 else torch.float32)
        least, largest, total = torch.stack([y.double() for y in (*x.aminmax(), total)]).tolist()
        return cls(least, largest, total / x.numel(), n_nan, n_inf)

    def __str__(self) -> str:
        counts = f"{self.n_nan} NaN, {self.n_inf} inf"
        if self.mean is None:
            return f"no finite value, {counts}"
        return f"min {self.least:.6g}, max {self.largest:.6g}, mean {self.mean:.6g}, {counts}"
