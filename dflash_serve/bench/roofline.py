"""The least time a decode step can take: bytes over bandwidth, operations over arithmetic rate.

Per phase the larger of the two, plus the data volume of the collectives over the link; phases are
summed, since each needs the one before. It is a floor: launch gaps, latency
of collectives and everything on the host are left out.
"""

from __future__ import annotations

import dataclasses

from dflash_serve.model_config import DraftConfig, TargetConfig, TransformerConfig

__all__ = ["H200", "Floor", "Machine", "Phase", "Workload", "step_floor"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Limits of one device.

    Attributes:
        bandwidth: memory, bytes/s.
        flops: matrix products, operations/s.
        link: to the other devices, bytes/s in one direction.
        weight_bytes: bytes of one weight or cache element.
    """

    bandwidth: float
    flops: float
    link: float
    weight_bytes: int = 2


H200 = Machine(bandwidth=4.3e12, flops=790e12, link=450e9)
"""Measured copy bandwidth and bf16 product rate; NVLink by datasheet."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """B requests with S committed tokens each, g rows verified, on `tp` devices."""

    batch: int
    context: int
    rows: int
    tp: int = 1

    @property
    def tokens(self) -> int:
        """Rows of one step."""
        return self.batch * self.rows


@dataclasses.dataclass(frozen=True)
class Phase:
    """One part of a step, on one device."""

    name: str
    bytes: float
    flops: float
    collective_bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Floor:
    """A step's phases."""

    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        """Least time of the step."""
        return sum(p.seconds for p in self.phases)

    @property
    def bytes(self) -> float:
        """Memory traffic of the step on one device."""
        return sum(p.bytes for p in self.phases)

    @property
    def flops(self) -> float:
        """Operations of the step on one device."""
        return sum(p.flops for p in self.phases)


def step_floor(
    target: TargetConfig, draft: DraftConfig | None, load: Workload, machine: Machine = H200
) -> Floor:
    """Floor of one decode step; without a draft, of plain decoding (`load.rows` is then 1)."""
    layers = _layers("target", target.model, load, machine)
    head = _head("target head", target, load.tokens, load, machine)
    if draft is None:
        return Floor((layers, head))
    return Floor(
        (
            _layers("draft", draft.model, load, machine),
            _head("draft head", target, load.batch * (load.rows - 1), load, machine),
            layers,
            head,
            _inject(target, draft, load, machine),
        )
    )


def _layers(name: str, model: TransformerConfig, load: Workload, machine: Machine) -> Phase:
    weights = _layer_weights(model)
    kv = _kv_bytes(model, load, machine)
    seen = load.context + load.rows
    attention = 4 * load.tokens * seen * model.num_heads * model.head_dim / load.tp
    stored = model.num_layers * machine.weight_bytes * weights / load.tp
    return _phase(
        name,
        stored + load.batch * load.context * kv + load.tokens * kv,
        model.num_layers * (2 * load.tokens * weights / load.tp + attention),
        (2 * model.num_layers + 1) * load.tokens * model.hidden_size * machine.weight_bytes,
        load,
        machine,
    )


def _head(name: str, target: TargetConfig, rows: int, load: Workload, machine: Machine) -> Phase:
    size = target.vocab_size * target.model.hidden_size / load.tp
    return _phase(name, machine.weight_bytes * size, 2 * rows * size, 0.0, load, machine)


def _inject(target: TargetConfig, draft: DraftConfig, load: Workload, machine: Machine) -> Phase:
    model, taps = draft.model, len(draft.taps or ()) or draft.model.num_layers
    weights = taps * target.model.hidden_size * model.hidden_size
    weights += model.num_layers * 2 * model.num_kv_heads * model.head_dim * model.hidden_size
    tapped = taps * target.model.hidden_size * load.tokens * machine.weight_bytes
    kv = _kv_bytes(model, load, machine)
    return _phase(
        "inject",
        machine.weight_bytes * weights / load.tp + load.tokens * kv + tapped,
        2 * load.tokens * weights / load.tp,
        load.tokens * model.hidden_size * machine.weight_bytes,
        load,
        machine,
    )


def _phase(
    name: str,
    bytes_: float,
    flops: float,
    collective: float,
    load: Workload,
    machine: Machine,
) -> Phase:
    moved = collective * 2 * (load.tp - 1) / load.tp
    seconds = max(bytes_ / machine.bandwidth, flops / machine.flops) + moved / machine.link
    return Phase(name, bytes_, flops, moved, seconds)


def _layer_weights(model: TransformerConfig) -> int:
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attention = model.hidden_size * (heads + model.num_heads * model.head_dim)
    return attention + 3 * model.hidden_size * model.intermediate_size


def _kv_bytes(model: TransformerConfig, load: Workload, machine: Machine) -> float:
    """Keys and values of one token on one device; heads replicate when there are too few."""
    heads = max(1.0, model.num_kv_heads / load.tp)
    return 2 * model.num_layers * heads * model.head_dim * machine.weight_bytes
