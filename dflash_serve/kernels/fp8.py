"""Products in 8-bit floating point (e4m3, 4 exponent and 3 mantissa bits), for the draft.

A weight has one scale a row of the output, activations one a token: the largest magnitude of a row
becomes the largest that the type holds. Sums are float32 on both sides of the two scales.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.backend import compiled
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.norm import add_norm, rms_norm

__all__ = [
    "COPY_DEPTH",
    "FP8",
    "FP8_MAX",
    "Fp8Rows",
    "Fp8Weight",
    "add_norm_rows",
    "check_device",
    "gated_linear",
    "linear",
    "linear_add_norm",
    "norm_rows",
    "quantize_rows",
    "quantize_weight",
    "weight_nbytes",
]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LEAST = 1e-12
"""Rows of smaller magnitude are scaled as if they held this much."""
COPY_DEPTH = 16
"""On a GPU K must be a multiple of it, so that the copy engine can address the rows."""
_CHUNK = 1 << 25
_CAPABILITY = (8, 9)


@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """A quantised weight matrix.

    Attributes:
        data: [N, K] float8_e4m3fn.
        scale: [N] float32; row n of the weight is about data[n] · scale[n].
    """

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.data.shape

    def dequantized(self) -> Tensor:
        """[N, K] float32."""
        return self.data.float() * self.scale[:, None]


@dataclasses.dataclass(frozen=True)
class Fp8Rows:
    """Quantised rows of activations, for products with an `Fp8Weight`.

    Attributes:
        data: [T, K] float8_e4m3fn.
        scale: [T] float32; row t is about data[t] · scale[t].
        dtype: of the rows before, and of what a product with them gives.
    """

    data: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """(T, K)."""
        return self.data.shape

    def dequantized(self) -> Tensor:
        """[T, K] float32."""
        return self.data.float() * self.scale[:, None]


def weight_nbytes(weight: Tensor | Fp8Weight) -> int:
    """Memory of a weight, its scales included."""
    if isinstance(weight, Fp8Weight):
        return weight.data.nbytes + weight.scale.nbytes
    return weight.nbytes


def check_device(device: torch.device) -> None:
    """Refuse a device without 8-bit products.

    Raises:
        ConfigError: a CUDA device below compute capability 8.9.
    """
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}; "
            f"fp8 products need {_CAPABILITY[0]}.{_CAPABILITY[1]} or later: leave "
            "draft_quantization out"
        )


def quantize_weight(weight: Tensor) -> Fp8Weight:
    """Quantise a weight [N, K] row by row; some rows at a time, to keep temporaries small.

    Raises:
        ConfigError: a weight with a NaN or an infinity.
    """
    data = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    step = max(_CHUNK // max(weight.shape[1], 1), 1)
    for first in range(0, weight.shape[0], step):
        some = slice(first, first + step)
        data[some], scale[some] = _quantize(weight[some])
    if not bool(scale.isfinite().all()):
        raise ConfigError(
            f"a weight {list(weight.shape)} of the draft holds a NaN or an infinity, which fp8 "
            "cannot scale; repair the checkpoint or leave draft_quantization out"
        )
    return Fp8Weight(data, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, K] as float8_e4m3fn [T, K] and their scales [T] float32."""
    if compiled(x):
        from dflash_serve.kernels.gpu import fp8_rows

        return fp8_rows.quantize_rows(x)
    return _quantize(x)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    value = x.float()
    most = value.abs().amax(-1).clamp_min(LEAST)
    scaled = value * (FP8_MAX / most)[:, None]
    return scaled.to(FP8), most * (1.0 / FP8_MAX)


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """`rms_norm` of [T, H], then rounded to 8 bits."""
    if compiled(x):
        from dflash_serve.kernels.gpu import norm

        return norm.norm_rows(x, weight, eps)
    return Fp8Rows(*_quantize(rms_norm(x, weight, eps)), x.dtype)


def add_norm_rows(
    delta: Tensor, stream: Tensor, weight: Tensor, eps: float, *, consume: bool = False
) -> tuple[Tensor, Fp8Rows]:
    """`add_norm`, with the norm rounded to 8 bits."""
    if compiled(stream):
        from dflash_serve.kernels.gpu import norm

        return norm.add_norm_rows(delta, stream, weight, eps, consume=consume)
    stream, normal = add_norm(delta, stream, weight, eps, consume=consume)
    return stream, Fp8Rows(*_quantize(normal), normal.dtype)


def linear(x: Tensor | Fp8Rows, weight: Fp8Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight.T of quantised rows: [T, K] by [N, K] → [T, N], in x's type unless given."""
    if compiled(weight.data):
        from dflash_serve.kernels.gpu import fp8

        return fp8.linear(x, weight, out_dtype)
    rows = x if isinstance(x, Fp8Rows) else Fp8Rows(*quantize_rows(x), x.dtype)
    return F.linear(rows.dequantized(), weight.dequantized()).to(out_dtype or x.dtype)


def gated_linear(x: Tensor | Fp8Rows, gate_up: Fp8Weight) -> Tensor:
    """`kernels.linear.gated_linear` of quantised rows: [T, K] by [2·I, K] → [T, I]."""
    if compiled(gate_up.data):
        from dflash_serve.kernels.gpu import fp8

        return fp8.gated_linear(x, gate_up)
    return silu_mul(linear(x, gate_up))


def linear_add_norm(
    x: Tensor,
    weight: Fp8Weight,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    *,
    quantized: bool = False,
    consume: bool = False,
) -> tuple[Tensor, Tensor | Fp8Rows]:
    """`kernels.linear.linear_add_norm` of quantised rows.

    Args:
        quantized: round the norm to 8 bits, for products that would do so.
    """
    if compiled(x):
        from dflash_serve.kernels.gpu import fp8

        options = {"quantized": quantized, "consume": consume}
        return fp8.linear_add_norm(x, weight, residual, norm, eps, **options)
    if quantized:
        return add_norm_rows(linear(x, weight), residual, norm, eps, consume=consume)
    return add_norm(linear(x, weight), residual, norm, eps, consume=consume)
