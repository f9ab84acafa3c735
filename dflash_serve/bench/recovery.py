"""From the death of a rank to the next token of the same request.

    python -m dflash_serve.bench.recovery [--target dummy:qwen3-8b] [--draft dummy:qwen3-8b-b16]

A request runs under the `mp` executor, its rank is killed with SIGKILL in the middle, a new engine
is started and the request submitted again with the ids it already has. What the front end does
by hand here, the ingress of a deployment does by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from dflash_serve.bench.dummy import is_dummy, resolve_dummy
from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.executors import start_engine
from dflash_serve.engine.messages import Submit, TokenEvent
from dflash_serve.errors import EngineDeadError
from dflash_serve.log import configure
from dflash_serve.sampling import SamplingParams

__all__ = ["Recovery", "recover"]


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What a recovery took.

    Attributes:
        emitted: ids the client had when the rank was killed.
        noticed_s: from the kill until the front end knows.
        ready_s: from the kill until the new engine is ready.
        first_token_s: from the kill to the first new token.
        load_s: reading or filling the weights, of the new engine.
        startup: its other parts, see `EngineInfo.startup`.
        continued: whether the ids are those of an undisturbed run.
    """

    emitted: int
    noticed_s: float
    ready_s: float
    first_token_s: float
    load_s: float
    startup: dict[str, float]
    continued: bool


def recover(config: EngineConfig, prompt: list[int], tokens: int, kill_after: int) -> Recovery:
    """Run a request, kill the rank after `kill_after` ids, and finish it on a new engine.

    Args:
        config: executor 'mp'; every rank is a child of this process.
        tokens: ids the request asks for.
    """
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    submit = Submit(request_id="r", prompt_ids=prompt, params=params)
    engine = start_engine(config)
    emitted, killed = _run_until_killed(engine, submit, kill_after)
    noticed = time.monotonic()
    engine.shutdown()
    again = start_engine(config)
    ready = time.monotonic()
    try:
        firsts: list[float] = []
        events = again.collect(
            [_continued(submit, emitted)], lambda _: firsts.append(time.monotonic())
        )["r"]
        whole = again.collect([submit])["r"]
        info = again.info
    finally:
        again.shutdown()
    return Recovery(
        emitted=len(emitted),
        noticed_s=noticed - killed,
        ready_s=ready - killed,
        first_token_s=firsts[0] - killed,
        load_s=info.load_seconds,
        startup=info.startup,
        continued=emitted + _ids(events) == _ids(whole),
    )


def _run_until_killed(
    engine: EngineClient, submit: Submit, kill_after: int
) -> tuple[list[int], float]:
    """The ids that arrived before the rank died, and when it was killed."""
    emitted: list[int] = []
    killed: list[float] = []

    def note(event: TokenEvent) -> None:
        if killed:
            return
        emitted.extend(event.token_ids)
        if len(emitted) >= kill_after:
            killed.append(time.monotonic())
            for child in multiprocessing.active_children():
                if child.pid is not None:
                    os.kill(child.pid, signal.SIGKILL)

    try:
        engine.collect([submit], note)
    except EngineDeadError:
        return emitted, killed[0]
    raise RuntimeError(f"the request ended before {kill_after} ids; ask for more tokens")


def _continued(submit: Submit, emitted: list[int]) -> Submit:
    return Submit(
        request_id=submit.request_id,
        prompt_ids=submit.prompt_ids,
        params=submit.params,
        emitted_ids=emitted,
    )


def _ids(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="dummy:qwen3-8b")
    parser.add_argument("--draft", default="dummy:qwen3-8b-b16")
    parser.add_argument("--max-running", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    configure("WARNING")
    with tempfile.TemporaryDirectory() as folder:
        names = [options.target, options.draft]
        target, draft = (str(resolve_dummy(n, folder)) if is_dummy(n) else n for n in names)
        config = EngineConfig(
            target=target,
            draft=draft,
            executor="mp",
            load_format="dummy" if is_dummy(options.target) else "auto",
            max_running=options.max_running,
            max_model_len=max(4096, options.prompt + 1024),
        )
        generator = random.Random(0)
        prompt = [generator.randrange(1000) for _ in range(options.prompt)]
        found = recover(config, prompt, tokens=256, kill_after=64)
    figures = dataclasses.asdict(found)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
