"""The published floor tables, b = g = 16 and bf16 on H200, read from `tables/`."""

from __future__ import annotations

import csv
from decimal import Decimal
from pathlib import Path

FOLDER = Path(__file__).parent / "tables"
BLOCK = 16
CONTEXT = 1024
"""Of the tables that name no context."""

Row = dict[str, str]


def table(name: str) -> list[Row]:
    """Rows of one table, as text."""
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rounded_like(text: str, value: float) -> str:
    """`value` with as many decimals as `text` has."""
    digits = max(0, -int(Decimal(text).as_tuple().exponent))
    return f"{value:.{digits}f}"


def differing(row: Row, values: dict[str, float]) -> dict[str, tuple[str, str]]:
    """Columns whose value does not round to the published one: (published, ours)."""
    ours = {name: rounded_like(row[name], value) for name, value in values.items()}
    return {name: (row[name], ours[name]) for name in ours if row[name] != ours[name]}
