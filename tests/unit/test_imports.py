"""The shape of the package: who may import whom, how long things may get, what is exported."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflash_serve

ROOT = Path(dflash_serve.__file__).parent
FILES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(ROOT.rglob("*.py"))
}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}

# A module imports only from its own layer and from those above it in this table.
LAYERS = [
    {"__init__", "cores", "errors", "log"},
    {"config", "geometry", "sampling", "model_config"},
    {"kernels"},
    {"parallel"},
    {"cache", "models"},
    {"scheduler", "engine"},
    {"api.protocol"},  # what a replica is to the front end: types only
    {"observe"},
    {"api"},
    {"serve"},
    {"bench"},
    {"cli", "__main__"},
]
MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 400, 60, 150


def area(module: str) -> str:
    """First part of a module's name inside the package."""
    return module.split(".")[0]


def layer(module: str) -> int:
    name = module if any(module in names for names in LAYERS) else area(module)
    found = [i for i, names in enumerate(LAYERS) if name in names]
    assert found, f"{module} belongs to no layer; add it to the table"
    return found[0]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute names of everything a file imports, and the line."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            if node.module == "dflash_serve":
                yield from ((f"dflash_serve.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def inside(path: Path) -> list[tuple[str, int]]:
    """The package's own modules that a file imports, without the package's name."""
    found = [(name, line) for name, line in imports(path) if area(name) == "dflash_serve"]
    return [(name.partition(".")[2], line) for name, line in found]


def importers_of(*packages: str) -> set[str]:
    """Areas of the package with a file that imports one of these packages, anywhere in it."""
    return {
        area(module)
        for module, path in MODULES.items()
        for name, _ in imports(path)
        if area(name) in packages
    }


def test_imports_go_one_way() -> None:
    wrong = [
        f"{module}:{line} imports {name}"
        for module, path in MODULES.items()
        for name, line in inside(path)
        if name != "__version__" and layer(name) > layer(module)
    ]
    assert wrong == []


def test_configuration_never_imports_what_is_built_on_it() -> None:
    for module in ("errors", "log", "config", "geometry", "sampling"):
        names = {name for name, _ in inside(MODULES[module])}
        assert names <= {"errors"}, f"{module} imports {names}"


def reached(module: str) -> set[str]:
    """Everything of the package that importing a module brings in, the module included."""
    found: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in MODULES and name not in found:
            found.add(name)
            todo += [target for target, _ in inside(MODULES[name])]
    return found


@pytest.mark.parametrize(
    "module",
    [
        "cache.pages",
        "engine.messages",
        "geometry",
        "model_config",
        "parallel.shard",
        "scheduler.acceptance",
        "scheduler.draft_scale",
        "scheduler.events",
        "scheduler.limits",
        "scheduler.plan",
        "scheduler.request",
        "scheduler.scheduler",
        "scheduler.verify_length",
    ],
)
def test_decisions_are_made_without_torch(module: str) -> None:
    for name in reached(module):
        packages = {area(target) for target, _ in imports(MODULES[name])}
        assert not packages & {"torch", "triton", "transformers"}, f"{module} reaches {name}"


def test_the_scheduler_knows_of_the_engine_only_its_messages() -> None:
    for module in (m for m in MODULES if area(m) == "scheduler"):
        engine = {name for name, _ in inside(MODULES[module]) if area(name) == "engine"}
        assert engine <= {"engine.messages"}


def test_only_the_serve_side_imports_ray() -> None:
    assert importers_of("ray") <= {"serve"}


def test_only_api_and_serve_import_the_web_framework() -> None:
    assert importers_of("fastapi", "pydantic", "starlette", "uvicorn") <= {"api", "serve"}


def test_only_kernels_import_triton() -> None:
    assert importers_of("triton") <= {"kernels"}


def test_only_the_command_line_imports_the_benchmarks() -> None:
    users = {
        area(module)
        for module, path in MODULES.items()
        for name, _ in inside(path)
        if area(name) == "bench"
    }
    assert users <= {"bench", "cli", "__main__"}


BLOCKED = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "triton", "pydantic", "fastapi"}:
            raise ModuleNotFoundError(f"{name} is absent here", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized(), "importing the package initialised CUDA"
"""


def test_everything_below_the_api_imports_without_ray_triton_or_pydantic() -> None:
    below = layer("api.protocol")
    # The Triton kernels themselves; nothing imports them before a tensor is on a GPU.
    modules = [m for m in MODULES if not m.startswith("kernels.gpu.")]
    names = ["dflash_serve", *(f"dflash_serve.{m}" for m in modules if layer(m) < below)]
    names = [name.removesuffix(".__init__") for name in names]
    command = [sys.executable, "-c", BLOCKED, *names]
    plain = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, dflash_serve; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "ray", "triton", "pydantic", "transformers"}


def test_files_stay_short() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {m: n for m, n in lengths.items() if n > MAX_FILE} == {}


def test_functions_stay_short() -> None:
    long = []
    for module, path in MODULES.items():
        limit = MAX_KERNEL if area(module) == "kernels" else MAX_FUNCTION
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limit:
                    long.append(f"{module}.{node.name}: {length} lines")
    assert long == []


# -- one reader of the draft's row counts -------------------------------------------------------

KEYS = {"block_size", "sample_from_anchor", "num_speculative_tokens", "query_zero_predicts_next"}


def docstrings(tree: ast.Module) -> set[int]:
    """Identities of the strings that are statements of their own."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def row_count_keys(path: Path) -> list[str]:
    """Where a file names one of the keys as a string, or takes it off something called a draft."""
    tree = tree_of(path)
    ignored, found = docstrings(tree), []
    for node in ast.walk(tree):
        is_key = isinstance(node, ast.Constant) and node.value in KEYS and id(node) not in ignored
        of_draft = (
            isinstance(node, ast.Attribute)
            and node.attr in KEYS
            and "draft" in ast.unparse(node.value).lower()
        )
        if is_key or of_draft:
            found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


# The engine's own override field, checked by its name in `config`.
READERS = {"geometry", "config"}


def test_only_geometry_reads_row_counts_of_a_draft() -> None:
    others = [path for module, path in MODULES.items() if module not in READERS]
    assert [found for path in others for found in row_count_keys(path)] == []


def test_geometry_does_read_them() -> None:
    assert len(row_count_keys(MODULES["geometry"])) >= 3


# -- exports ------------------------------------------------------------------------------------


def exported(tree: ast.Module) -> list[str] | None:
    """The module's `__all__`, or None."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def defined(tree: ast.Module) -> set[str]:
    """Names a module binds at its top level."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_every_module_lists_names_that_it_has() -> None:
    wrong = []
    for module, path in MODULES.items():
        tree = tree_of(path)
        code = [node for node in tree.body if not isinstance(node, ast.Expr)]
        names = exported(tree)
        if code and names is None:
            wrong.append(f"{module} has no __all__")
        absent = set(names or []) - defined(tree)
        if absent or len(set(names or [])) < len(names or []):
            wrong.append(f"{module} exports {sorted(absent)}, or a name twice")
    assert wrong == []
