"""The product of few rows through the copy engine, with the parts of K on programs of their own.

A product of 128 rows with a weight of 4096 rows has too few tiles for all processors unless they
are small, and small tiles read x too often. Cut along K there are enough large ones. Into how many
parts depends on the shape of the weight alone, never on the rows; every part is summed in
ascending order from zero, and the program that ends last adds the sums in ascending order. In one
part the bits are those of `linear`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.gpu.launch import chained, follow
from dflash_serve.kernels.gpu.tiles import COPY_BYTES, Tile

__all__ = ["activate", "addressable", "check_parts", "finish", "product"]

_COUNTERS = 1 << 16


@triton.jit
def activate(acc, up, KIND):  # type: ignore[no-untyped-def]
    """silu(acc) * up, both rounded before and the activation after it."""
    gate = acc.to(KIND).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(KIND).to(tl.float32) * up.to(KIND).to(tl.float32)


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    acc, up, residual, out, row, column, rows, columns, residual_stride, KIND, GATED, ADD
):
    """Activation, residual and store of one part of a tile, rounded where the reference rounds."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if GATED:
        acc = activate(acc, up, KIND)
    if ADD:
        from_at = residual + row[:, None].to(tl.int64) * residual_stride + column[None, :]
        base = tl.load(from_at, mask=inside, other=0.0).to(tl.float32)
        acc = base + acc.to(KIND).to(tl.float32)
    to_at = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(to_at, acc.to(out.dtype.element_ty), mask=inside)


# A row count that is 1 or a multiple of 16 gets no kernel of its own.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,  # descriptors; they pad with 0
    weight,  # if GATED and not JOINT the gate rows; else all
    more,  # the same in tiles of MORE rows
    up_weight,  # the up rows
    up_more,
    residual,
    out,
    partial,  # [tiles, PARTS, 1 or 2 if GATED, ROWS, COLUMNS] float32
    arrived,  # [tiles], 0 before and after
    rows,
    columns,
    depth,
    residual_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    JOINT: tl.constexpr,  # gate and up in one product of twice the columns
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One [ROWS, COLUMNS + MORE] tile of the output, or with PARTS one part of its sum."""
    # Row tiles of the same weight run side by side, then the parts of the same output.
    row_tiles = tl.cdiv(rows, ROWS)
    row_tile = tl.program_id(0) % row_tiles
    column_tile = tl.program_id(0) // row_tiles
    steps = tl.cdiv(depth, DEPTH)
    part = 0
    if PARTS > 1:
        part = column_tile % PARTS
        column_tile = column_tile // PARTS
        steps = steps // PARTS
    row0 = row_tile * ROWS
    column0 = column_tile * (COLUMNS + MORE)
    follow(PDL)
    pairs: tl.constexpr = 2 if JOINT else 1
    acc = tl.zeros((ROWS, COLUMNS * pairs), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    rest: tl.constexpr = MORE if MORE > 0 else 16
    acc_rest = tl.zeros((ROWS, rest * pairs), tl.float32)
    up_rest = tl.zeros((ROWS, rest), tl.float32)
    for step in range(part * steps, part * steps + steps):
        a = x.load([row0, step * DEPTH])
        w = weight.load([column0 * pairs, step * DEPTH])
        acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
        if GATED and not JOINT:
            u = up_weight.load([column0, step * DEPTH])
            up = tl.dot(a, tl.trans(u), up, input_precision=PRECISION)
        if MORE > 0:
            w_rest = more.load([(column0 + COLUMNS) * pairs, step * DEPTH])
            acc_rest = tl.dot(a, tl.trans(w_rest), acc_rest, input_precision=PRECISION)
            if GATED and not JOINT:
                u_rest = up_more.load([column0 + COLUMNS, step * DEPTH])
                up_rest = tl.dot(a, tl.trans(u_rest), up_rest, input_precision=PRECISION)

    if JOINT:
        acc, up = tl.split(tl.reshape(acc, (ROWS, COLUMNS, 2)))
        acc_rest, up_rest = tl.split(tl.reshape(acc_rest, (ROWS, rest, 2)))
    row = row0 + tl.arange(0, ROWS)
    column = column0 + tl.arange(0, COLUMNS)
    kind: tl.constexpr = weight.dtype
    if PARTS > 1:
        size: tl.constexpr = ROWS * COLUMNS * (2 if GATED else 1)
        inner = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tile = column_tile * row_tiles + row_tile
        first = partial + tile.to(tl.int64) * (PARTS * size) + inner
        tl.store(first + part * size, acc)
        if GATED:
            tl.store(first + part * size + ROWS * COLUMNS, up)
        # All threads have stored before the one that counts says so.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before == PARTS - 1:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            up_total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for other in tl.static_range(PARTS):
                total += tl.load(first + other * size, cache_modifier=".cg")
                if GATED:
                    up_total += tl.load(first + other * size + ROWS * COLUMNS, cache_modifier=".cg")
            finish(
                total, up_total, residual, out, row, column, rows, columns, residual_stride, kind,
                GATED, ADD,
            )  # fmt: skip
            tl.store(arrived + tile, 0)
    else:
        finish(
            acc, up, residual, out, row, column, rows, columns, residual_stride, kind, GATED, ADD
        )
        if MORE > 0:
            column = column0 + COLUMNS + tl.arange(0, MORE)
            finish(
                acc_rest, up_rest, residual, out, row, column, rows, columns, residual_stride,
                kind, GATED, ADD,
            )  # fmt: skip


def product(
    x: Tensor,
    weight: Tensor,
    tile: Tile,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T with what follows it, for tiles of mode "copy" and "spread".

    Args:
        x: [T, K].
        weight: [N, K]; gate and up rows in turn when `gated`.
        residual: [T, N] added to the result, or None.

    Returns:
        [T, N], or [T, N / 2] of silu(gate) * up when `gated`.
    """
    (rows, depth), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    out = x.new_empty((rows, columns), dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    x = addressable(x, weight)
    pairs = 2 if tile.joint else 1
    wide, more = tile.columns // pairs, tile.more // pairs
    count = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, wide + more)
    partial = arrived = out
    if tile.parts > 1:
        size = tile.parts * tile.rows * wide * (2 if gated else 1)
        partial = x.new_empty((count, size), dtype=torch.float32)
        arrived = _counters(x.device)
        if count > _COUNTERS:
            raise ConfigError(f"a spread product of {count} tiles; at most {_COUNTERS}")
    apart = gated and not tile.joint
    gate, up = (weight[0::2], weight[1::2]) if apart else (weight, weight)
    box, more_box = [tile.columns, tile.depth], [tile.more or tile.columns, tile.depth]
    _product[(count * tile.parts,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(gate, box),
        TensorDescriptor.from_tensor(gate, more_box),
        TensorDescriptor.from_tensor(up, box),
        TensorDescriptor.from_tensor(up, more_box),
        x if residual is None else residual,
        out,
        partial,
        arrived,
        rows,
        columns,
        depth,
        0 if residual is None else residual.stride(0),
        ROWS=tile.rows,
        COLUMNS=wide,
        MORE=more,
        DEPTH=tile.depth,
        PARTS=tile.parts,
        GATED=gated,
        JOINT=tile.joint,
        ADD=residual is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **chained(x),
    )
    return out


def check_parts(depth: int, tile: Tile, *, gated: bool = False) -> None:
    """Refuse parts of K that are no whole number of steps, or that one program would sum.

    And more columns where the kernel has none, and gate and up joint where there are none.
    """
    if tile.joint and not gated:
        raise ConfigError(
            "a tile that joins gate and up in a product without them; choose another tile"
        )
    if tile.more and (tile.mode != "copy" or tile.parts > 1):
        raise ConfigError(
            f"a product with {tile.more} more columns in mode {tile.mode!r} and {tile.parts} parts "
            "of K; only mode 'copy' in one part has them: choose another tile"
        )
    if tile.parts > 1 and (depth % (tile.parts * tile.depth) or tile.mode != "spread"):
        raise ConfigError(
            f"a product over K = {depth} in {tile.parts} parts of steps of {tile.depth}, mode "
            f"{tile.mode!r}; K must be a multiple of their product and the mode 'spread': choose "
            "another tile"
        )


def addressable(x: Tensor, weight: Tensor) -> Tensor:
    """The rows, copied if the copy engine cannot address them where they lie.

    Raises:
        ConfigError: a K or a weight that it cannot address.
    """
    if not _aligned(x):
        x = x.clone(memory_format=torch.contiguous_format)
    for name, tensor in (("rows", x), ("weight", weight)):
        if not _aligned(tensor):
            raise ConfigError(
                f"the {name} of a product through the copy engine lie "
                f"{tensor.stride(0) * tensor.element_size()} bytes apart from address "
                f"{tensor.data_ptr():#x}; both must be multiples of {COPY_BYTES}: pad K, or take "
                "another tile"
            )
    return x


def _aligned(tensor: Tensor) -> bool:
    apart = tensor.stride(0) * tensor.element_size()
    return tensor.stride(1) == 1 and not (apart % COPY_BYTES or tensor.data_ptr() % COPY_BYTES)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Zeros that every product leaves as it found them; products of a process do not overlap.

    A captured step finds them: it is captured only after the same step has run.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "the first product in spread parts of a process was captured in a graph, which would "
            "own its counters; run the step once before capturing it"
        )
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
