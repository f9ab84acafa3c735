"""Results of a step on their way to the host, which may ask for them a step later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_serve.scheduler.plan import DecodeResult, StepPlan, StepResult

__all__ = ["Outbox", "Pending"]


class Pending:
    """One launched plan.

    Args:
        sampled, decoded: packed results on the host; complete once `copied` has happened.
        on_fault: called with the slots whose results held a NaN.
    """

    def __init__(
        self,
        plan: StepPlan,
        sampled: Tensor | None,
        decoded: Tensor | None,
        copied: torch.cuda.Event | None,
        on_fault: Callable[[Sequence[int]], None],
    ) -> None:
        self.plan = plan
        self._sampled = sampled
        self._decoded = decoded
        self._copied = copied
        self._on_fault = on_fault

    def result(self) -> StepResult:
        """Wait for the step and read its outcome."""
        if self._copied is not None:
            self._copied.synchronize()
        result = StepResult()
        faulty: list[int] = []
        if self._sampled is not None:
            for chunk, (token, fault) in zip(
                self.plan.prefill, self._sampled.tolist(), strict=True
            ):
                result.sampled.append(-1 if fault else token if chunk.sample else None)
                faulty += [chunk.slot] if fault else []
        if self._decoded is not None:
            for slot, row in zip(self.plan.decode, self._decoded.tolist(), strict=True):
                result.decoded.append(
                    DecodeResult(picked=row[:-2], accepted=row[-2], fault=bool(row[-1]))
                )
                faulty += [slot] if row[-1] else []
        if faulty:
            self._on_fault(faulty)
        return result


class Outbox:
    """Copies packed results to the host without waiting, into two pinned buffers used in turn.

    At most one plan may be launched before the result of the one ahead of it is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int64)] * 2
        self._turn = 0

    def send(
        self,
        plan: StepPlan,
        sampled: Tensor | None,
        decoded: Tensor | None,
        on_fault: Callable[[Sequence[int]], None],
    ) -> Pending:
        """Start the copies of a plan's results.

        Args:
            sampled: [chunks, 2].
            decoded: [≥ B, g + 2]; rows past the batch are padding.
        """
        decoded = None if decoded is None else decoded[: len(plan.decode)]
        if not self._pinned:
            return Pending(plan, sampled, decoded, None, on_fault)
        self._turn = 1 - self._turn
        parts = [part for part in (sampled, decoded) if part is not None]
        count = sum(part.numel() for part in parts)
        if self._buffers[self._turn].numel() < count:
            self._buffers[self._turn] = torch.empty(2 * count, dtype=torch.int64, pin_memory=True)
        hosts, first = [], 0
        for part in parts:
            host = self._buffers[self._turn][first : first + part.numel()].view(part.shape)
            host.copy_(part, non_blocking=True)
            hosts.append(host)
            first += part.numel()
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return Pending(
            plan,
            hosts[0] if sampled is not None else None,
            hosts[-1] if decoded is not None else None,
            copied,
            on_fault,
        )
