"""Prints how many losslessness cases ran and how often each accepted length came up.

python -m tests.engine.report          the pairwise cases on 1, 2 and 4 ranks
python -m tests.engine.report --full   every case on 1 rank, the pairwise ones on 2 and 4
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.engine.cases import SAMPLINGS, Case, EngineKey, matrix, pairwise, rank_cases
from tests.engine.harness import Harness
from tests.tiny import make_pair


def histogram_cases() -> list[Case]:
    """Half-right and perfect drafts at every block, so that every accepted length comes up."""
    return [
        Case(EngineKey("qwen3", block, 64, False, 1), sampling, drafter, batch=7, warm=False)
        for block in (2, 8, 16)
        for sampling in SAMPLINGS
        for drafter in ("half", "perfect")
    ]


def main() -> None:
    """Run the cases; any wrong id ends it with an assertion."""
    torch.set_num_threads(1)
    full = "--full" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        pairs = {f: make_pair(Path(folder) / f, f) for f in ("qwen3", "llama")}
        for tp in (1, 2, 4):
            began = time.monotonic()
            if tp > 1:
                cases = rank_cases(tp)
            else:
                cases = (list(matrix(1)) if full else pairwise(matrix(1))) + histogram_cases()
            harness = Harness(pairs, Path(folder))
            harness.run(cases)
            print(f"tp {tp}, {time.monotonic() - began:.0f} s: {harness.tally.text()}", flush=True)


if __name__ == "__main__":
    main()
