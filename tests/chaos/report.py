"""The table and the JSON of a run."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dflash_serve.cores import usable_cores

from .faults import FAULTS
from .rounds import Round

__all__ = ["make_table", "write_json"]

_ENDS = ("finished", "cut", "failed", "refused", "left")


def make_table(rounds: Sequence[Round]) -> Table:
    """One row per fault."""
    loads = [r.machine_load for r in rounds]
    caption = f"{usable_cores()} cores, load {min(loads):.1f} to {max(loads):.1f}; seconds"
    table = Table(title="chaos", caption=caption)
    table.add_column("fault")
    for name in ("rounds", "accepted", *_ENDS, "resumed", "differ"):
        table.add_column(name, justify="right")
    for name in ("pause p50", "pause max", "freed max", "served max", "whole p50", "whole max"):
        table.add_column(name, justify="right")
    table.add_column("left over", justify="right")
    table.add_column("kept")
    for summary in summarise(rounds):
        table.add_row(*_row(summary))
    return table


def summarise(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Sums and quantiles per fault, in the order of the suite."""
    found = []
    for fault in FAULTS:
        own = [r for r in rounds if r.fault == fault.name]
        if not own:
            continue
        ends = sum((Counter(r.ends) for r in own), Counter())
        pauses = [p for r in own for p in r.pauses_s]
        found.append(
            {
                "fault": fault.name,
                "what": fault.what,
                "replicas": fault.replicas,
                "rounds": len(own),
                "accepted": sum(r.accepted for r in own),
                **{end: ends[end] for end in _ENDS},
                "resumed": sum(r.resumed for r in own),
                "differ": sum(r.differ for r in own),
                "pause_p50_s": statistics.median(pauses) if pauses else None,
                "pause_max_s": max(pauses, default=None),
                "freed_max_s": _worst([r.freed_s for r in own]),
                "served_max_s": _worst([r.served_s for r in own]),
                "whole_p50_s": _middle([r.whole_s for r in own]),
                "whole_max_s": _worst([r.whole_s for r in own]),
                "left_over": sum(len(r.left) for r in own),
                "broken": [f"round {n}: {b}" for n, r in enumerate(own, 1) for b in r.broken],
            }
        )
    return found


def write_json(path: Path, rounds: Sequence[Round], options: dict[str, Any]) -> None:
    """Everything there is to know."""
    document = {
        "machine": {"cores": usable_cores(), "system": platform.platform()},
        "options": options,
        "faults": summarise(rounds),
        "rounds": [dataclasses.asdict(r) for r in rounds],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _worst(values: Sequence[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _middle(values: Sequence[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return statistics.median(there) if there else None


def _row(summary: dict[str, Any]) -> list[str]:
    times = ("pause_p50_s", "pause_max_s", "freed_max_s", "served_max_s", "whole_p50_s")
    return [
        summary["what"],
        *(str(summary[n]) for n in ("rounds", "accepted", *_ENDS, "resumed", "differ")),
        *(_seconds(summary[name]) for name in (*times, "whole_max_s")),
        str(summary["left_over"]),
        "[red]no[/red]" if summary["broken"] else "yes",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
