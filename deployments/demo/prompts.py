"""Write the user turns of one of the measuring sets, one JSON string per line.

    python -m deployments.demo.prompts HumanEval --sets FOLDER --output prompts.jsonl

The sets ship in packages; see `evaluate`. The file is what `dflash-serve bench step --prompts`
reads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .evaluate import SOURCES, user_turns


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=sorted(SOURCES))
    parser.add_argument("--sets", type=Path, help="folder of the packages' wheels")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    turns = user_turns(arguments.name, arguments.sets)
    arguments.output.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    print(f"{len(turns)} prompts in {arguments.output}")


if __name__ == "__main__":
    main()
