"""Running one model of a loaded pair by hand, page table included."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dflash_serve.config import EngineConfig
from dflash_serve.engine.pair import Pair, load_pair
from dflash_serve.kernels.block import page_slots
from dflash_serve.models.layers import RowBatch
from dflash_serve.parallel.group import Single

__all__ = ["load_reference", "load_target", "row_batch", "run_target"]

PAGE = 8


def load_target(folder: str, draft: str | None = None, **fields: object) -> Pair:
    """A target (and draft) on one CPU rank, float32, with few tokens per page."""
    settings = {"device": "cpu", "page_size": PAGE, "max_model_len": 128, "max_running": 2} | fields
    return load_pair(EngineConfig(target=folder, draft=draft, **settings), Single())  # type: ignore[arg-type]


def load_reference(folder: str) -> PreTrainedModel:
    """The same checkpoint in transformers, float32, plain attention."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def row_batch(start: list[int], rows: int, table: Tensor, page_size: int = PAGE) -> RowBatch:
    """Where `rows` new tokens of each request stand."""
    begin = torch.tensor(start)
    positions = begin[:, None] + torch.arange(rows)
    return RowBatch(
        start=begin,
        positions=positions.flatten(),
        slots=page_slots(table, positions, page_size).flatten(),
        page_table=table,
        rows=rows,
        longest=max(start) + rows,
    )


@torch.inference_mode()
def run_target(pair: Pair, ids: Tensor, chunk: int) -> tuple[Tensor, Tensor | None]:
    """Logits [B, S, vocabulary] and taps [B, S, taps · H] of [B, S] ids, `chunk` at a time."""
    batch, length = ids.shape
    per_request = -(-length // PAGE)
    # Pages of the two requests alternate, so that neighbours in the table are not in memory.
    table = 1 + torch.arange(batch)[:, None] + batch * torch.arange(per_request)
    logits, taps = [], []
    for first in range(0, length, chunk):
        part = ids[:, first : first + chunk]
        rows = row_batch([first] * batch, part.shape[1], table)
        hidden, tapped = pair.target(part.flatten(), rows, pair.target_kv)
        logits.append(pair.target.head.apply(hidden).view(batch, part.shape[1], -1))
        if tapped is not None:
            taps.append(tapped.view(batch, part.shape[1], -1))
    return torch.cat(logits, dim=1), torch.cat(taps, dim=1) if taps else None
