"""Block by block what the public implementations propose and accept (greedy, batch 1)."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from unittest import mock

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from tests.engine.neartie import reference_model
from tests.tiny import TinyPair

__all__ = ["Blocks", "public_dflash", "transformers_dflash"]


@dataclasses.dataclass
class Blocks:
    """One generation.

    Attributes:
        ids: output ids.
        proposals: start of each block → ids proposed after its anchor.
        committed: start of each block → tokens committed by it.
    """

    ids: list[int]
    proposals: dict[int, list[int]]
    committed: dict[int, int]


def public_dflash(pair: TinyPair, prompts: list[list[int]], max_tokens: int) -> list[Blocks]:
    """Every prompt through `dflash_generate` of the public package."""
    target = reference_model(pair.target)
    draft = DFlashDraftModel.from_pretrained(pair.draft, dtype=torch.float32).eval()
    logits: list[Tensor] = []
    honest = draft.compute_logits

    def recording(hidden: Tensor, output_head: nn.Module) -> Tensor:
        logits.append(honest(hidden, output_head))
        return logits[-1]

    draft.compute_logits = recording
    results = []
    for prompt in prompts:
        logits.clear()
        # Its clock, needed for the accepted counts, exists only on CUDA.
        with mock.patch.object(dflash.model, "_cuda_time", time.perf_counter):
            output = dflash_generate(
                draft, target, torch.tensor([prompt]), max_tokens, None, return_stats=True
            )
        blocks = Blocks(output.output_ids[0, len(prompt) :].tolist(), {}, {})
        start = len(prompt)
        for rows, committed in zip(logits, output.acceptance_lengths, strict=False):
            blocks.proposals[start] = rows[0].argmax(dim=-1).tolist()
            blocks.committed[start] = committed
            start += committed
        results.append(blocks)
    return results


def transformers_dflash(
    pair: TinyPair, prompts: list[list[int]], max_tokens: int
) -> list[list[int]]:
    """Every prompt through transformers' own DFlash speculation."""
    target, draft = reference_model(pair.target), _assistant(pair.draft)
    target.generation_config.eos_token_id = None
    results = []
    for prompt in prompts:
        output = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=draft,
            speculation_type="dflash",
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        results.append(output[0, len(prompt) :].tolist())
    return results


def _assistant(folder: str) -> MuseGlimmerAssistantModel:
    """Our draft in the one class transformers has for DFlash drafts: two names differ."""
    fields = json.loads((Path(folder) / "config.json").read_text())
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "block_size",
    )
    config = MuseGlimmerAssistantConfig(
        **{name: fields[name] for name in kept},
        **fields["dflash_config"],
        layer_types=["full_attention"] * fields["num_hidden_layers"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope_theta"]},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    model = MuseGlimmerAssistantModel(config).eval()
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    tensors = load_file(Path(folder) / "model.safetensors")
    model.load_state_dict({names.get(name, name): t for name, t in tensors.items()})
    return model
