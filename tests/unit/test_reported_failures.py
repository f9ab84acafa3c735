"""docs/reported-failures.md names tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reported-failures.md").read_text(encoding="utf-8")


@functools.cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_test_that_is_named_is_there() -> None:
    # "a.py::test_b, ::test_c": a name without a file is of the file before it in its row.
    named: list[tuple[str, str]] = []
    for row in TEXT.splitlines():
        path = ""
        for found in re.finditer(r"([\w/]+\.py)|::(test_\w+)", row):
            path = found[1] or path
            if found[2]:
                named.append((path, found[2]))
    assert len(named) > 50
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(path)]
    assert missing == []
