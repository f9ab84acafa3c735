"""What config.json of a target or a draft says, checked (no torch).

Field meanings and errors follow the public DFlash format: nested `dflash_config` values win over
top-level ones. Whatever cannot be served is refused here, by name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_serve.errors import CheckpointError, ConfigError, PairError
from dflash_serve.geometry import Geometry

__all__ = ["DraftConfig", "RopeConfig", "TargetConfig", "TransformerConfig", "read_config"]

TARGET_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
DRAFT_ARCHITECTURES = ("DFlashDraftModel",)
_MIN_DEFAULT_TAP_DEPTH = 4


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and, for "llama3" scaling, its four numbers."""

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shape of a dense decoder stack; shared by targets and drafts."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool

    def check_tensor_parallel(self, size: int, what: str) -> None:
        """Heads and the MLP must divide evenly; key heads may also replicate evenly.

        Raises:
            ConfigError: names the head counts and the widths that work.
        """
        if _divides(self, size):
            return
        works = [n for n in range(1, self.num_heads + 1) if _divides(self, n)]
        raise ConfigError(
            f"tensor_parallel_size is {size}, but the {what} has {self.num_heads} attention heads, "
            f"{self.num_kv_heads} key/value heads and intermediate_size {self.intermediate_size}; "
            f"possible sizes: {works}"
        )


def _divides(config: TransformerConfig, size: int) -> bool:
    kv = config.num_kv_heads
    heads = config.num_heads % size == 0 and (kv % size == 0 or size % kv == 0)
    return heads and config.intermediate_size % size == 0


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A target checkpoint."""

    family: str
    model: TransformerConfig
    vocab_size: int
    tied_head: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: str | Path) -> TargetConfig:
        """Read a target's config.json and generation_config.json.

        Raises:
            CheckpointError: no readable config.
            ConfigError: a family or option that is not supported.
        """
        fields = read_config(folder)
        names = fields.get("architectures") or []
        family = next((TARGET_ARCHITECTURES[n] for n in names if n in TARGET_ARCHITECTURES), None)
        if family is None:
            raise ConfigError(
                f"target architecture is {names}; supported: {sorted(TARGET_ARCHITECTURES)}"
            )
        _refuse_options(fields, "target")
        return cls(
            family=family,
            model=_transformer(fields, qk_norm=family == "qwen3"),
            vocab_size=_positive(fields, "vocab_size"),
            tied_head=bool(fields.get("tie_word_embeddings", False)),
            max_positions=_positive(fields, "max_position_embeddings"),
            eos_token_ids=_eos_ids(Path(folder), fields),
        )


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """A DFlash draft checkpoint.

    Attributes:
        taps: target layer ids whose output is read, or None when the config gives none.
        mask_token_id: None when the config leaves it to the tokenizer.
        fields: the raw fields, `dflash_config` laid over the top level; for Geometry only.
    """

    model: TransformerConfig
    taps: tuple[int, ...] | None
    mask_token_id: int | None
    mask_token: str
    num_target_layers: int | None
    vocab_size: int | None
    fields: Mapping[str, Any]

    @classmethod
    def load(cls, folder: str | Path) -> DraftConfig:
        """Read a draft's config.json.

        Raises:
            CheckpointError: no readable config.
            ConfigError: a draft kind or option that is not supported.
        """
        raw = read_config(folder)
        if "speculators_model_type" in raw:
            raise ConfigError(
                "the draft is in speculators format; supported: the z-lab DFlash format"
            )
        fields = {**raw, **_mapping(raw, "dflash_config")}
        names = fields.get("architectures") or []
        if not any(name in DRAFT_ARCHITECTURES for name in names):
            raise ConfigError(
                f"draft architecture is {names}; supported: {list(DRAFT_ARCHITECTURES)}"
            )
        _refuse_options(fields, "draft")
        _refuse_draft_options(fields)
        return cls(
            model=_transformer(fields, qk_norm=True),
            taps=_taps(fields),
            mask_token_id=_mask_id(fields),
            mask_token=_mask_token(fields),
            num_target_layers=fields.get("num_target_layers"),
            vocab_size=fields.get("vocab_size"),
            fields=fields,
        )

    def geometry(self, *, block_size: int | None, verify_length: int | None) -> Geometry:
        """Row counts of a decode step with this draft; see `Geometry.from_draft`."""
        return Geometry.from_draft(self.fields, block_size=block_size, verify_length=verify_length)

    def resolve_taps(self, num_taps: int, target_layers: int) -> tuple[int, ...]:
        """The tapped layers, ascending, checked against the target.

        Args:
            num_taps: taps that the width of `fc.weight` holds.
            target_layers: depth of the target.

        Raises:
            ConfigError: a list that is out of range, or none where none can be derived.
            PairError: a list whose length differs from `num_taps`.
        """
        taps = self.taps
        if taps is None:
            if num_taps != self.model.num_layers:
                raise ConfigError(
                    f"the draft config has no target_layer_ids, and fc.weight holds {num_taps} "
                    f"taps for {self.model.num_layers} draft layers; list the tapped layers in "
                    "dflash_config.target_layer_ids"
                )
            taps = default_taps(target_layers, num_taps)
        bad = [t for t in taps if not 0 <= t < target_layers]
        if bad:
            raise ConfigError(
                f"target_layer_ids holds {bad}; the target has {target_layers} layers, "
                f"allowed: 0 to {target_layers - 1}"
            )
        if len(taps) != num_taps:
            raise PairError(
                f"target_layer_ids lists {len(taps)} layers, but fc.weight is {num_taps} taps wide"
            )
        return taps


def default_taps(target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Layers tapped when a config lists none: evenly spread from 1 to depth − 3."""
    if target_layers < _MIN_DEFAULT_TAP_DEPTH:
        raise ConfigError(
            f"the draft config has no target_layer_ids and the target has {target_layers} layers; "
            f"the default needs at least {_MIN_DEFAULT_TAP_DEPTH}; list the tapped layers"
        )
    if num_taps == 1:
        return (target_layers // 2,)
    low, high = 1, target_layers - 3
    taps = tuple(round(low + i * (high - low) / (num_taps - 1)) for i in range(num_taps))
    if len(set(taps)) < num_taps:
        raise ConfigError(
            f"the draft config has no target_layer_ids, and {num_taps} default ones of "
            f"{target_layers} layers would repeat ({list(taps)}); list the tapped layers"
        )
    return taps


def read_config(folder: str | Path) -> dict[str, Any]:
    """Parse config.json of a checkpoint folder.

    Raises:
        CheckpointError: no such folder or file, or not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist; give the folder of a checkpoint in Hugging Face format"
        )
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds a {type(fields).__name__}; it must be an object")
    return fields


# -- pieces of a config -------------------------------------------------------------------------


def _transformer(fields: Mapping[str, Any], *, qk_norm: bool) -> TransformerConfig:
    heads = _positive(fields, "num_attention_heads")
    hidden = _positive(fields, "hidden_size")
    kv_heads = fields.get("num_key_value_heads")
    head_dim = fields.get("head_dim")
    config = TransformerConfig(
        hidden_size=hidden,
        intermediate_size=_positive(fields, "intermediate_size"),
        num_layers=_positive(fields, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else _positive(fields, "num_key_value_heads"),
        head_dim=hidden // heads if head_dim is None else _positive(fields, "head_dim"),
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=_rope(fields),
        qk_norm=qk_norm,
    )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"num_attention_heads is {config.num_heads}, not a multiple of "
            f"num_key_value_heads, {config.num_kv_heads}"
        )
    return config


def _rope(fields: Mapping[str, Any]) -> RopeConfig:
    nested = _mapping(fields, "rope_parameters")
    scaling = {**nested, **_mapping(fields, "rope_scaling")}
    theta = _number({"rope_theta": 10000.0, **nested, **_given(fields, "rope_theta")}, "rope_theta")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise ConfigError(f"rope scaling type is {kind!r}; supported: 'default', 'llama3'")
    return RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=_number(scaling, "factor"),
        low_freq_factor=_number(scaling, "low_freq_factor"),
        high_freq_factor=_number(scaling, "high_freq_factor"),
        original_max_position=int(_number(scaling, "original_max_position_embeddings")),
    )


def _refuse_options(fields: Mapping[str, Any], what: str) -> None:
    """Options of a dense decoder that no code path here honours."""
    for name in ("attention_bias", "mlp_bias", "use_gemma_norm", "quantization_config"):
        if fields.get(name):
            raise ConfigError(f"the {what} sets {name}: {fields[name]!r}, which is not supported")
    if fields.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"the {what}'s hidden_act is {fields['hidden_act']!r}; supported: 'silu'")
    kinds = set(fields.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"the {what}'s layer_types holds {sorted(kinds)}; supported: full_attention only"
        )
    if fields.get("use_sliding_window"):
        raise ConfigError(f"the {what} sets use_sliding_window: true, which is not supported")
    partial = fields.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"the {what}'s partial_rotary_factor is {partial}; supported: 1.0")


def _refuse_draft_options(fields: Mapping[str, Any]) -> None:
    """Draft options of other DFlash variants, refused by name."""
    off: dict[str, tuple[Any, ...]] = {
        "is_causal": (None, False),
        "causal": (None, False),
        "use_swa": (None, False),
        "attention_sink_bias": (None, False),
        "attention_value_scale": (None, 1, 1.0),
        "input_embedding_scale": (None, 1, 1.0),
        "output_multiplier": (None, 1, 1.0),
        "conv_kernel_size": (None, 0),
        "selector_rank": (None, 0),
        "projector_type": (None,),
        "use_aux_hidden_state": (None, True),
        "rope_is_neox_style": (None, True),
        "is_neox_style": (None, True),
        "has_lm_head": (None, False),
        "has_embed_tokens": (None, False),
        "draft_vocab_size": (None,),
    }
    for name, allowed in off.items():
        if fields.get(name) not in allowed:
            raise ConfigError(
                f"the draft sets {name}: {fields[name]!r}; supported: {allowed[-1]!r} or absent"
            )


def _taps(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    taps = fields.get("target_layer_ids")
    if taps is None:
        return None
    integers = isinstance(taps, list) and all(type(t) is int for t in taps)
    if not integers or not taps:
        raise ConfigError(f"target_layer_ids is {taps!r}; it must be a non-empty list of integers")
    if len(set(taps)) != len(taps):
        raise ConfigError(f"target_layer_ids is {taps}; a layer may be listed once")
    if sorted(taps) != taps:
        # The columns of fc follow the list in some engines and the layers in others.
        raise ConfigError(f"target_layer_ids is {taps}; supported: ascending order only")
    return tuple(taps)


def _mask_id(fields: Mapping[str, Any]) -> int | None:
    mask_id = fields.get("mask_token_id")
    if mask_id is not None and (type(mask_id) is not int or mask_id < 0):
        raise ConfigError(f"mask_token_id is {mask_id!r}; it must be a non-negative integer")
    return mask_id


def _mask_token(fields: Mapping[str, Any]) -> str:
    token = fields.get("mask_token", "<|MASK|>")
    if not isinstance(token, str) or not token:
        raise ConfigError(f"mask_token is {token!r}; it must be a non-empty string")
    return token


def _eos_ids(folder: Path, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json where present, else config.json."""
    eos = fields.get("eos_token_id")
    path = folder / "generation_config.json"
    if path.is_file():
        given = _read_object(path).get("eos_token_id")
        eos = eos if given is None else given
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"eos_token_id is {eos!r}; it must be an id or a list of ids")
    return tuple(ids)


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; it must be an object")
    return value


def _given(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: fields[name]} if name in fields else {}


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} is {value!r}; it must be a positive number")
    return float(value)


def _positive(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a positive integer")
    return value
