"""The one engine configuration: frozen, validated once, passed down.

The class is a plain dataclass so that everything below `serve/` works without pydantic;
`__pydantic_config__` makes pydantic refuse unknown keys where a deployment file embeds it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

from dflash_serve.errors import ConfigError

__all__ = ["DTYPE_BYTES", "EngineConfig"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16"]
ExecutorName = Literal["inproc", "mp", "ray"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["fp8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to start.

    Attributes:
        target: folder of the target checkpoint (config.json, *.safetensors, tokenizer files).
        draft: folder of the DFlash draft, or None for plain decoding.
        tensor_parallel_size: number of ranks; must divide the attention heads of both models.
        device: "cpu", "cuda", or "auto" (cuda when there is a GPU).
        dtype: "float32", "bfloat16", or "auto" (float32 on CPU, bfloat16 on CUDA).
        load_format: "auto" reads the checkpoints' tensors; "dummy" leaves them unread (there need
            not be any) and fills the parameters with random values, for benchmarks: a step costs
            what it costs with the real ones, the output is noise and few drafts are accepted.
        executor: who runs the ranks: this process ("inproc", tp 1 only), child processes
            ("mp"), or Ray actors ("ray").
        max_model_len: longest prompt + output in tokens; None takes the target's own limit.
        max_running: requests decoded together.
        page_size: tokens in one KV page; None takes 64 on CUDA, the keys that attention reads in
            one piece, and 16 elsewhere, where smaller pages waste less.
        kv_cache_gib: memory for the KV pages of target and draft together, GiB per rank;
            None sizes the pool for `max_running` requests of `max_model_len` tokens on CPU,
            and takes `gpu_memory_fraction` of the device on CUDA.
        gpu_memory_fraction: share of the GPU's memory the engine may use.
        prefill_chunk: most prompt tokens computed in one step.
        pack_prompts: compute the prompts of a step in one pass in place of one after the other: up
            to 1.5 times as fast, and a prompt's bits depend on its company. Left out: only where
            `row_invariant` is off.
            How the numbers of a prompt are rounded then depends on those computed with it, however
            short it is: in bfloat16 the bits of its keys and values do.
        prefix_cache: keep finished pages and reuse them for prompts with the same beginning.
        verify_length: rows verified per step (g); None verifies the draft's whole block, "auto"
            lets rank 0 choose before every step from timings and running acceptance.
        block_size: overrides the draft checkpoint's block size.
        draft_scale: factor on the draft's logits before the noise is added; it cannot change
            the output, only how often the draft agrees with the target. "auto" fits it to the
            acceptance of requests with a temperature.
        draft_quantization: "fp8" keeps the draft's weights, and a copy of the target's head for it,
            in 8-bit floating point and multiplies in it; None computes the draft in `dtype`. It
            cannot change the output, only how often the draft agrees with the target. On CUDA it
            needs compute capability 8.9.
        synthetic_acceptance: benchmarks only: each next proposal counts as accepted with this
            probability, whatever the target says, so the output is wrong on purpose.
        row_invariant: on CUDA, compute a token's logits the same way in every batch of up to 128
            rows, so that bfloat16 output too is bit for bit that of plain decoding; False lets
            the library take over where it is faster.
        valid_vocab_size: ids at or above it are never produced; None takes the tokenizer's
            size where there is a tokenizer, else the head's.
        logits_rows: most rows sent through the language-model head at once.
        eager: on CUDA, run every step kernel by kernel instead of as one captured graph.
        overlap: plan and launch a step before the results of the one ahead of it are read; None
            does so on CUDA, where the host would otherwise keep the device waiting.
        share_gpu: let several ranks use one GPU (tests only: gloo collectives, eager).
        threads: CPU threads per rank; None divides the cores among the ranks.
        hang_timeout_s: seconds without a completed step, while work is pending, after which
            the engine counts as stalled.
        start_timeout_s: seconds the ranks may take to load and report ready.
        record_dir: folder for the flight records of engines that end badly; None takes one of
            this user's in the system's temporary folder.
    """

    target: str
    draft: str | None = None
    tensor_parallel_size: int = 1
    device: Device = "auto"
    dtype: DType = "auto"
    load_format: LoadFormat = "auto"
    executor: ExecutorName = "inproc"
    max_model_len: int | None = None
    max_running: int = 8
    page_size: int | None = None
    kv_cache_gib: float | None = None
    gpu_memory_fraction: float = 0.9
    prefill_chunk: int = 1024
    pack_prompts: bool | None = None
    prefix_cache: bool = True
    verify_length: int | Literal["auto"] | None = None
    block_size: int | None = None
    draft_scale: float | Literal["auto"] = 1.0
    draft_quantization: Quantization | None = None
    synthetic_acceptance: float | None = None
    row_invariant: bool = True
    valid_vocab_size: int | None = None
    logits_rows: int = 1024
    eager: bool = False
    overlap: bool | None = None
    share_gpu: bool = False
    threads: int | None = None
    hang_timeout_s: float = 30.0
    start_timeout_s: float = 600.0
    record_dir: str | None = None

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        positive = ("tensor_parallel_size", "max_running", "prefill_chunk")
        optional = (
            *("max_model_len", "verify_length", "block_size", "page_size", "threads"),
            "valid_vocab_size",
        )
        given = [name for name in optional if getattr(self, name) not in (None, "auto")]
        for name in (*positive, "logits_rows", *given):
            _require_positive(name, getattr(self, name), whole=True)
        if self.kv_cache_gib is not None:
            _require_positive("kv_cache_gib", self.kv_cache_gib)
        for name in ("draft_scale", "hang_timeout_s", "start_timeout_s"):
            if (value := getattr(self, name)) != "auto":
                _require_positive(name, value)
        _require_choice("device", self.device, ("auto", "cpu", "cuda"))
        _require_choice("dtype", self.dtype, ("auto", *DTYPE_BYTES))
        _require_choice("load_format", self.load_format, ("auto", "dummy"))
        if self.draft_quantization is not None:
            _require_choice("draft_quantization", self.draft_quantization, ("fp8",))
        _require_choice("executor", self.executor, ("inproc", "mp", "ray"))
        if self.synthetic_acceptance is not None and not 0.0 <= self.synthetic_acceptance <= 1.0:
            raise ConfigError(
                f"synthetic_acceptance is {self.synthetic_acceptance}; allowed: 0 to 1, or None"
            )
        if not 0.0 < self.gpu_memory_fraction <= 1.0:
            raise ConfigError(
                f"gpu_memory_fraction is {self.gpu_memory_fraction}; allowed: above 0, at most 1"
            )
        if self.executor == "inproc" and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"executor 'inproc' runs one rank, but tensor_parallel_size is "
                f"{self.tensor_parallel_size}; use executor 'mp' or 'ray'"
            )
        if self.draft is None and self.verify_length not in (None, 1):
            raise ConfigError(
                f"verify_length is {self.verify_length!r} but there is no draft; "
                "give a draft or leave verify_length out"
            )

    @property
    def fixed_verify_length(self) -> int | None:
        """g where it is the same in every step; None takes the draft's block as the largest."""
        return None if self.verify_length == "auto" else self.verify_length


def _require_positive(name: str, value: float, *, whole: bool = False) -> None:
    kind = int if whole else (int, float)
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not (fits and 0 < value < math.inf):
        raise ConfigError(
            f"{name} is {value!r}; it must be a positive {'integer' if whole else 'number'}"
        )


def _require_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
