"""A loaded target with its draft: one rank's parameters and pages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import closing
from zlib import crc32

import torch
from torch import Tensor

from dflash_serve.cache.paged import PagedKV
from dflash_serve.config import EngineConfig
from dflash_serve.engine.checks import (
    PairSettings,
    check_budget,
    num_pages,
    page_size_on,
    resolve_device,
    resolve_pair,
)
from dflash_serve.errors import CheckpointError, ConfigError
from dflash_serve.kernels.attention import check_heads, check_page_size
from dflash_serve.kernels.fp8 import COPY_DEPTH, check_device, quantize_weight, weight_nbytes
from dflash_serve.kernels.linear import set_row_invariant
from dflash_serve.log import get_logger
from dflash_serve.model_config import TransformerConfig
from dflash_serve.models.decoder import DenseDecoder
from dflash_serve.models.dflash import DFlashDraft
from dflash_serve.models.layers import Head
from dflash_serve.models.loader import Checkpoint, check, load, load_dummy
from dflash_serve.models.registry import target_class
from dflash_serve.models.weights import Piece, WeightPlan
from dflash_serve.parallel.group import Group, Single
from dflash_serve.parallel.shard import HeadShard, VocabShard

__all__ = ["Pair", "load_pair", "prepare"]

logger = get_logger(__name__)
_HEAD = "lm_head.weight"


@dataclasses.dataclass
class Pair:
    """Models and pages of one rank.

    Attributes:
        settings: everything that was decided about the pair before loading.
        draft, draft_kv: None for plain decoding.
        draft_head: a quantised copy of the target's head for the draft, where there is one.
        synthetic_acceptance: see `EngineConfig`.
    """

    settings: PairSettings
    group: Group
    device: torch.device
    target: DenseDecoder
    target_kv: PagedKV
    draft: DFlashDraft | None
    draft_kv: PagedKV | None
    page_size: int
    num_pages: int
    logits_rows: int
    weight_bytes: int
    kv_bytes: int
    load_seconds: float
    synthetic_acceptance: float | None = None
    draft_head: Head | None = None

    def inject(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the draft's context for T tokens; see `DFlashDraft.inject`."""
        if self.draft is not None and self.draft_kv is not None:
            self.draft.inject(taps, positions, slots, self.draft_kv)


def prepare(config: EngineConfig, rank: int = 0) -> tuple[PairSettings, torch.device, torch.dtype]:
    """Decide and refuse everything that can be known without reading a weight.

    Raises:
        ConfigError: as `load_pair`.
    """
    device, dtype = resolve_device(config, rank)
    settings = resolve_pair(config)
    if device.type == "cuda":
        _check_kernels(config, settings)
        if config.draft_quantization is not None:
            _check_quantization(settings, config.tensor_parallel_size, device)
    check_budget(config, settings, dtype, device)
    if config.load_format == "dummy":
        return settings, device, dtype
    _, target_plan, _, draft_plan = _declare(settings, Single(), dtype, torch.device("meta"))
    with closing(Checkpoint(config.target)) as checkpoint:
        check(checkpoint, target_plan, ignored=_ignored(settings))
    if config.draft is not None and draft_plan is not None:
        with closing(Checkpoint(config.draft)) as checkpoint:
            check(checkpoint, draft_plan)
    return settings, device, dtype


def _check_kernels(config: EngineConfig, settings: PairSettings) -> None:
    """Refuse shapes that the GPU's kernels do not cover."""
    check_page_size(page_size_on(config, torch.device("cuda")))
    for part in (settings.target, settings.draft):
        if part is not None:
            model = part.model
            check_heads(model.num_heads, model.num_kv_heads, model.head_dim)


def _check_quantization(settings: PairSettings, size: int, device: torch.device) -> None:
    """Refuse a GPU or a draft that 8-bit products are not for."""
    if settings.draft is None:
        return
    check_device(device)
    model, hidden = settings.draft.model, settings.target.model.hidden_size
    widths = {
        "hidden_size": model.hidden_size,
        "attention width of a rank": model.num_heads * model.head_dim // size,
        "intermediate_size of a rank": model.intermediate_size // size,
        "width of the tapped layers": len(settings.taps) * hidden,
    }
    for name, width in widths.items():
        if width % COPY_DEPTH:
            raise ConfigError(
                f"draft_quantization is 'fp8', and the draft's {name} is {width}; on a GPU it must "
                f"be a multiple of {COPY_DEPTH}: leave draft_quantization out"
            )


@torch.inference_mode()
def load_pair(
    config: EngineConfig,
    group: Group,
    progress: Callable[[str, int, int], None] | None = None,
    reserve: Callable[[Pair], int] | None = None,
) -> Pair:
    """Check, load and allocate one rank's part.

    Args:
        progress: called with ("target" or "draft", tensors read, tensors in all).
        reserve: tells how many bytes the steps of a pair need beside weights and pages; it gets
            the pair with a pool of the dummy page alone.

    Raises:
        ConfigError: whatever about the settings or checkpoints cannot be served; everything that
            can be known without reading weights is checked before any is read.
    """
    began = time.monotonic()
    settings, device, dtype = prepare(config, group.rank)
    if device.type == "cuda":
        set_row_invariant(config.row_invariant)
    target, target_plan, draft, draft_plan = _declare(settings, group, dtype, device)
    if config.load_format == "dummy":
        logger.warning("the weights are random (load_format 'dummy'); the output means nothing")
    _fill(config, config.target, target_plan, _ignored(settings), progress, "target")
    if settings.target.tied_head and config.load_format != "dummy":
        _check_tied(config.target, target)
    draft_bytes, draft_head = 0, None
    if config.draft is not None and draft is not None and draft_plan is not None:
        _fill(config, config.draft, draft_plan, (), progress, "draft")
        draft_plan.pieces.clear()  # or they would hold what is quantised now
        draft_head = _finish_draft(config, draft, target.head)
        draft_bytes = draft.weight_bytes + (weight_nbytes(draft_head.weight) if draft_head else 0)
    pair = Pair(
        settings=settings,
        group=group,
        device=device,
        target=target,
        target_kv=_pages(settings.target.model, 1, config, group, dtype, device),
        draft=draft,
        draft_kv=None
        if settings.draft is None
        else _pages(settings.draft.model, 1, config, group, dtype, device),
        page_size=page_size_on(config, device),
        num_pages=1,
        logits_rows=config.logits_rows,
        weight_bytes=target_plan.bytes + draft_bytes,
        kv_bytes=0,
        load_seconds=0.0,
        synthetic_acceptance=config.synthetic_acceptance,
        draft_head=draft_head,
    )
    extra = 0 if reserve is None else reserve(pair)
    pages, page_size_bytes = num_pages(config, settings, group, dtype, device, extra)
    pair.target_kv = _pages(settings.target.model, pages, config, group, dtype, device)
    if settings.draft is not None:
        pair.draft_kv = _pages(settings.draft.model, pages, config, group, dtype, device)
    pair.num_pages, pair.kv_bytes = pages, pages * page_size_bytes
    pair.load_seconds = time.monotonic() - began
    return pair


def _finish_draft(config: EngineConfig, draft: DFlashDraft, head: Head) -> Head | None:
    """Prepare loaded weights as configured; returns a copy of the head where the draft has one."""
    draft.finish_loading()
    if config.draft_quantization is None:
        return None
    draft.quantize()
    assert isinstance(head.weight, Tensor)
    return Head(quantize_weight(head.weight), head.shard)


def _declare(
    settings: PairSettings, group: Group, dtype: torch.dtype, device: torch.device
) -> tuple[DenseDecoder, WeightPlan, DFlashDraft | None, WeightPlan | None]:
    """Both models with their parameters still to be filled."""
    length = settings.max_model_len + 2 * settings.geometry.block
    vocab = settings.target.vocab_size
    shard = VocabShard.of(vocab, settings.valid_vocab, group.rank, group.size)
    plan = WeightPlan(group.rank, group.size, dtype, device)
    family = target_class(settings.target.family)
    target = family(settings.target, plan, group, shard, settings.taps, length)
    if settings.draft is None:
        return target, plan, None, None
    draft_plan = WeightPlan(group.rank, group.size, dtype, device)
    hidden = settings.target.model.hidden_size
    draft = DFlashDraft(settings.draft, draft_plan, group, len(settings.taps), hidden, length)
    return target, plan, draft, draft_plan


def _ignored(settings: PairSettings) -> tuple[str, ...]:
    return (_HEAD,) if settings.target.tied_head else ()


def _check_tied(folder: str, target: DenseDecoder) -> None:
    """A head stored beside a tied embedding must be that embedding."""
    weight, shard = target.embed.weight, target.embed.shard
    with closing(Checkpoint(folder)) as checkpoint:
        if _HEAD not in checkpoint.names:
            return
        shape = (target.config.vocab_size, weight.shape[1])
        same = checkpoint.shape(_HEAD) == shape
        if same:
            rows = slice(shard.first, shard.first + shard.rows)
            piece = Piece(_HEAD, shape, (rows, slice(0, shape[1])), slice(0, shard.rows))
            same = torch.equal(checkpoint.read(piece).to(weight), weight)
    if not same:
        raise CheckpointError(
            f"{folder} says tie_word_embeddings: true, but its {_HEAD} differs from "
            "embed_tokens.weight; say false to use the stored head, or drop the tensor"
        )


def _fill(
    config: EngineConfig,
    folder: str,
    plan: WeightPlan,
    ignored: tuple[str, ...],
    progress: Callable[[str, int, int], None] | None,
    what: str,
) -> None:
    report = None if progress is None else lambda done, of: progress(what, done, of)
    if config.load_format == "dummy":
        # A target and a draft have layers of the same names, which must not be the same layers.
        load_dummy(plan, seed=crc32(what.encode()), progress=report)
        return
    with closing(Checkpoint(folder)) as checkpoint:
        load(checkpoint, plan, ignored=ignored, progress=report)


def _pages(
    model: TransformerConfig,
    pages: int,
    config: EngineConfig,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedKV:
    return PagedKV(
        model.num_layers,
        pages,
        page_size_on(config, device),
        HeadShard.of(model, group.rank, group.size).num_kv_heads,
        model.head_dim,
        dtype,
        device,
    )
