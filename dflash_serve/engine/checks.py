"""What is decided and refused before any weight is read."""

from __future__ import annotations

import dataclasses
import math

import torch

from dflash_serve.cache.paged import page_bytes
from dflash_serve.config import DTYPE_BYTES, EngineConfig
from dflash_serve.engine.vocabulary import Vocabulary, mask_token_id
from dflash_serve.errors import CapacityError, ConfigError, PairError
from dflash_serve.geometry import Geometry
from dflash_serve.log import get_logger
from dflash_serve.model_config import DraftConfig, TargetConfig
from dflash_serve.models.loader import Checkpoint
from dflash_serve.parallel.group import Group
from dflash_serve.parallel.shard import HeadShard

__all__ = [
    "PairSettings",
    "check_budget",
    "num_pages",
    "page_size_on",
    "resolve_device",
    "resolve_pair",
]

logger = get_logger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PAGE_SIZES = {"cpu": 16, "cuda": 64}


@dataclasses.dataclass(frozen=True)
class PairSettings:
    """A pair of checkpoints, understood.

    Attributes:
        valid_vocab: ids at or above it are never produced.
        taps: tapped target layers, ascending; empty for plain decoding.
        mask_id: the draft's mask token, or None for plain decoding.
    """

    target: TargetConfig
    draft: DraftConfig | None
    geometry: Geometry
    max_model_len: int
    valid_vocab: int
    taps: tuple[int, ...]
    mask_id: int | None


def resolve_device(config: EngineConfig, rank: int = 0) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a rank.

    Raises:
        ConfigError: CUDA asked for where there is none, fewer GPUs than ranks, or a dtype the
            device cannot do.
    """
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    kind = ("cuda" if gpus else "cpu") if config.device == "auto" else config.device
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if kind == "cpu" else "bfloat16"
    if kind == "cpu":
        return torch.device("cpu"), _DTYPES[dtype]
    if not gpus:
        raise ConfigError("device is 'cuda', but no CUDA device is visible; use device 'cpu'")
    # Under Ray each rank sees only its own GPU; elsewhere rank r takes the r-th.
    alone = config.executor == "ray" or config.share_gpu
    if not alone and gpus < config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but {gpus} GPUs are visible; "
            "use fewer ranks, or share_gpu for a test"
        )
    return torch.device("cuda", 0 if alone else rank), _DTYPES[dtype]


def page_size_on(config: EngineConfig, device: torch.device) -> int:
    """Tokens in one page: what the configuration says, or what suits the device."""
    return config.page_size or _PAGE_SIZES[device.type]


def resolve_pair(config: EngineConfig) -> PairSettings:
    """Read both configs and decide everything that follows from them.

    Raises:
        ConfigError: one of the two cannot be served.
        PairError: they do not belong together.
    """
    target = TargetConfig.load(config.target)
    size = config.tensor_parallel_size
    target.model.check_tensor_parallel(size, "target")
    vocabulary = Vocabulary.load(config.target)
    valid = _valid_vocab(config, target, vocabulary)
    max_len = config.max_model_len or target.max_positions
    if max_len > target.max_positions:
        raise ConfigError(
            f"max_model_len is {max_len}, but the target's context is {target.max_positions}"
        )
    if config.draft is None:
        return PairSettings(target, None, Geometry.plain(), max_len, valid, (), None)
    draft = DraftConfig.load(config.draft)
    geometry = draft.geometry(
        block_size=config.block_size, verify_length=config.fixed_verify_length
    )
    draft.model.check_tensor_parallel(size, "draft")
    _check_match(target, draft)
    return PairSettings(
        target=target,
        draft=draft,
        geometry=geometry,
        max_model_len=max_len,
        valid_vocab=valid,
        taps=_taps(config, config.draft, target, draft),
        mask_id=mask_token_id(draft, target.vocab_size, vocabulary),
    )


def _check_match(target: TargetConfig, draft: DraftConfig) -> None:
    """The draft uses the target's embedding, head and layers, so their shapes must agree."""
    pairs = [
        ("hidden_size", draft.model.hidden_size, target.model.hidden_size),
        ("vocab_size", draft.vocab_size, target.vocab_size),
        ("num_target_layers", draft.num_target_layers, target.model.num_layers),
    ]
    for name, of_draft, of_target in pairs:
        if of_draft is not None and of_draft != of_target:
            raise PairError(
                f"the draft's {name} is {of_draft}, the target has {of_target}; "
                "this draft was trained for another target"
            )


def _taps(
    config: EngineConfig, folder: str, target: TargetConfig, draft: DraftConfig
) -> tuple[int, ...]:
    if config.load_format == "dummy":
        if draft.taps is None:
            raise ConfigError(
                f"load_format is 'dummy', and {folder} has no target_layer_ids to size fc.weight "
                "by; list the tapped layers in dflash_config.target_layer_ids"
            )
        return draft.resolve_taps(len(draft.taps), target.model.num_layers)
    checkpoint = Checkpoint(folder)
    try:
        if "fc.weight" not in checkpoint.names:
            raise PairError(f"{folder} has no fc.weight; it is not a DFlash draft")
        shape = checkpoint.shape("fc.weight")
    finally:
        checkpoint.close()
    hidden = target.model.hidden_size
    taps, rest = divmod(shape[-1] if len(shape) == 2 else 0, hidden)
    if rest or not taps:
        raise PairError(
            f"fc.weight is {list(shape)}; its width must be a multiple of the target's "
            f"hidden_size, {hidden}"
        )
    return draft.resolve_taps(taps, target.model.num_layers)


def _valid_vocab(config: EngineConfig, target: TargetConfig, vocabulary: Vocabulary | None) -> int:
    if config.valid_vocab_size is not None:
        if not 0 < config.valid_vocab_size <= target.vocab_size:
            raise ConfigError(
                f"valid_vocab_size is {config.valid_vocab_size}; "
                f"allowed: 1 to the head's {target.vocab_size}"
            )
        return config.valid_vocab_size
    return target.vocab_size if vocabulary is None else min(vocabulary.size, target.vocab_size)


def num_pages(
    config: EngineConfig,
    settings: PairSettings,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    reserve: int = 0,
) -> tuple[int, int]:
    """Pages of the pool (the dummy page included) and bytes of one page, target and draft.

    Args:
        reserve: bytes that steps need beside weights and pages.

    Raises:
        CapacityError: the budget does not hold one request of full length; names the least
            budget that does.
    """
    pages, size = _own_pages(config, settings, group.rank, group.size, dtype, device, reserve)
    return _agree(pages, group, device), size


def check_budget(
    config: EngineConfig, settings: PairSettings, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a memory budget that is too small, where it does not depend on what is free.

    Raises:
        CapacityError: as `num_pages`.
    """
    if config.kv_cache_gib is not None or device.type == "cpu":
        _own_pages(config, settings, 0, config.tensor_parallel_size, dtype, device)


def _own_pages(
    config: EngineConfig,
    settings: PairSettings,
    rank: int,
    ranks: int,
    dtype: torch.dtype,
    device: torch.device,
    reserve: int = 0,
) -> tuple[int, int]:
    """`num_pages` as far as one rank can tell."""
    page_size = page_size_on(config, device)
    name = next(n for n, d in _DTYPES.items() if d is dtype)
    models = [settings.target.model, *([settings.draft.model] if settings.draft else [])]
    size = sum(
        page_bytes(
            m.num_layers,
            page_size,
            HeadShard.of(m, rank, ranks).num_kv_heads,
            m.head_dim,
            DTYPE_BYTES[name],
        )
        for m in models
    )
    one_request = -(-(settings.max_model_len + settings.geometry.lookahead) // page_size)
    least = one_request + 1
    budget = _budget(config, device, reserve)
    pages = config.max_running * one_request + 1 if budget is None else int(budget) // size
    if pages < least:
        raise CapacityError(
            f"{(budget or 0) / 2**30:.6g} GiB hold {max(pages, 0)} pages; one request of "
            f"{settings.max_model_len} tokens needs {least}; "
            f"{_way_out(config, device, budget or 0.0, least * size)} (or lower max_model_len)"
        )
    return min(pages, config.max_running * one_request + 1), size


def _budget(config: EngineConfig, device: torch.device, reserve: int) -> float | None:
    """Bytes for pages, or None for as many as the running requests can ever need."""
    if config.kv_cache_gib is not None:
        return config.kv_cache_gib * 2**30
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return free - (1.0 - config.gpu_memory_fraction) * total - reserve


def _way_out(config: EngineConfig, device: torch.device, budget: float, need: int) -> str:
    """What to set so that `need` bytes fit."""
    if config.kv_cache_gib is None and device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        fraction = config.gpu_memory_fraction + (need - budget) / total
        if fraction <= 1.0:
            return (
                f"the smallest gpu_memory_fraction that works is {math.ceil(fraction * 1e3) / 1e3}"
            )
        return "the GPU is too small for it; use eager, a smaller max_running or prefill_chunk"
    return f"the smallest kv_cache_gib that works is {_gib_for(need)}"


def _agree(pages: int, group: Group, device: torch.device) -> int:
    """The smallest count of all ranks: page ids must exist everywhere."""
    return -int(group.maximum(torch.tensor([-pages], device=device))[0])


def _gib_for(size: int) -> str:
    """A GiB figure, as short as it may be, that holds `size` bytes."""
    return f"{math.ceil(size / 2**30 * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".")
