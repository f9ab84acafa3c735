"""The head product that picks against a product with a pick after it, for `bench.pick --head`.

On a loaded GPU the clock follows the power, so that the ways to compute a case take turns in short
rounds, and medians are compared. A head of 1.2 GB leaves nothing in the cache for the next way.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dflash_serve.kernels.gpu import linear_large
from dflash_serve.kernels.gpu.head_pick import head_keys
from dflash_serve.kernels.gpu.head_tiles import HeadTile, head_tile
from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS, Tile
from dflash_serve.kernels.linear import linear
from dflash_serve.kernels.pick import best_keys
from dflash_serve.kernels.rows import RowSampling

__all__ = ["HEAD", "ROWS", "Found", "compare", "tiles_of"]

HEAD = (151_936, 4096)
ROWS = (1, 16, 128, 240, 256, 384, 512, 1024, 2048)
TEMPERATURES = (0.0, 1.0)
_LOGITS_ROWS = 1024  # most rows that a step sends through the head at once
_EXACT_ROWS = 512
_ROUND_SECONDS = 2e-3
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 60

_FEW = (
    HeadTile(16, 64, 128, 4, 4),
    HeadTile(16, 64, 128, 4, 3),
    HeadTile(16, 64, 256, 4, 3),
    HeadTile(16, 128, 128, 4, 3),
    HeadTile(16, 128, 128, 8, 3),
    HeadTile(16, 64, 128, 4, 4, copied=True),
)
_FULL = (
    HeadTile(128, 256, 64, 8, 4, copied=True),
    HeadTile(128, 256, 64, 8, 4, copied=True, piece=32),
    HeadTile(128, 256, 64, 8, 4, copied=True, resident=1),
    HeadTile(128, 128, 64, 8, 3, copied=True),
    HeadTile(128, 128, 64, 4, 3, copied=True, piece=32),
    HeadTile(64, 128, 64, 4, 4, copied=True),
)
_MANY = (
    HeadTile(128, 256, 64, 8, 4, copied=True, resident=1, group=16),
    HeadTile(128, 256, 64, 8, 4, copied=True, resident=1, group=8),
    HeadTile(128, 256, 64, 8, 4, copied=True, resident=1, group=4),
    HeadTile(128, 256, 64, 8, 4, copied=True, resident=1, group=16, piece=32),
    HeadTile(128, 256, 64, 8, 4, copied=True, group=16),
    HeadTile(256, 128, 64, 8, 4, copied=True, resident=1, group=8),
    HeadTile(128, 128, 64, 8, 3, copied=True, resident=2, group=16),
    HeadTile(128, 128, 64, 4, 3, copied=True, resident=2, group=16, piece=32),
)
_TOY = (
    HeadTile(16, 32, 32, 4, 2),
    HeadTile(16, 32, 32, 4, 2, copied=True, resident=1, piece=8),
)


@dataclasses.dataclass
class Found:
    """One way to compute the keys of a case.

    Attributes:
        rows, temperature: the case.
        way: "product + pick" or the tile.
        microseconds: median over the rounds; None when it was not measured.
        right: whether its keys are the expected ones.
        error: why it was not measured.
    """

    rows: int
    temperature: float
    way: str
    microseconds: float | None = None
    right: bool | None = None
    error: str | None = None


def tiles_of(rows: int) -> tuple[HeadTile, ...]:
    """The tiles that are timed at a row count of the Qwen3-8B head."""
    if rows <= 16:
        return _FEW
    return _FULL if rows <= INVARIANT_ROWS else _MANY


def name_of(tile: HeadTile) -> str:
    """A tile in a few characters."""
    text = f"{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
    text += f" p{tile.piece}"
    if tile.copied:
        text += f" copied r{tile.resident} g{tile.group}"
    return text


def sampling(rows: int, temperature: float, device: torch.device) -> RowSampling:
    """One request a row."""

    def real(value: float) -> Tensor:
        return torch.full((rows,), value, dtype=torch.float64, device=device)

    return RowSampling(
        temperature=real(temperature),
        top_k=torch.zeros(rows, dtype=torch.int64, device=device),
        top_p=real(1.0),
        min_p=real(0.0),
        seed=torch.arange(rows, device=device),
        position=torch.arange(rows, device=device) + 1000,
        noisy=True,  # a captured step does not know better
        truncates=False,
    )


def product_and_pick(x: Tensor, weight: Tensor, rows: RowSampling) -> Tensor:
    """Keys as a step without the fused form computes them."""
    return _in_parts(x, rows, _LOGITS_ROWS, lambda some: linear(some, weight))


def expected_keys(x: Tensor, weight: Tensor, rows: RowSampling) -> Tensor:
    """Keys from a product that sums like the fused one: above 128 rows the library does not."""
    if x.shape[0] <= INVARIANT_ROWS or x.dtype == torch.float32:
        return product_and_pick(x, weight, rows)
    tile = Tile(128, 256, 64, 8, 4)
    return _in_parts(x, rows, _EXACT_ROWS, lambda some: linear_large.product(some, weight, tile))


def _in_parts(
    x: Tensor, rows: RowSampling, limit: int, product: Callable[[Tensor], Tensor]
) -> Tensor:
    keys = []
    for first in range(0, x.shape[0], limit):
        logits = product(x[first : first + limit])
        some = rows.rows(first, first + limit)
        keys.append(best_keys(logits, some, 0, logits.shape[1]))
    return keys[0] if len(keys) == 1 else torch.cat(keys)


def compare(
    counts: tuple[int, ...], budget: float, output: Path | None, device: torch.device
) -> list[Found]:
    """Time all ways at all row counts, print them by case and write them as JSON.

    Args:
        counts: row counts.
        budget: seconds for everything; cases that do not fit are named and left out.
        output: JSON file, or None.
        device: a CPU computes a toy head in the interpreter, whose times mean nothing.
    """
    began = time.perf_counter()
    toy = device.type != "cuda"
    columns, depth = (70, 64) if toy else HEAD
    dtype = torch.float32 if toy else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn((columns, depth), generator=generator, device=device, dtype=dtype)
    weight.mul_(3 / depth**0.5)
    if toy:
        weight = weight.mul_(4).round_()  # sums are exact: the interpreter's have no fixed order
    found: list[Found] = []
    cases = [(count, heat) for count in counts for heat in TEMPERATURES]
    for index, (count, heat) in enumerate(cases):
        left = budget - (time.perf_counter() - began)
        if left <= 0:
            print(f"{count} rows, T = {heat}: no time left", flush=True)
            continue
        x = torch.randn((count, depth), generator=generator, device=device, dtype=dtype)
        x = x.round_() if toy else x
        tiles = _TOY if toy else tiles_of(count)
        case = _case(x, weight, heat, tiles, left / (len(cases) - index))
        print(table(case), flush=True)
        found += case
        if output is not None:
            name = "interpreter" if toy else torch.cuda.get_device_name()
            results = [dataclasses.asdict(one) for one in found]
            output.write_text(json.dumps({"device": name, "results": results}, indent=1) + "\n")
    return found


def _case(
    x: Tensor, weight: Tensor, temperature: float, tiles: tuple[HeadTile, ...], seconds: float
) -> list[Found]:
    """All ways at one row count and temperature, in about so many seconds."""
    until = time.perf_counter() + seconds
    rows = sampling(x.shape[0], temperature, x.device)
    columns, depth = weight.shape
    chosen = head_tile(columns, depth, x.shape[0], x.dtype)
    expected = expected_keys(x, weight, rows)
    ways: list[tuple[Found, Callable[[], Tensor]]] = []

    def add(name: str, work: Callable[[], Tensor]) -> None:
        ways.append((Found(x.shape[0], temperature, name), work))

    add("product + pick", lambda: product_and_pick(x, weight, rows))
    for tile in dict.fromkeys((chosen, *tiles)):
        label = name_of(tile) + (" (table)" if tile == chosen else "")
        add(
            label,
            lambda tile=tile: head_keys(  # type: ignore[misc]
                x, weight, rows, 0, columns, 1.0, tile
            ),
        )
    timers: list[tuple[Found, Callable[[], float], list[float]]] = []
    for found, work in ways:
        try:
            keys = work()
            # The library's sums may round differently, and with them the best of near-equal ids.
            if found.way != "product + pick" or x.shape[0] <= INVARIANT_ROWS:
                found.right = torch.equal(keys, expected)
            timers.append((found, _timer(work, x.device), []))
        except Exception as error:  # the other ways still have something to say
            found.error = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    for turn in range(_MOST_ROUNDS):
        if turn >= _LEAST_ROUNDS and time.perf_counter() > until:
            break
        for _, timer, times in timers:
            times.append(timer())
    for found, _, times in timers:
        found.microseconds = statistics.median(times) * 1e6
    return [found for found, _ in ways]


def _timer(work: Callable[[], Tensor], device: torch.device) -> Callable[[], float]:
    """A function that gives the seconds of one call of `work`, which has run before."""
    if device.type != "cuda":

        def plain() -> float:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began

        return plain
    began, ended = (_event() for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    calls: int = max(1, round(_ROUND_SECONDS / max(began.elapsed_time(ended) / 1e3, 1e-5)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()

    def replayed() -> float:
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3 / calls

    replayed()
    return replayed


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def table(case: list[Found]) -> str:
    """A case as text: each way, its time, and what it saves against product and pick."""
    base = case[0].microseconds
    lines = [f"{case[0].rows} rows, T = {case[0].temperature}"]
    for one in case:
        if one.microseconds is None:
            lines.append(f"  {one.way:<48} {one.error}")
            continue
        gain = "" if base is None else f"{1 - one.microseconds / base:+7.1%}"
        right = {None: "", True: "equal", False: "WRONG"}[one.right]
        lines.append(f"  {one.way:<48} {one.microseconds:9.1f} us {gain} {right}")
    return "\n".join(lines)
