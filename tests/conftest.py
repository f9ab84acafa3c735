"""Settings that must be in place before anything imports Triton."""

from __future__ import annotations

import os

import torch

# Without a GPU the kernels run in Triton's interpreter, which is chosen at import.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
