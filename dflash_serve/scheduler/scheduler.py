"""Rank 0's decisions: who runs, which pages, what one step does (no torch).

`plan` makes a StepPlan from the queues, `commit` applies its StepResult, in the order of the
plans. A plan may be made before the one ahead of it is committed: it then reserves pages for as
many tokens as that one can bring, and the device knows the anchors. Waiting requests are admitted
in order of arrival; when pages run out, the request admitted last is preempted: its pages go back
and it is computed again later, prompt and output, with its noise keyed by position so that it
continues with the ids it would have had.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from dflash_serve.cache.pages import PagePool
from dflash_serve.engine.messages import (
    EngineStats,
    FinishReason,
    LengthStats,
    Submit,
    TokenEvent,
)
from dflash_serve.errors import RequestError
from dflash_serve.scheduler.draft_scale import DraftScale
from dflash_serve.scheduler.events import failure, progress
from dflash_serve.scheduler.limits import Limits
from dflash_serve.scheduler.plan import (
    DecodeResult,
    PrefillChunk,
    SlotSetup,
    StepPlan,
    StepResult,
)
from dflash_serve.scheduler.request import Phase, Request
from dflash_serve.scheduler.tuning import Tuning, chosen_rows
from dflash_serve.scheduler.verify_length import VerifyLengthPolicy

__all__ = ["Scheduler"]


@dataclasses.dataclass(frozen=True)
class _Planned:
    """What a plan will bring, and to whom: requests with the epoch they had."""

    prefill: list[tuple[Request, int]]
    decode: list[tuple[Request, int]]


class Scheduler:
    """Queues, slots and pages of one engine.

    Args:
        policy: chooses g for every step; None verifies `limits.verify_rows` always.
        draft_scale: fits the factor on the draft's logits; None leaves it alone.
    """

    def __init__(
        self,
        limits: Limits,
        policy: VerifyLengthPolicy | None = None,
        draft_scale: DraftScale | None = None,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.draft_scale = draft_scale
        self.tuning = Tuning()  # may be replaced between two plans
        self.pool = PagePool(limits.num_pages)
        self.stats = EngineStats(pages_total=self.pool.usable)
        self.stats.ended = self.stats.finished  # a front end may count the latter otherwise
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission
        self._requests: dict[str, Request] = {}
        self._slots = list(range(limits.max_running))[::-1]
        self._events: list[TokenEvent] = []
        self._step = 0
        self._planned: deque[_Planned] = deque()

    # -- commands ---------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """Queue a request; one that cannot be served ends at once with an error event."""
        try:
            if submit.request_id in self._requests:
                raise RequestError(f"request id {submit.request_id!r} is in flight already")
            self.limits.check(submit)
        except RequestError as error:
            self._events.append(failure(submit.request_id, str(error)))
            return
        request = Request.from_submit(submit, self.limits.root)
        reason = request.finished_already(self.limits.eos, self.limits.max_model_len)
        if reason is not None:
            self._events.append(TokenEvent(request_id=request.request_id, finish_reason=reason))
            return
        self._requests[request.request_id] = request
        self._waiting.append(request)
        self.stats.accepted += 1
        self.stats.prompt_tokens += request.prompt_len

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored, since they may just have finished."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort", [])

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._requests

    def take_events(self) -> list[TokenEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- planning ---------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decide the next step."""
        plan = StepPlan(step=self._step, rows=self.limits.verify_rows)
        self._step += 1
        decode = self._plan_decode(plan)
        prefill = self._plan_prefill(plan)
        if not plan.empty:
            self._planned.append(
                _Planned([(r, r.epoch) for r in prefill], [(r, r.epoch) for r in decode])
            )
        return plan

    def _plan_decode(self, plan: StepPlan) -> list[Request]:
        """Every decoding request that has, or can get, pages for its block."""
        limits = self.limits
        able = [
            r
            for r in self._running
            if r.phase is Phase.DECODE and not r.certain_to_end(limits.max_model_len)
        ]
        contexts = [r.computed for r in able]
        rows = plan.rows = self.tuning.rows or chosen_rows(self.policy, contexts, plan.rows)
        for request in able:
            if request.phase is Phase.DECODE:  # not preempted for an older one just now
                # What lies past the longest context is never read: the dummy page takes it.
                most = limits.max_model_len + limits.verify_rows
                length = min(request.computed + request.ahead + rows, most)
                self._grow(request, length, plan)
        decoding = [r for r in able if r.phase is Phase.DECODE]
        for request in decoding:
            request.ahead += rows
            request.steps_ahead += 1
        plan.decode = [r.slot for r in decoding]
        plan.longest = max((r.computed + r.ahead for r in decoding), default=0)
        plan.noisy = any(r.params.temperature > 0 for r in decoding)
        plan.truncates = any(r.params.truncates for r in decoding)
        if self.draft_scale is not None and plan.noisy and rows > 1:
            plan.draft_scale = self.draft_scale.choose()
        # Pages taken for a request that was preempted later in the same plan are not its own.
        live = {r.slot for r in self._running}
        plan.pages = [entry for entry in plan.pages if entry[0] in live]
        return decoding

    def _plan_prefill(self, plan: StepPlan) -> list[Request]:
        """Chunks of running prefills first, then of newly admitted requests."""
        budget = self.limits.prefill_chunk
        chunked: list[Request] = []
        for request in [r for r in self._running if r.phase is Phase.PREFILL]:
            budget -= self._add_chunk(request, budget, plan, chunked)
        while budget > 0 and self._waiting and self._slots and self.tuning.admits(self._running):
            if not self._admit(self._waiting[0], plan):
                break
            request = self._waiting.popleft()
            budget -= self._add_chunk(request, budget, plan, chunked)
        return chunked

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Give a waiting request a slot and the pages of its known tokens, or leave it."""
        size = self.limits.page_size
        hits = self._match(request)
        need = -(-(request.prefill_len + self.limits.verify_rows) // size) - len(hits)
        pages = self.pool.allocate(need)
        if pages is None:
            self.pool.release(hits)
            return False
        self.stats.prefix_queries += len(request.tokens)
        self.stats.prefix_hits += len(hits) * size
        request.pages = hits + pages
        request.indexed = len(hits)
        request.computed = len(hits) * size
        request.slot = self._slots.pop()
        request.phase = Phase.PREFILL
        self._running.append(request)
        if request.cached is None:
            request.cached = min(request.computed, request.prompt_len)
            self.stats.cached_tokens += request.cached
        params = request.params
        plan.setups.append(
            SlotSetup(
                slot=request.slot,
                start=request.computed,
                anchor=request.tokens[-1] if request.continued else 0,
                seed=params.seed,
                temperature=params.temperature,
                top_k=params.top_k if params.top_k < self.limits.vocab_size else 0,
                top_p=params.top_p,
                min_p=params.min_p,
            )
        )
        plan.pages.append((request.slot, 0, list(request.pages)))
        return True

    def _match(self, request: Request) -> list[int]:
        """Cached pages of the request's beginning; the last known token is always recomputed."""
        if not self.limits.prefix_cache:
            return []
        full = (len(request.tokens) - 1) // self.limits.page_size
        return self.pool.match(request.page_keys(full, self.limits.page_size))

    def _add_chunk(
        self, request: Request, budget: int, plan: StepPlan, chunked: list[Request]
    ) -> int:
        """Plan the request's next chunk; returns its length."""
        start = request.computed + request.ahead
        count = min(budget, request.prefill_len - start)
        if request.prefill_len == start:  # a continued request found in the cache
            request.phase = Phase.DECODE
            return 0
        if count <= 0:
            return 0
        last = start + count == request.prefill_len
        sample = last and not request.continued
        plan.prefill.append(
            PrefillChunk(
                slot=request.slot,
                start=start,
                token_ids=request.tokens[start : start + count],
                sample=sample,
                truncates=request.params.truncates,
                noisy=request.params.temperature > 0,
            )
        )
        request.ahead += count
        if last:
            request.phase = Phase.DECODE
            request.steps_ahead += int(sample)
        chunked.append(request)
        return count

    def _grow(self, request: Request, length: int, plan: StepPlan) -> None:
        """Give a running request pages for `length` tokens, preempting later ones if need be."""
        need = -(-length // self.limits.page_size) - len(request.pages)
        if need <= 0:
            return
        pages = self.pool.allocate(need)
        while pages is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return
            pages = self.pool.allocate(need)
        plan.pages.append((request.slot, len(request.pages), pages))
        request.pages.extend(pages)

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.phase = Phase.WAITING
        self._waiting.appendleft(request)
        self.stats.preemptions += 1

    # -- results ----------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Apply what the oldest plan not yet committed brought; an empty plan brings nothing."""
        if plan.empty:
            return
        planned = self._planned.popleft()
        for (request, epoch), chunk, token in zip(
            planned.prefill, plan.prefill, result.sampled, strict=True
        ):
            if request.epoch == epoch:
                self._commit_prefill(request, chunk, token)
        for (request, epoch), decoded in zip(planned.decode, result.decoded, strict=True):
            if request.epoch == epoch:
                self._commit_decode(request, decoded, plan.rows)
        self._observe(plan, planned, result)
        self.stats.steps += 1

    def _observe(self, plan: StepPlan, planned: _Planned, result: StepResult) -> None:
        """Let the choices of g and of the draft's scale learn from a step."""
        sound = [
            (request, decoded.accepted)
            for (request, _), decoded in zip(planned.decode, result.decoded, strict=True)
            if not decoded.fault
        ]
        if self.policy is not None and plan.decode:
            self.policy.observe(plan.rows, [accepted for _, accepted in sound])
        if self.draft_scale is not None and plan.draft_scale:
            noisy = [accepted for request, accepted in sound if request.params.temperature > 0]
            self.draft_scale.observe(plan.draft_scale, plan.rows, noisy)

    def _commit_prefill(self, request: Request, chunk: PrefillChunk, token: int | None) -> None:
        if token is not None and token < 0:
            self._finish(request, "error", [], error=_NAN)
            return
        request.computed += len(chunk.token_ids)
        request.ahead -= len(chunk.token_ids)
        self._index_pages(request)
        if token is None:
            return
        request.steps_ahead -= 1
        ids, reason = request.append([token], self.limits.eos, self.limits.max_model_len)
        self._emit(request, ids, reason, drafted=0, accepted=0)

    def _commit_decode(self, request: Request, decoded: DecodeResult, rows: int) -> None:
        if decoded.fault:
            self._finish(request, "error", [], error=_NAN)
            return
        committed = decoded.picked[: decoded.accepted + 1]
        request.computed += len(committed)
        request.ahead -= rows
        request.steps_ahead -= 1
        ids, reason = request.append(committed, self.limits.eos, self.limits.max_model_len)
        accepted = min(decoded.accepted, len(ids))
        self._count(rows, len(ids), accepted)
        if reason is not None:  # tokens past the end are committed on the device, not here
            request.computed = min(request.computed, len(request.tokens))
        self._index_pages(request)
        self._emit(request, ids, reason, drafted=rows - 1, accepted=accepted)

    def _emit(
        self,
        request: Request,
        ids: list[int],
        reason: FinishReason | None,
        *,
        drafted: int,
        accepted: int,
    ) -> None:
        self.stats.generated_tokens += len(ids)
        if reason is not None:
            self._finish(request, reason, ids, drafted=drafted, accepted=accepted)
            return
        self._events.append(progress(request, ids, None, drafted, accepted))

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        ids: list[int],
        *,
        error: str | None = None,
        drafted: int = 0,
        accepted: int = 0,
    ) -> None:
        del self._requests[request.request_id]
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
        else:
            self._release(request)
        event = progress(request, ids, reason, drafted, accepted)
        event.error = error
        self._events.append(event)
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1

    def _release(self, request: Request) -> None:
        """Take slot and pages away from a running request."""
        self._slots.append(request.slot)
        self.pool.release(request.leave_slot())
        self._running.remove(request)

    def _index_pages(self, request: Request) -> None:
        """Offer pages that just became full of committed tokens to the prefix index."""
        if not self.limits.prefix_cache:
            return
        full = request.computed // self.limits.page_size
        keys = request.page_keys(full, self.limits.page_size)
        for i in range(request.indexed, full):
            self.pool.index(request.pages[i], keys[i])
        request.indexed = full

    # -- counts -----------------------------------------------------------------------------

    def _count(self, rows: int, emitted: int, accepted: int) -> None:
        stats = self.stats.by_length.setdefault(rows, LengthStats())
        if not stats.accepted_per_position:
            stats.accepted_per_position = [0] * (rows - 1)
        stats.drafts += 1
        stats.emitted += emitted
        for position in range(accepted):
            stats.accepted_per_position[position] += 1

    def snapshot(self) -> EngineStats:
        """The counters, with the gauges as of now."""
        self.stats.running, self.stats.waiting = len(self._running), len(self._waiting)
        self.stats.pages_used = self.pool.used
        self.stats.pages_cached = self.pool.cached
        self.stats.policy = None if self.policy is None else self.policy.stats()
        self.stats.scale = None if self.draft_scale is None else self.draft_scale.stats()
        return self.stats


_NAN = "the model produced NaN logits for this request"
