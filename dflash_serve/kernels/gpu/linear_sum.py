"""A product of few rows that leaves the parts of its sum to the kernel behind it.

K is cut into parts as in `linear_parts`, but no program waits for the others to add them up: the
sums lie in memory, and `norm.add_norm`, which reads the result anyway, adds them in ascending
order. The bits are those of the same tile in mode "spread".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_serve.kernels.gpu.launch import chained, follow
from dflash_serve.kernels.gpu.linear_parts import addressable, check_parts
from dflash_serve.kernels.gpu.tiles import Tile

__all__ = ["part_sums"]


# A row count that is 1 or a multiple of 16 gets no kernel of its own.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _part_sums(  # type: ignore[no-untyped-def]
    x,  # descriptors; they pad with 0
    weight,
    out,  # [PARTS, rows, columns] float32
    rows,
    columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One [ROWS, COLUMNS] tile of one part."""
    # Row tiles of the same weight run side by side, then the parts of the same output.
    row_tiles = tl.cdiv(rows, ROWS)
    row0 = tl.program_id(0) % row_tiles * ROWS
    rest = tl.program_id(0) // row_tiles
    part = rest % PARTS
    column0 = rest // PARTS * COLUMNS
    steps = tl.cdiv(depth, DEPTH) // PARTS
    follow(PDL)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(part * steps, part * steps + steps):
        a = x.load([row0, step * DEPTH])
        w = weight.load([column0, step * DEPTH])
        acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
    row = row0 + tl.arange(0, ROWS)
    column = column0 + tl.arange(0, COLUMNS)
    line = (part * rows + row[:, None]).to(tl.int64) * columns
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + line + column[None, :], acc, mask=inside)


def part_sums(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """The parts of x @ weight.T: [T, K] and [N, K] → [parts, T, N] float32.

    Args:
        tile: of mode "spread".

    Raises:
        ConfigError: parts that are no whole number of steps, or a K that the copy engine cannot
            address.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    check_parts(depth, tile)
    out = x.new_empty((tile.parts, rows, columns), dtype=torch.float32)
    if out.numel() == 0:
        return out
    x = addressable(x, weight)
    count = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    _part_sums[(count * tile.parts,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        out,
        rows,
        columns,
        depth,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        PARTS=tile.parts,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **chained(x),
    )
    return out
