"""Every number that shapes the data, the draft and its training."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SEED = 20261129
MASK_TOKEN_ID = 16
"""``<empty_output>``: a special token that no prompt and no answer of the target uses."""


@dataclass(frozen=True)
class DataSettings:
    """How conversations are made out of the target itself."""

    slots: int = 4096
    max_length: int = 448
    max_user_tokens: int = 270
    max_answer_tokens: int = 144
    min_user_tokens: int = 4
    min_answer_tokens: int = 16
    user_temperature: float = 1.0
    user_min_p: float = 0.02
    keep_looping: float = 0.3
    held_out_gram: int = 13
    """A prompt that shares so many tokens in a row with an evaluation prompt is dropped."""
    kind_shares: tuple[float, float, float] = (0.42, 0.33, 0.25)
    """Shares of chat, code and maths prompts among the openings handed out."""


@dataclass(frozen=True)
class DraftSettings:
    """Shape of the draft and what it reads from the target."""

    layers: int = 3
    intermediate_size: int = 1536
    block_size: int = 8
    target_layer_ids: tuple[int, ...] = (1, 8, 14, 20, 27)
    init_from_target: bool = True


@dataclass(frozen=True)
class TrainSettings:
    """Optimisation of the draft."""

    conversations: int = 64
    anchors: int = 64
    lengths: tuple[int, ...] = (192, 256, 320, 448)
    optimizer: str = "muon"
    learning_rate: float = 0.02
    adam_learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.02
    gamma: float = 4.0
    reach: float = 1.0
    """0: weights exp(-(k-1)/gamma); 1: weights = probability that row k is reached at all."""
    draft: DraftSettings = field(default_factory=DraftSettings)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-ready description."""
        return asdict(self)
