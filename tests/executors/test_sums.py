"""The sum that ranks take before they load anything."""

import pytest
import torch

from dflash_serve.engine.rank import check_sums
from dflash_serve.errors import EngineDeadError
from dflash_serve.parallel.group import Single


class Pair(Single):
    """Rank 1 of 2; a sum of more than `broken_from` elements lacks the other rank's part."""

    rank, size = 1, 2

    def __init__(self, broken_from: int) -> None:
        self._broken_from = broken_from

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.numel() > self._broken_from else x + 1


def test_right_sums_pass() -> None:
    check_sums(Single(), torch.device("cpu"))
    check_sums(Pair(10**9), torch.device("cpu"))


@pytest.mark.parametrize("broken_from", [0, 1])
def test_a_wrong_sum_names_the_rank_and_what_came(broken_from: int) -> None:
    with pytest.raises(EngineDeadError, match=r"rank 1: .* 2 ranks gave 2 to 2 instead of 3"):
        check_sums(Pair(broken_from), torch.device("cpu"))
