"""`check TARGET DRAFT`: what was understood of a pair of checkpoints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dflash_serve.cache.paged import page_bytes
from dflash_serve.config import DTYPE_BYTES, EngineConfig
from dflash_serve.engine.checks import PairSettings
from dflash_serve.engine.pair import prepare
from dflash_serve.model_config import TransformerConfig

__all__ = ["describe_pair"]


def describe_pair(config: EngineConfig, console: Console) -> None:
    """Check configs and tensor shapes, reading no weight, and print what was understood.

    Raises:
        ConfigError: whatever would be refused at load.
    """
    settings, _, _ = prepare(config)
    table = Table(title="checkpoint pair", title_justify="left", show_header=False)
    for name, value in _facts(config, settings):
        table.add_row(name, value)
    console.print(table)


def _facts(config: EngineConfig, settings: PairSettings) -> list[tuple[str, str]]:
    target, draft, geometry = settings.target, settings.draft, settings.geometry
    facts = [
        ("target", f"{target.family}, {_shape(target.model)}, vocabulary {target.vocab_size}"),
        ("context", f"{settings.max_model_len} tokens"),
        ("head", "tied to the embedding" if target.tied_head else "its own"),
        ("ids produced", f"below {settings.valid_vocab}"),
        ("end of sequence", ", ".join(map(str, target.eos_token_ids)) or "none"),
        ("KV per token", f"target {_kv_kib(target.model):.1f} KiB (bf16)"),
    ]
    if draft is None:
        return facts
    return [
        *facts,
        ("draft", f"DFlash fill-in, {_shape(draft.model)}"),
        ("taps", ", ".join(map(str, settings.taps))),
        ("mask token", f"id {settings.mask_id}"),
        (
            "rows",
            f"block {geometry.block}: {geometry.query_rows} queries, {geometry.proposals} "
            f"proposals, {geometry.verify_rows} verified, lookahead {geometry.lookahead}",
        ),
        ("draft KV per token", f"{_kv_kib(draft.model):.1f} KiB (bf16)"),
    ]


def _shape(model: TransformerConfig) -> str:
    return (
        f"{model.num_layers} layers of {model.hidden_size}, "
        f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    )


def _kv_kib(model: TransformerConfig) -> float:
    bytes_ = DTYPE_BYTES["bfloat16"]
    return page_bytes(model.num_layers, 1, model.num_kv_heads, model.head_dim, bytes_) / 1024
