"""`dflash_serve.bench.overhead` with a tiny random float32 pair.

python -m tests.bench.bench_overhead --output overhead.json
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from dflash_serve.bench import overhead
from tests.serve.conftest import write_tokenizer
from tests.tiny import VOCAB, make_pair

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dfp-") as folder:
        pair = make_pair(Path(folder))
        write_tokenizer(Path(pair.target), VOCAB)
        overhead.main(["--target", pair.target, "--draft", pair.draft, *sys.argv[1:]])
