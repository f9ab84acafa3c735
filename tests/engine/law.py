"""Chi-square tests of sampled ids against exact probabilities, and rounds of the real step."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from scipy import stats
from torch import Tensor

from dflash_serve.engine.pair import Pair, load_pair
from dflash_serve.engine.runner import Runner
from dflash_serve.engine.step import DecodeOutput, decode, prefill
from dflash_serve.parallel.group import Single
from dflash_serve.scheduler.plan import SlotSetup, StepPlan
from tests.engine.harness import PAGE, engine_config
from tests.engine.neartie import reference_model
from tests.engine.rows import kept_ids
from tests.tiny import TinyPair

__all__ = [
    "FALSE_ALARM",
    "FREQUENT",
    "RANGES",
    "Law",
    "Rounds",
    "chi_square_p",
    "exact_probabilities",
    "strata_p",
    "wide_bins",
]

FALSE_ALARM = 1e-9
"""A right sampler fails a test with this chance."""

FREQUENT, RANGES = 40, 60
"""A wide vocabulary is counted in bins: so many frequent ids alone, the others in ranges."""

_LEAST_EXPECTED = 10.0


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """Chance of [C] counts at least as far from what [C] `probabilities` predict.

    Neighbouring cells are counted together until ten are expected. A count in a cell of
    probability 0 gives 0.
    """
    return strata_p(counts[None], probabilities[None])


def strata_p(counts: Tensor, probabilities: Tensor) -> float:
    """`chi_square_p` of [S, C] counts, each row with its own total and its own probabilities.

    Fixed totals take away degrees of freedom, which are counted nevertheless: the chance is never
    said to be smaller than it is.
    """
    if bool((counts[probabilities == 0] > 0).any()):
        return 0.0
    expected = (probabilities.double() * counts.sum(dim=1, keepdim=True)).flatten()
    group = _groups(expected)
    size = int(group.max()) + 1
    wanted = torch.zeros(size, dtype=torch.float64).index_add_(0, group, expected)
    seen = torch.zeros(size, dtype=torch.float64).index_add_(0, group, counts.flatten().double())
    if size == 1:
        return 1.0
    return float(stats.chi2.sf(float(((seen - wanted).square() / wanted).sum()), size - 1))


def _groups(expected: Tensor) -> Tensor:
    """[C] index of the group of neighbours that each cell is counted in."""
    groups, index, held = [], 0, 0.0
    for value in expected.tolist():
        groups.append(index)
        held += value
        if held >= _LEAST_EXPECTED:
            index, held = index + 1, 0.0
    return torch.tensor(groups).clamp(max=max(0, index - 1))


def exact_probabilities(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Probability of every id, float64, from [V] logits."""
    if top_k == 0 and top_p == 1.0 and min_p == 0.0:
        return torch.softmax(logits.double() / temperature, dim=0)
    kept = torch.tensor(kept_ids(logits, temperature, top_k, top_p, min_p))
    result = torch.zeros(logits.shape[0], dtype=torch.float64)
    result[kept] = torch.softmax(logits.double()[kept] / temperature, dim=0)
    return result


def wide_bins(exact: Tensor) -> Tensor:
    """[V] bin of every id: the most probable ids have one each, the others share by range."""
    bins = FREQUENT + torch.arange(exact.shape[0]) * RANGES // exact.shape[0]
    bins[exact.topk(FREQUENT).indices] = torch.arange(FREQUENT)
    return bins


@dataclasses.dataclass(frozen=True)
class Law:
    """Sampling parameters of a test."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Rounds:
    """Many requests with the same prompt and different seeds.

    Prompt pages are shared between all slots; every slot has pages of its own for its blocks.
    """

    def __init__(self, pair: TinyPair, rows: int, slots: int, *, draft_scale: float = 1.0) -> None:
        own = 3
        self._prompt, self._anchor, self._rows = list(range(1, 9)) * 2, 3, rows
        prefix = len(self._prompt) // PAGE
        # A pool for `slots` requests of 32 tokens holds more pages than are used here.
        config = engine_config(
            pair,
            max_running=slots,
            max_model_len=32,
            verify_length=rows,
            draft_scale=draft_scale,
        )
        self._pair: Pair = load_pair(config, Single())
        self._runner = Runner(self._pair, config)
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
        prefill(
            self._pair, state, self._slots[:1], ids, 0, sample=False, noisy=False, truncates=False
        )

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

    @property
    def known(self) -> list[int]:
        """Ids before the first one that is sampled."""
        return [*self._prompt, self._anchor]

    @torch.inference_mode()
    def _decode(self, law: Law, step: int) -> DecodeOutput:
        return decode(
            self._pair,
            self._runner.state,
            self._runner.drafter,
            self._slots,
            self._rows,
            len(self._prompt) + (step + 1) * self._rows,
            noisy=True,
            truncates=law.top_k > 0 or law.top_p < 1 or law.min_p > 0,
        )

    def blocks(self, law: Law, count: int) -> tuple[Tensor, Tensor]:
        """The first step of `count` requests: picked [count, rows] and accepted [count]."""
        picked, accepted = [], []
        for _ in range(0, count, len(self._slots)):
            self._set_up(law, len(self._slots))
            output = self._decode(law, 0)
            picked.append(output.picked)
            accepted.append(output.accepted)
        return torch.cat(picked)[:count], torch.cat(accepted)[:count]

    def sample(self, law: Law, count: int) -> tuple[Tensor, list[int]]:
        """[count, 3] first ids of `count` requests, and how many drafts each step accepted."""
        found: list[Tensor] = []
        accepted: list[int] = []
        while sum(f.shape[0] for f in found) < count:
            self._set_up(law, len(self._slots))
            lists: list[list[int]] = [[] for _ in self._slots]
            for step in range(3):
                output = self._decode(law, step)
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
        result = torch.ones((vocab, vocab, vocab), dtype=torch.float64)
        for length in range(3):
            prefixes = list(itertools.product(range(vocab), repeat=length))
            logits = model(torch.tensor([[*self.known, *p] for p in prefixes])).logits[:, -1]
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
