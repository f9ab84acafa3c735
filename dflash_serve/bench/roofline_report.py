"""`dflash-serve roofline`: phases, floors and the best verify length, from configs alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dflash_serve.bench.roofline import (
    MACHINES,
    TARGETS,
    Floor,
    Machine,
    Phase,
    Workload,
    best_length,
    draft_like,
    geometric_rate,
    step_floor,
)
from dflash_serve.errors import ConfigError
from dflash_serve.model_config import DraftConfig, TargetConfig
from dflash_serve.scheduler.acceptance import expected_tokens

__all__ = ["LIKE_TARGET", "Question", "load_draft", "load_target", "machine_named", "report"]

LIKE_TARGET = "like-target"
"""In place of a draft's folder: five layers of the target's shape, a block of 16."""

_LIKE_TARGET_BLOCK = 16
_TAUS = (3.0, 5.0, 6.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What a report is asked about.

    Attributes:
        rows: g, rows drafted and verified; at most `block`.
        batches: one table row each.
        taus: tokens per full block to assume, with the same acceptance at each position; those
            of the published tables that the block allows if None.
        acceptance: conditional acceptance per position, in place of `taus`.
        measured_ms: a step's time, to be compared with the floor; needs a single batch.
    """

    target: TargetConfig
    draft: DraftConfig
    machine: Machine
    block: int
    rows: int
    batches: Sequence[int]
    context: int
    tp: int
    taus: Sequence[float] | None = None
    acceptance: Sequence[float] | None = None
    measured_ms: float | None = None

    def validate(self) -> None:
        """Raises ConfigError for what cannot be answered."""
        self.target.model.check_tensor_parallel(self.tp, "target")
        self.draft.model.check_tensor_parallel(self.tp, "draft")
        if self.measured_ms is not None and not self.measured_ms > 0:
            raise ConfigError(f"--measured is {self.measured_ms:g}; it must be positive")
        if self.measured_ms is not None and len(self.batches) != 1:
            raise ConfigError(
                f"--measured is the time of one step, but --batch holds {list(self.batches)}; "
                "give the batch that was measured"
            )
        vector = self.acceptance
        if vector is not None and len(vector) != self.block - 1:
            raise ConfigError(
                f"--acceptance holds {len(vector)} numbers; a block of {self.block} has "
                f"{self.block - 1} draft positions"
            )
        if vector is not None and max(vector, default=0.0) > 1:
            raise ConfigError(f"--acceptance is {list(vector)}; every number must be at most 1")

    def tokens(self) -> dict[str, Callable[[int], float]]:
        """Tokens per step by rows, for each assumption, by its title."""
        if self.acceptance is not None:
            vector = list(self.acceptance)
            return {"given": lambda rows: expected_tokens(vector[: rows - 1])}
        usual = [tau for tau in _TAUS if tau <= self.block] or [float(self.block)]
        taus = usual if self.taus is None else self.taus
        rates = {tau: geometric_rate(tau, self.block) for tau in taus}
        return {f"{tau:g}": _geometric(rate) for tau, rate in rates.items()}

    def step(self, batch: int, rows: int) -> Floor:
        """Floor of a step with the draft."""
        load = Workload(batch, self.context, rows, self.tp)
        return step_floor(self.target, self.draft, load, self.machine)

    def plain(self, batch: int) -> Floor:
        """Floor of a step of the engine started without a draft."""
        load = Workload(batch, self.context, 1, self.tp)
        return step_floor(self.target, None, load, self.machine)


def _geometric(rate: float) -> Callable[[int], float]:
    return lambda rows: expected_tokens([rate] * (rows - 1))


def load_target(name: str) -> TargetConfig:
    """A target by the name of a public shape, or from a checkpoint's folder."""
    return TARGETS[name] if name in TARGETS else TargetConfig.load(Path(name).expanduser())


def load_draft(
    name: str, target: TargetConfig, *, block_size: int | None, rows: int | None
) -> tuple[DraftConfig, int, int]:
    """A draft from a folder, or `LIKE_TARGET`; with its block and the rows per step."""
    if name == LIKE_TARGET:
        draft, block_size = draft_like(target), block_size or _LIKE_TARGET_BLOCK
    else:
        draft = DraftConfig.load(Path(name).expanduser())
    geometry = draft.geometry(block_size=block_size, verify_length=rows)
    return draft, geometry.block, geometry.rows


def machine_named(
    name: str,
    *,
    estimate: bool,
    element_bytes: int = 2,
    bandwidth_tb: float | None = None,
    tflops: float | None = None,
    link_gb: float | None = None,
    collective_us: float | None = None,
    node_us: float | None = None,
) -> Machine:
    """A machine by name, or what a very good engine makes of it; numbers given replace its own.

    Raises:
        ConfigError: an unknown name, or a rate that is not positive.
    """
    if name not in MACHINES:
        raise ConfigError(f"--gpu is {name!r}; known: {sorted(MACHINES)}")
    machine = MACHINES[name].estimate() if estimate else MACHINES[name]
    return dataclasses.replace(
        machine,
        weight_bytes=element_bytes,
        bandwidth=_given("bandwidth", bandwidth_tb, 1e12, machine.bandwidth),
        flops=_given("tflops", tflops, 1e12, machine.flops),
        link=_given("link", link_gb, 1e9, machine.link),
        collective_seconds=_latency(collective_us, machine.collective_seconds),
        node_seconds=_latency(node_us, machine.node_seconds),
    )


def _given(name: str, value: float | None, unit: float, default: float) -> float:
    if value is None:
        return default
    if not value > 0:
        raise ConfigError(f"--{name} is {value:g}; it must be positive")
    return value * unit


def _latency(microseconds: float | None, default: float) -> float:
    return default if microseconds is None else microseconds * 1e-6


# -- tables -------------------------------------------------------------------------------------


def report(question: Question, console: Console) -> None:
    """Print the phases of each batch, then one line of floors and rates per batch.

    Raises:
        ConfigError: a question that cannot be answered.
    """
    question.validate()
    console.print(_phase_table(question))
    console.print(_batch_table(question))
    if question.measured_ms is not None:
        _print_share(question, question.measured_ms / 1e3, console)


def _columns(table: Table, names: Sequence[str]) -> None:
    for name in names:
        left = name in ("phase", "bound")
        table.add_column(name, justify="left" if left else "right")


def _phase_table(question: Question) -> Table:
    machine = question.machine
    title = (
        f"per device: g {question.rows}, context {question.context}, tp {question.tp}; "
        f"{machine.bandwidth / 1e12:.4g} TB/s, {machine.flops / 1e12:.4g} TFLOP/s, "
        f"link {machine.link / 1e9:.4g} GB/s"
    )
    table = Table(title=title, title_justify="left")
    _columns(table, ["batch", "phase", "GB", "TFLOP", "collectives", "link MB", "ms", "bound"])
    for batch in question.batches:
        floor = question.step(batch, question.rows)
        for part in floor.phases:
            table.add_row(str(batch), part.name, *_figures(part), part.bound)
        table.add_row(str(batch), "step", *_figures(floor), "", end_section=True)
    return table


def _figures(part: Phase | Floor) -> tuple[str, ...]:
    return (
        f"{part.bytes / 1e9:.2f}",
        f"{part.flops / 1e12:.2f}",
        str(part.collectives),
        f"{part.collective_bytes / 1e6:.0f}",
        f"{part.seconds * 1e3:.2f}",
    )


def _batch_table(question: Question) -> Table:
    """Rates of the step asked for, and of the best g with its gain over plain decoding."""
    table = Table(title="against plain decoding", title_justify="left")
    _columns(table, ["batch", "ms", "even at", "τ", "tok/s", "per user", "best g", "vs plain"])
    for batch in question.batches:
        step = question.step(batch, question.rows).seconds
        plain = question.plain(batch).seconds
        costs = {g: question.step(batch, g).seconds for g in range(1, question.block + 1)}
        rates = (f"{batch / plain:,.0f}", f"{1 / plain:,.0f}")
        table.add_row(str(batch), f"{plain * 1e3:.2f}", "", "plain", *rates, "", "")
        for title, tokens in question.tokens().items():
            rate = tokens(question.rows) / step
            best, best_rate = best_length(costs.__getitem__, tokens, question.block)
            rates = (f"{batch * rate:,.0f}", f"{rate:,.0f}")
            table.add_row(
                *(str(batch), f"{step * 1e3:.2f}", f"{step / plain:.2f}", title),
                *(*rates, str(best), f"{best_rate * plain:.2f}"),
            )
        table.add_section()
    return table


def _print_share(question: Question, measured: float, console: Console) -> None:
    step = question.step(question.batches[0], question.rows)
    memory = step.bytes / (question.machine.bandwidth * measured)
    arithmetic = step.flops / (question.machine.flops * measured)
    console.print(
        f"measured {measured * 1e3:g} ms, of which the step above is {step.seconds / measured:.0%};"
        f" memory is busy for {memory:.0%}, arithmetic for {arithmetic:.0%}"
    )
