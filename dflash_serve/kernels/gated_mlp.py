"""The gated activation of Llama-style MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.kernels.backend import compiled

__all__ = ["silu_mul"]


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for columns gate, up, gate, up, …: [T, 2·I] → [T, I]."""
    if compiled(gate_up):
        from dflash_serve.kernels.gpu import gated_mlp

        return gated_mlp.silu_mul(gate_up)
    # Copied side by side: torch computes columns that lie apart one at a time. In rows of both: the
    # end of a vectorised loop may round differently, and must not move with the number of rows.
    gate, up = torch.cat((gate_up[..., 0::2], gate_up[..., 1::2]), dim=-1).chunk(2, dim=-1)
    return F.silu(gate) * up
