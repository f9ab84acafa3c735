"""The least time a decode step can take: bytes over bandwidth, operations over arithmetic rate.

Per phase the larger of the two, plus the data volume of the collectives over the link; phases are
summed, since each needs the one before. On a machine with no overheads the sum is a floor: launch
gaps, latency of collectives and everything on the host are left out. `Machine.estimate` puts
back what even a very good engine pays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from dflash_serve.errors import ConfigError
from dflash_serve.model_config import DraftConfig, RopeConfig, TargetConfig, TransformerConfig

__all__ = [
    "H200",
    "MACHINES",
    "TARGETS",
    "Bound",
    "Floor",
    "Machine",
    "Phase",
    "Workload",
    "best_length",
    "draft_like",
    "geometric_rate",
    "step_floor",
]

Bound = Literal["bytes", "flops", "link"]

_PICK_BYTES = 8  # the packed (score, id) that each row sends
_LAYER_NODES, _HEAD_NODES, _INJECT_NODES = 10, 5, 5  # kernels of a well fused step


@dataclasses.dataclass(frozen=True)
class Machine:
    """Limits of one device.

    Attributes:
        bandwidth: memory, bytes/s.
        flops: matrix products, operations/s.
        link: to the other devices, bytes/s in one direction.
        weight_bytes: bytes of one weight, cache or activation element.
        collective_seconds: latency of one collective.
        node_seconds: gap before each kernel.
        logit_passes: times that a head's logits cross the memory; 0 when the pick is fused.
    """

    bandwidth: float
    flops: float
    link: float
    weight_bytes: int = 2
    collective_seconds: float = 0.0
    node_seconds: float = 0.0
    logit_passes: int = 0

    def estimate(self) -> Machine:
        """What a very good engine reaches: efficiencies below 1, latencies and stored logits."""
        return dataclasses.replace(
            self,
            bandwidth=0.85 * self.bandwidth,
            flops=0.75 * self.flops,
            link=0.77 * self.link,
            collective_seconds=5e-6,
            node_seconds=1.3e-6,
            logit_passes=2,
        )


H200 = Machine(bandwidth=4.3e12, flops=790e12, link=450e9)
"""Measured copy bandwidth and bf16 product rate; NVLink by datasheet."""

MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "h200": H200,
        # Decoding reads far more than it writes, and a pure read is slower than a copy.
        "h200-read": dataclasses.replace(H200, bandwidth=4.2e12),
    }
)
"""Machines by name."""


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
    """One part of a step, on one device.

    Attributes:
        bytes: memory traffic.
        flops: operations.
        collectives: how many the phase waits for; 0 on one device.
        collective_bytes: data that crosses the link, one way.
        seconds: least time.
        bound: which of memory, arithmetic and link takes longest.
    """

    name: str
    bytes: float
    flops: float
    collectives: int
    collective_bytes: float
    seconds: float
    bound: Bound


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

    @property
    def collectives(self) -> int:
        """Collectives of the step."""
        return sum(p.collectives for p in self.phases)

    @property
    def collective_bytes(self) -> float:
        """Link traffic of the step on one device, one way."""
        return sum(p.collective_bytes for p in self.phases)


def step_floor(
    target: TargetConfig, draft: DraftConfig | None, load: Workload, machine: Machine = H200
) -> Floor:
    """Floor of one decode step.

    Without a draft it is that of plain decoding, `load.rows` being 1. With a draft and one row
    nothing is drafted, but the draft's context is still written.
    """
    phases = [
        # A row of the block sees half of the block on average, since verification is causal.
        _layers("target", target.model, load.context + load.rows / 2, load, machine),
        _head("target head", target, load.tokens, load, machine),
    ]
    if draft is not None:
        phases.append(_inject(target, draft, load, machine))
        if load.rows > 1:
            proposed = load.batch * (load.rows - 1)
            phases[:0] = [
                _layers("draft", draft.model, load.context + load.rows, load, machine),
                _head("draft head", target, proposed, load, machine),
            ]
    return Floor(tuple(phases))


def _layers(
    name: str, model: TransformerConfig, seen: float, load: Workload, machine: Machine
) -> Phase:
    """All layers of a model and its embedding; a row attends to `seen` keys."""
    weights = _layer_weights(model)
    kv = _kv_bytes(model, load, machine)
    attention = 4 * load.tokens * seen * model.num_heads * model.head_dim / load.tp
    stored = model.num_layers * machine.weight_bytes * weights / load.tp
    return _phase(
        name,
        stored + load.batch * load.context * kv + load.tokens * kv,
        model.num_layers * (2 * load.tokens * weights / load.tp + attention),
        (2 * model.num_layers + 1, load.tokens * model.hidden_size * machine.weight_bytes),
        _LAYER_NODES * model.num_layers,
        load,
        machine,
    )


def _head(name: str, target: TargetConfig, rows: int, load: Workload, machine: Machine) -> Phase:
    size = target.vocab_size * target.model.hidden_size / load.tp
    logits = machine.logit_passes * rows * target.vocab_size / load.tp
    return _phase(
        name,
        machine.weight_bytes * (size + logits),
        2 * rows * size,
        (1, rows * _PICK_BYTES),
        _HEAD_NODES,
        load,
        machine,
    )


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
        (1, load.tokens * model.hidden_size * machine.weight_bytes),
        _INJECT_NODES,
        load,
        machine,
    )


def _phase(
    name: str,
    bytes_: float,
    flops: float,
    collectives: tuple[int, float],
    nodes: int,
    load: Workload,
    machine: Machine,
) -> Phase:
    """Add up a phase; `collectives` is their count and the bytes that one of them sums."""
    count, each = collectives if load.tp > 1 else (0, 0.0)
    moved = count * each * 2 * (load.tp - 1) / load.tp
    terms: dict[Bound, float] = {
        "bytes": bytes_ / machine.bandwidth,
        "flops": flops / machine.flops,
        "link": moved / machine.link + count * machine.collective_seconds,
    }
    seconds = max(terms["bytes"], terms["flops"]) + terms["link"] + nodes * machine.node_seconds
    return Phase(name, bytes_, flops, count, moved, seconds, max(terms, key=lambda t: terms[t]))


def _layer_weights(model: TransformerConfig) -> int:
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attention = model.hidden_size * (heads + model.num_heads * model.head_dim)
    return attention + 3 * model.hidden_size * model.intermediate_size


def _kv_bytes(model: TransformerConfig, load: Workload, machine: Machine) -> float:
    """Keys and values of one token on one device; heads replicate when there are too few."""
    heads = max(1.0, model.num_kv_heads / load.tp)
    return 2 * model.num_layers * heads * model.head_dim * machine.weight_bytes


# -- tokens per step ----------------------------------------------------------------------------


def geometric_rate(tau: float, block: int) -> float:
    """The acceptance per position, the same at each, that brings `tau` tokens per full block.

    Raises:
        ConfigError: `tau` outside 1..block.
    """
    if not 1 <= tau <= block:
        raise ConfigError(f"tokens per step is {tau:g}; a block of {block} brings 1 to {block}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(block)) < tau:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def best_length(
    seconds: Callable[[int], float], tokens: Callable[[int], float], block: int
) -> tuple[int, float]:
    """The number of rows with the most tokens/s per request, and those tokens/s.

    Args:
        seconds: of a step, by rows.
        tokens: brought to one request by a step, by rows.
        block: most rows; 1 row is a step without speculation.
    """
    rates = {rows: tokens(rows) / seconds(rows) for rows in range(1, block + 1)}
    best = max(rates, key=lambda rows: rates[rows])
    return best, rates[best]


# -- shapes by name -----------------------------------------------------------------------------


def _target(
    family: str, hidden: int, intermediate: int, layers: int, heads: int, vocab: int
) -> TargetConfig:
    """A dense target of the kind published: eight key heads of 128, its own head."""
    model = TransformerConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        qk_norm=family == "qwen3",
    )
    return TargetConfig(family, model, vocab, False, 40960, ())


TARGETS: Mapping[str, TargetConfig] = MappingProxyType(
    {
        "qwen3-4b": _target("qwen3", 2560, 9728, 36, 32, 151936),
        "qwen3-8b": _target("qwen3", 4096, 12288, 36, 32, 151936),
        "qwen3-32b": _target("qwen3", 5120, 25600, 64, 64, 151936),
        "llama-3.1-8b": _target("llama", 4096, 14336, 32, 32, 128256),
    }
)
"""Shapes of public targets, for figures without a checkpoint at hand; only sizes are meant."""


def draft_like(target: TargetConfig, layers: int = 5) -> DraftConfig:
    """A draft whose layers have the target's shape, with one tap per layer."""
    model = dataclasses.replace(target.model, num_layers=layers)
    depth = target.model.num_layers
    taps = tuple(1 + i * (depth - 4) // max(layers - 1, 1) for i in range(layers))
    return DraftConfig(model, taps, None, "<|MASK|>", depth, target.vocab_size, {})
