"""Softmax along rows in float64, and the largest errors allowed of an output.

For fp16 and bf16, u is the unit roundoff (2^-11, 2^-8) and R the float64 result on the same inputs.
The bound holds for each row by itself, so that a row whose largest probability is near 1 allows no
error in other rows:

    max |y - R|          <=  2 max |plain - R|  +  half an ulp at max |R|
    ||y - R|| / ||R||    <=  ||max(u |R|, h)|| / ||R||

`plain` is torch.softmax in the dtype. h is half the distance of subnormal numbers, 2^-25 for fp16,
where R is not 0: the largest error of rounding an element that is subnormal. The second bound is u,
as for every operation, unless probabilities are subnormal. In fp16 those below 2^-14 are, for
instance in a row of 16385 or more equal elements. Rounding R itself then has a relative error above
u, so that no kernel could keep u. For bf16, h is 2^-134, far below any error that counts.

In fp32 nothing is rounded to a lower precision at the end, and the errors of the computation
decide: `fp32_bound`, also by row. The two numbers of a bound for all rows follow from those of the
rows.

Rows whose result is NaN must be NaN (`absolute_errors`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from flash_helpers.check.errors import (
    OutputError,
    Reference,
    RowErrors,
    absolute_errors,
    half_ulps,
)
from flash_helpers.operations.rows.problem import Rows

_U = 2.0**-24  # unit roundoff of fp32
_SMALLEST = 2.0**-126  # of fp32; smaller results are flushed to zero
LEAST_THREADS = 32  # that share a row, or as many as leave a thread MOST_OF_FEW elements
MOST_OF_FEW = 128
LEAST_CHUNK = 4  # elements that a thread adds between two changes of its maximum


def softmax_float64(x: torch.Tensor) -> torch.Tensor:
    """Return softmax(x) along the last dimension in float64."""
    return torch.softmax(x.double(), dim=-1)


def _bound(max_abs: torch.Tensor, allowed: torch.Tensor, expected: torch.Tensor) -> OutputError:
    """Return the bound of rows. `max_abs`: largest error of an element, by row. `allowed`: errors
    of the elements of a row whose norm is the largest allowed."""
    norm = torch.linalg.vector_norm
    rows = RowErrors(max_abs, norm(allowed, dim=-1) / norm(expected, dim=-1))
    return OutputError(max_abs.max().item(), (norm(allowed) / norm(expected)).item(), rows)


def fp32_bound(x: torch.Tensor, expected: torch.Tensor) -> OutputError:
    """Return the largest error of an fp32 output allowed, a worst case to first order in u = 2^-24.

    It is for a kernel that computes e^(x - m) as ex2.approx((x - m) log2(e)) in float32, adds at
    most n = max(width / 32, min(width, 128)) elements on a thread, and multiplies by the reciprocal
    of the sum l. The error of an element y_j is a multiple of y_j itself. With t_j = m - x_j, in
    units of u:

        2.25 t_j         exponent of y_j: the difference, the product (u each), and log2(e) rounded
                         to fp32 (0.22 u): relative to t_j, so that a common offset of x cancels
        5                ex2.approx: 2 ulp from the correctly rounded result [1], 2 u each, and u
        2.25 ln width    the same exponents in l, weighted by e^-t: the mean of t is the entropy
                         of y less ln l, at most ln width
        5                ex2.approx in l, which is a mean of such errors
        n + 10           additions: a thread's own, then two trees over 32 lanes and 32 warps
        6 (n / 4 + 11)   rescales of l, ex2.approx and a product: for each chunk of 4 elements
                         of a thread and for each level of the trees. The exponents of the rescales
                         that an element sees add up to t_j and are counted above.
        2                rcp.approx: 1 ulp [1]
        1                product of e^(x - m) and 1 / l, stored as it is

    [1] PTX ISA 9.0, "Floating Point Instructions: ex2" and "rcp".

    Results below 2^-126 are flushed to zero, which 2^-126 allows for. Additions and rescales decide
    from a width of some 1,000 on; their roundings do not all point one way, so that errors stay
    far below the bound there.

    `x`, `expected`: (rows, width), every row of `expected` finite.
    """
    width = x.shape[-1]
    t = (x.double().amax(-1, keepdim=True) - x.double()).nan_to_num_(posinf=0.0)
    of_thread = max(width / LEAST_THREADS, min(width, MOST_OF_FEW))
    additions = of_thread + 10
    rescales = of_thread / LEAST_CHUNK + 11
    constant = 5 + 2.25 * math.log(width) + 5 + additions + 6 * rescales + 2 + 1
    allowed = _U * expected * (2.25 * t + constant) + _SMALLEST
    return _bound(allowed.amax(-1), allowed, expected)


def _rounded_bound(x: torch.Tensor, expected: torch.Tensor) -> OutputError:
    """Return the bound for an output in fp16 or bf16."""
    info = torch.finfo(x.dtype)
    plain = absolute_errors(torch.softmax(x, dim=-1), expected).amax(-1)
    u = info.eps / 2
    allowed = (expected * u).clamp_(min=info.smallest_normal * u)
    allowed.masked_fill_(expected == 0, 0.0)
    return _bound(2 * plain + half_ulps(expected.amax(-1), x.dtype), allowed, expected)


def softmax_reference(x: torch.Tensor) -> Reference:
    """Return the float64 result of x, (rows, width), and the bound that the module's rules give
    for x's dtype."""
    expected = softmax_float64(x)
    finite = expected.isfinite().all(-1)
    if not finite.any():
        return Reference({"y": expected}, {"y": OutputError(0.0, 0.0)})
    bound_of = fp32_bound if x.dtype == torch.float32 else _rounded_bound
    if finite.all():
        return Reference({"y": expected}, {"y": bound_of(x, expected)})
    bound = bound_of(x[finite], expected[finite])
    return Reference({"y": expected}, {"y": _with_rows_of_nan(bound, finite)})


def _with_rows_of_nan(bound: OutputError, finite: torch.Tensor) -> OutputError:
    """Return the bound of the finite rows as one of all rows."""
    assert bound.rows is not None
    max_abs, relative = (
        values.new_zeros(finite.shape).masked_scatter_(finite, values)
        for values in (bound.rows.max_abs, bound.rows.relative)
    )
    return replace(bound, rows=RowErrors(max_abs, relative))


def reference(problem: Rows, inputs: Mapping[str, torch.Tensor]) -> Reference:
    """Return the result of a problem."""
    return softmax_reference(inputs["x"])
