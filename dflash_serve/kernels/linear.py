"""Matrix products of activations with a weight, and what is done to their input and output.

On a GPU the gated activation and the residual add are part of the product as long as the rows are
few: each would cost as much time as a small product on its own. A norm is a kernel, which may also
do what is left of the product before it. A quantised weight takes its products to `kernels.fp8`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.kernels import fp8
from dflash_serve.kernels.backend import compiled
from dflash_serve.kernels.fp8 import Fp8Rows, Fp8Weight
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu.linear_policy import set_row_invariant
from dflash_serve.kernels.norm import add_norm, rms_norm

__all__ = [
    "FEW_ROWS",
    "Rows",
    "Weight",
    "gated_linear",
    "linear",
    "linear_add",
    "linear_add_norm",
    "norm_for",
    "norm_gated",
    "norm_linear",
    "set_row_invariant",
]

Weight = Tensor | Fp8Weight
"""[N, K], of the activations' type or quantised."""

Rows = Tensor | Fp8Rows
"""[T, K] rows, quantised where the weight that they are for is."""

FEW_ROWS = 32
"""Up to this many rows a float32 CPU product is bound by reading the weight."""


def linear(x: Rows, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight.T: [T, K] by [N, K] → [T, N], in x's type unless `out_dtype` is given.

    On CPU with few rows in float32 the product is taken as weight @ x.T with at least two
    columns: the library then streams the weight once at memory speed, where its usual form
    takes two to four times as long (measured by `dflash-serve bench step`).
    """
    if isinstance(weight, Fp8Weight):
        return fp8.linear(x, weight, out_dtype)
    assert isinstance(x, Tensor)
    if compiled(x):
        from dflash_serve.kernels.gpu import linear as gpu

        return gpu.linear(x, weight, out_dtype)
    return _linear(x, weight).to(out_dtype or x.dtype)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.shape[0]
    if x.device.type != "cpu" or x.dtype != torch.float32 or rows > FEW_ROWS:
        return F.linear(x, weight)
    if rows == 1:
        x = torch.cat((x, x))
    # Contiguous on both sides: the product is several times slower for other layouts.
    return torch.mm(weight, x.contiguous().t())[:, :rows].t().contiguous()


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, *, consume: bool = False) -> Tensor:
    """residual + x @ weight.T: [T, K], [N, K] and [T, N] → [T, N].

    With `consume` the result may take the memory of `residual`, whose contents are then gone.
    """
    if compiled(x):
        from dflash_serve.kernels.gpu import linear as gpu

        return gpu.linear_add(x, weight, residual, consume=consume)
    out = linear(x, weight)
    return residual.add_(out) if consume else residual + out


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Weight) -> Tensor:
    """rms_norm(x) @ weight.T: [T, K] with norm weight [K] and [N, K] → [T, N]."""
    return linear(norm_for(weight, x, norm, eps), weight)


def norm_for(weight: Weight, x: Tensor, norm: Tensor, eps: float) -> Rows:
    """rms_norm(x) as the product with `weight` takes it: [T, H], quantised where the weight is."""
    if isinstance(weight, Fp8Weight):
        return fp8.norm_rows(x, norm, eps)
    return rms_norm(x, norm, eps)


def linear_add_norm(
    x: Tensor,
    weight: Weight,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    *,
    reader: Weight | None = None,
    consume: bool = False,
) -> tuple[Tensor, Rows]:
    """s = residual + x @ weight.T and rms_norm(s): [T, K], [N, K], [T, N] and [N] → two [T, N].

    Args:
        reader: the weight that alone multiplies the norm; where both are quantised, so is that.
        consume: s may take the memory of `residual`, whose contents are then gone.
    """
    if isinstance(weight, Fp8Weight):
        quantized = isinstance(reader, Fp8Weight)
        return fp8.linear_add_norm(
            x, weight, residual, norm, eps, quantized=quantized, consume=consume
        )
    if compiled(x):
        from dflash_serve.kernels.gpu import linear as gpu

        return gpu.linear_add_norm(x, weight, residual, norm, eps, consume=consume)
    return add_norm(linear(x, weight), residual, norm, eps, consume=consume)


def gated_linear(x: Rows, gate_up: Weight) -> Tensor:
    """silu(g) * u for the columns g, u, g, u, … of x @ gate_up.T: [T, K] → [T, I].

    Args:
        x: [T, K].
        gate_up: [2·I, K]; row 2·i is gate i, row 2·i + 1 up i.
    """
    if isinstance(gate_up, Fp8Weight):
        return fp8.gated_linear(x, gate_up)
    assert isinstance(x, Tensor)
    if compiled(x):
        from dflash_serve.kernels.gpu import linear as gpu

        return gpu.gated_linear(x, gate_up)
    return silu_mul(linear(x, gate_up))


def norm_gated(x: Tensor, norm: Tensor, eps: float, gate_up: Weight) -> Tensor:
    """`gated_linear` of rms_norm(x), with the norm's weight [K]."""
    return gated_linear(norm_for(gate_up, x, norm, eps), gate_up)
