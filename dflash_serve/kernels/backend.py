"""Which implementation of an operation runs: plain torch, or Triton.

CUDA tensors go through the Triton kernels in `kernels.gpu`, every other tensor through the plain
torch functions, which are also the oracle the kernels are tested against.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

__all__ = ["compiled", "interpreted"]

_interpreting = False


def compiled(x: Tensor) -> bool:
    """Whether operations on `x` run through Triton."""
    return x.is_cuda or _interpreting


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Send CPU tensors through the Triton kernels too (tests; needs TRITON_INTERPRET=1)."""
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before
