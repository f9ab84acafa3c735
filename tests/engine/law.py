"""Chi-square tests of sampled ids against exact probabilities, and rounds of the real step."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from scipy import stats
from torch import Tensor

from dflash_serve.engine.pair import Pair, load_pair
from dflash_serve.engine.runner import Runner
from dflash_serve.engine.step import decode, prefill
from dflash_serve.parallel.group import Single
from dflash_serve.scheduler.plan import SlotSetup, StepPlan
from tests.engine.harness import PAGE, engine_config
from tests.engine.neartie import reference_model
from tests.engine.rows import kept_ids
from tests.tiny import TinyPair

__all__ = ["FALSE_ALARM", "Law", "Rounds", "chi_square_p", "exact_probabilities"]

FALSE_ALARM = 1e-9
"""A right sampler fails a test with this chance."""

_LEAST_EXPECTED = 10.0


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """Chance of counts at least as far from what `probabilities` predict.

    Cells that are expected less than ten times are counted together. A count in a cell of
    probability 0 gives 0.
    """
    total = float(counts.sum())
    if bool((counts[probabilities == 0] > 0).any()):
        return 0.0
    expected = probabilities.double() * total
    rare = expected < _LEAST_EXPECTED
    seen = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = wanted > 0
    statistic = ((seen[keep] - wanted[keep]).square() / wanted[keep]).sum()
    return float(stats.chi2.sf(float(statistic), int(keep.sum()) - 1))


def exact_probabilities(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Probability of every id, float64, from [V] logits."""
    kept = torch.tensor(kept_ids(logits, temperature, top_k, top_p, min_p))
    result = torch.zeros(logits.shape[0], dtype=torch.float64)
    result[kept] = torch.softmax(logits.double()[kept] / temperature, dim=0)
    return result


@dataclasses.dataclass(frozen=True)
class Law:
    """Sampling parameters of a test."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Rounds:
    """Many requests with the same prompt and different seeds, three ids each.

    Prompt pages are shared between all slots; every slot has pages of its own for its blocks.
    """

    def __init__(self, pair: TinyPair, rows: int, slots: int) -> None:
        own = 3
        self._prompt, self._anchor, self._rows = list(range(1, 9)) * 2, 3, rows
        prefix = len(self._prompt) // PAGE
        config = engine_config(
            pair, max_running=slots, max_model_len=32, verify_length=rows, pages=own * slots + 9
        )
        self._pair: Pair = load_pair(config, Single())
        self._runner = Runner(self._pair, slots)
        self._slots = torch.arange(slots)
        shared = list(range(1, prefix + 1))
        self._pages = [
            [*shared, *range(first, first + own)]
            for first in range(prefix + 1, prefix + 1 + own * slots, own)
        ]
        self._target, self._seed = pair.target, 0
        self._fill_prompt()

    @torch.inference_mode()
    def _fill_prompt(self) -> None:
        self._set_up(Law(1.0), 1)
        ids = torch.tensor(self._prompt)
        state = self._runner.state
        state.start[0] = 0
        prefill(self._pair, state, 0, ids, 0, sample=False, noisy=False, truncates=False)

    def _set_up(self, law: Law, slots: int) -> None:
        setups = [
            SlotSetup(
                slot=slot,
                start=len(self._prompt),
                anchor=self._anchor,
                seed=self._seed + slot,
                **dataclasses.asdict(law),
            )
            for slot in range(slots)
        ]
        pages = [(slot, 0, self._pages[slot]) for slot in range(slots)]
        self._runner.state.apply(StepPlan(step=0, setups=setups, pages=pages))
        self._seed += slots

    @torch.inference_mode()
    def sample(self, law: Law, count: int) -> tuple[Tensor, list[int]]:
        """[count, 3] first ids of `count` requests, and how many drafts each step accepted."""
        found: list[Tensor] = []
        accepted: list[int] = []
        truncates = law.top_k > 0 or law.top_p < 1 or law.min_p > 0
        while sum(f.shape[0] for f in found) < count:
            self._set_up(law, len(self._slots))
            lists: list[list[int]] = [[] for _ in self._slots]
            for step in range(3):
                output = decode(
                    self._pair,
                    self._runner.state,
                    self._runner.drafter,
                    self._slots,
                    self._rows,
                    len(self._prompt) + (step + 1) * self._rows,
                    noisy=True,
                    truncates=truncates,
                )
                accepted.extend(output.accepted.tolist())
                pairs = zip(output.picked.tolist(), output.accepted.tolist(), strict=True)
                for mine, (picked, length) in zip(lists, pairs, strict=True):
                    mine.extend(picked[: length + 1])
            found.append(torch.tensor([ids[:3] for ids in lists]))
        return torch.cat(found)[:count], accepted

    @torch.inference_mode()
    def exact(self, law: Law) -> Tensor:
        """[V, V, V] probability of the first three ids, float64, by transformers."""
        model = reference_model(self._target, torch.float64)
        vocab = int(model.config.vocab_size)
        known = [*self._prompt, self._anchor]
        result = torch.ones((vocab, vocab, vocab), dtype=torch.float64)
        for length in range(3):
            prefixes = list(itertools.product(range(vocab), repeat=length))
            logits = model(torch.tensor([[*known, *p] for p in prefixes])).logits[:, -1]
            rows = torch.stack(
                [exact_probabilities(row, **dataclasses.asdict(law)) for row in logits]
            )
            shape = [vocab] * (length + 1) + [1] * (2 - length)
            result *= rows.view(shape)
        return result

    def p_values(self, ids: Tensor, law: Law) -> dict[str, float]:
        """Chi-square p-values of single ids, pairs and triples of consecutive ids."""
        exact = self.exact(law)
        vocab = exact.shape[0]
        counts = torch.zeros(vocab**3, dtype=torch.int64)
        index = (ids[:, 0] * vocab + ids[:, 1]) * vocab + ids[:, 2]
        counts.index_add_(0, index, torch.ones_like(index))
        cube = counts.view(vocab, vocab, vocab)
        return {
            "first": chi_square_p(cube.sum((1, 2)), exact.sum((1, 2))),
            "second": chi_square_p(cube.sum((0, 2)), exact.sum((0, 2))),
            "third": chi_square_p(cube.sum((0, 1)), exact.sum((0, 1))),
            "pair 1-2": chi_square_p(cube.sum(2).flatten(), exact.sum(2).flatten()),
            "pair 2-3": chi_square_p(cube.sum(0).flatten(), exact.sum(0).flatten()),
            "triple": chi_square_p(cube.flatten(), exact.flatten()),
        }
