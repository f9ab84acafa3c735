"""The gated activation of Llama-style MLPs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dflash_serve.kernels.backend import compiled

__all__ = ["silu_mul"]


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate | up side by side: [T, 2·I] → [T, I]."""
    if compiled(gate_up):
        from dflash_serve.kernels.gpu import gated_mlp

        return gated_mlp.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
