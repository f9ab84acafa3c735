"""Command line: serve · generate · bench · roofline · check · replay · trace."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress

from dflash_serve import __version__
from dflash_serve.bench.demo import DEMO_DRAFT, DEMO_TARGET
from dflash_serve.config import EngineConfig
from dflash_serve.errors import ConfigError, DFlashError
from dflash_serve.log import configure

__all__ = ["DEMO_DRAFT", "DEMO_TARGET", "app", "main"]

_ROOT = Path(__file__).resolve().parents[1]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
bench = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(bench, name="bench")

P = ParamSpec("P")
R = TypeVar("R")
_out = Console()
_err = Console(stderr=True)

Target = Annotated[str, typer.Option(help="Folder of the target checkpoint.")]
Draft = Annotated[str, typer.Option(help="Folder of the draft; 'none' for plain decoding.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option()]
DType = Annotated[Literal["auto", "float32", "bfloat16"], typer.Option()]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")]
AutoLength = Annotated[
    str | None,
    typer.Option(help="Rows verified per step, or 'auto'; the whole block if left out."),
]
VerifyLength = Annotated[
    int | None, typer.Option(min=1, help="Rows verified per step; the whole block if left out.")
]
BlockSize = Annotated[
    int | None, typer.Option(min=1, help="In place of the draft checkpoint's block size.")
]
DraftQuantization = Annotated[
    Literal["fp8"] | None, typer.Option(help="Compute the draft in 8 bits; the output stays.")
]

Batches = Annotated[
    str | None, typer.Option(help="Batch sizes, by commas: 1,8; 1,8,32,128 on dummy weights.")
]
Lengths = Annotated[
    str | None, typer.Option(help="Verify lengths, by commas: 2,3,4,6,8; 16 on dummy weights.")
]


def _reported(command: Callable[P, R]) -> Callable[P, R]:
    """Turn our errors into one line and exit code 2."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except DFlashError as error:
            _err.print(f"error: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(2) from error

    return wrapper


def _config(target: str, draft: str, tp: int, **fields: Any) -> EngineConfig:
    return EngineConfig(
        target=str(Path(target).expanduser()),
        draft=None if draft == "none" else str(Path(draft).expanduser()),
        tensor_parallel_size=tp,
        executor="inproc" if tp == 1 else "mp",
        **fields,
    )


def _numbers(name: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--{name} is {text!r}; give numbers separated by commas") from error
    if min(values) <= 0:
        raise ConfigError(f"--{name} is {text!r}; every number must be positive")
    return values


def _length(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ConfigError(f"--verify-length is {text!r}; give a whole number or 'auto'")
    return int(text)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "WARNING",
) -> None:
    """LLM serving with DFlash speculative decoding."""
    if version:
        _out.print(__version__)
        raise typer.Exit
    configure(log_level)


@app.command()
@_reported
def serve(
    config: Annotated[Path, typer.Argument(help="A Ray Serve config file.")] = (
        _ROOT / "deployments" / "demo.yaml"
    ),
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="In place of the file's.")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; the next free one if taken.")] = None,
) -> None:
    """Start Ray and a deployment file's application on this machine, until Ctrl-C."""
    from dflash_serve.serve.local import serve_locally

    serve_locally(config, tp=tp, port=port)


@app.command("generate")
@_reported
def generate_command(
    prompt: Annotated[str, typer.Argument(help="The user's turn, or the raw text with --raw.")],
    target: Target = str(DEMO_TARGET),
    draft: Draft = str(DEMO_DRAFT),
    raw: Annotated[bool, typer.Option("--raw", help="Without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option()] = 0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    tp: Tp = 1,
    device: Device = "auto",
    dtype: DType = "auto",
    verify_length: AutoLength = None,
    block_size: BlockSize = None,
    draft_quantization: DraftQuantization = None,
) -> None:
    """Answer one prompt without Ray; prints tokens per step and the same without the draft."""
    from dflash_serve.bench.generate import generate
    from dflash_serve.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    params.validate()
    config = _config(
        target,
        draft,
        tp,
        device=device,
        dtype=dtype,
        verify_length=_length(verify_length),
        block_size=block_size,
        draft_quantization=draft_quantization,
        max_running=1,
    )
    generate(config, prompt, params, chat=not raw, console=_out)


@bench.command("step")
@_reported
def bench_step_command(
    target: Target = str(DEMO_TARGET),
    draft: Draft = str(DEMO_DRAFT),
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines; a few of our own if left out.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts to use.")] = 16,
    batch: Batches = None,
    verify: Lengths = None,
    context: Annotated[str, typer.Option(help="Dummy weights only.")] = "1024,8192,32768",
    accept: Annotated[
        str, typer.Option(help="Dummy weights only: tokens per step to model tokens/s with.")
    ] = "3,5,6.5",
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    max_model_len: Annotated[int | None, typer.Option(min=1)] = 2048,
    tp: Tp = 1,
    device: Device = "auto",
    dtype: DType = "auto",
    block_size: BlockSize = None,
    draft_quantization: DraftQuantization = None,
    peer: Annotated[bool, typer.Option(help="Also time transformers' generate at batch 1.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write the raw figures as JSON.")] = None,
) -> None:
    """Step time, tokens per step and tokens/s by batch and verify length.

    With presets such as dummy:qwen3-8b and dummy:qwen3-8b-b16 the weights are random: step times
    are real, tokens/s are modelled.
    """
    options = {"device": device, "dtype": dtype, "draft_quantization": draft_quantization}
    if target.startswith("dummy:"):
        _bench_presets(target, draft, batch, context, verify, accept, options, output)
        return
    batch, verify = batch or "1,8", verify or "2,3,4,6,8"
    from dflash_serve.api.codec import TextCodec
    from dflash_serve.bench.prompts import load_prompts
    from dflash_serve.bench.step import bench_step, step_table, transformers_rate

    batches = [int(n) for n in _numbers("batch", batch)]
    lengths = [int(n) for n in _numbers("verify", verify)]
    config = _config(
        target,
        draft,
        tp,
        **options,
        block_size=block_size,
        max_running=max(batches),
        max_model_len=max_model_len,
        prefix_cache=False,
    )
    ids = load_prompts(TextCodec.load(config.target), prompts, limit)
    with Progress(console=_err, transient=True) as progress:
        rows = bench_step(config, ids, batches, lengths, max_tokens, progress)
    step_table(rows, _out, draft_quantization)
    figures: dict[str, Any] = {"version": __version__, "rows": [row.as_json() for row in rows]}
    if peer:
        rate = transformers_rate(config.target, ids[: max(4, len(ids) // 2)], max_tokens)
        figures["transformers_tokens_per_second"] = rate
        _out.print(f"transformers generate, batch 1, float32 on CPU: {rate:.1f} tok/s")
    if output is not None:
        output.write_text(json.dumps(figures | options, indent=1) + "\n", encoding="utf-8")


def _bench_presets(
    target: str,
    draft: str,
    batch: str | None,
    context: str,
    verify: str | None,
    accept: str,
    options: dict[str, Any],
    output: Path | None,
) -> None:
    from dflash_serve.bench.grid import bench_presets

    bench_presets(
        target,
        draft if draft.startswith("dummy:") else None,
        batches=[int(n) for n in _numbers("batch", batch or "1,8,32,128")],
        contexts=[int(n) for n in _numbers("context", context)],
        lengths=[int(n) for n in _numbers("verify", verify or "16")],
        accept=_numbers("accept", accept),
        options=options,
        console=_out,
        output=output,
    )


@app.command()
@_reported
def roofline(
    target: Annotated[
        str, typer.Option(help="Folder of the target, or a public shape such as qwen3-8b.")
    ] = str(DEMO_TARGET),
    draft: Annotated[
        str, typer.Option(help="Folder of the draft, or 'like-target': 5 layers of its shape.")
    ] = str(DEMO_DRAFT),
    batch: Annotated[str, typer.Option(help="Batch sizes, by commas.")] = "1,8,32,128",
    context: Annotated[int, typer.Option(min=1)] = 1024,
    verify_length: VerifyLength = None,
    block_size: BlockSize = None,
    tp: Tp = 1,
    tau: Annotated[str | None, typer.Option(help="Tokens per full block to model.")] = None,
    acceptance: Annotated[
        str | None, typer.Option(help="Conditional acceptance per position, in place of --tau.")
    ] = None,
    measured: Annotated[float | None, typer.Option(help="Time of a step, ms.")] = None,
    gpu: Annotated[str, typer.Option(help="h200, or h200-read: 4.2 TB/s.")] = "h200",
    estimate: Annotated[
        bool, typer.Option("--estimate", help="What a very good engine reaches, not the floor.")
    ] = False,
    bandwidth: Annotated[float | None, typer.Option(help="Memory, TB/s.")] = None,
    tflops: Annotated[float | None, typer.Option(help="Products, TFLOP/s.")] = None,
    link: Annotated[float | None, typer.Option(help="Between devices, GB/s one way.")] = None,
    element_bytes: Annotated[int, typer.Option(min=1, help="Of a weight or cache entry.")] = 2,
    collective_us: Annotated[float | None, typer.Option(min=0, help="Of one collective.")] = None,
    node_us: Annotated[float | None, typer.Option(min=0, help="Before each kernel.")] = None,
) -> None:
    """The least time a decode step can take, from the configs alone (bf16; H200 by default)."""
    from dflash_serve.bench import roofline_report as tool

    config = tool.load_target(target)
    proposer, block, rows = tool.load_draft(
        draft, config, block_size=block_size, rows=verify_length
    )
    question = tool.Question(
        target=config,
        draft=proposer,
        machine=tool.machine_named(
            gpu,
            estimate=estimate,
            element_bytes=element_bytes,
            bandwidth_tb=bandwidth,
            tflops=tflops,
            link_gb=link,
            collective_us=collective_us,
            node_us=node_us,
        ),
        block=block,
        rows=rows,
        batches=[int(n) for n in _numbers("batch", batch)],
        context=context,
        tp=tp,
        taus=None if tau is None else _numbers("tau", tau),
        acceptance=None if acceptance is None else _numbers("acceptance", acceptance),
        measured_ms=measured,
    )
    tool.report(question, _out)


@app.command()
@_reported
def check(
    config: Annotated[Path, typer.Argument(help="A Serve config file, or a target's folder.")],
    draft: Annotated[str | None, typer.Argument(help="A draft's folder.")] = None,
    tp: Tp = 1,
    block_size: BlockSize = None,
) -> None:
    """Validate a deployment file, or a pair of checkpoints, without starting it."""
    if config.is_dir():
        from dflash_serve.bench.describe import describe_pair

        pair = _config(str(config), draft or "none", tp, block_size=block_size)
        describe_pair(pair, _out)
        return
    from dflash_serve.serve.validate import validate_config

    report = validate_config(config)
    for warning in report.warnings:
        _err.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    report.require_valid()
    _out.print(f"{config}: {len(report.applications)} application(s), no problems", markup=False)


@app.command("replay")
@_reported
def replay_command(
    record: Annotated[Path, typer.Argument(help="A flight record; the log of a rank names it.")],
    target: Target,
    draft: Draft,
    dtype: DType = "auto",
) -> None:
    """Run the steps of a flight record again on CPU; exit code 1 where an id differs."""
    from dflash_serve.engine.recorder import load_record
    from dflash_serve.engine.replay import replay

    pair = _config(target, draft, 1)
    outcome = replay(load_record(record), pair.target, pair.draft, dtype=dtype)
    for slot, reason in outcome.skipped.items():
        _out.print(f"slot {slot} cannot be replayed: {reason}", markup=False)
    _out.print(f"{outcome.steps} steps, {outcome.entries} prefill chunks and blocks compared")
    if (found := outcome.difference) is not None:
        _out.print(
            f"step {found.step} is the first that differs, in slot {found.slot}: "
            f"recorded {found.recorded}, replayed {found.replayed}",
            markup=False,
        )
        raise typer.Exit(1)


@app.command("trace")
@_reported
def trace_command(
    steps: Annotated[int, typer.Argument(min=1, help="Steps to profile.")],
    url: Annotated[str, typer.Option(help="The server's.")] = "http://127.0.0.1:8000",
    output: Annotated[Path | None, typer.Option(help="Copy the files here, on one host.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 60.0,
) -> None:
    """Profile a busy replica of a server with admin: true: a Chrome trace a rank, on its host."""
    from dflash_serve.api.remote import trace_paths

    _out.print("\n".join(trace_paths(url, steps, timeout, output)), markup=False, soft_wrap=True)


def main() -> None:
    """Console entry point."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
