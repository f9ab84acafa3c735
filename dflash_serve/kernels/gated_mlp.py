"""The gated activation of Llama-style MLPs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dflash_serve.kernels.backend import compiled

__all__ = ["silu_mul"]


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for columns gate, up, gate, up, …: [T, 2·I] → [T, I]."""
    if compiled(gate_up):
        from dflash_serve.kernels.gpu import gated_mlp

        return gated_mlp.silu_mul(gate_up)
    # Copied apart: torch computes columns that lie apart one at a time.
    gate, up = gate_up[..., 0::2].contiguous(), gate_up[..., 1::2].contiguous()
    return F.silu(gate) * up
