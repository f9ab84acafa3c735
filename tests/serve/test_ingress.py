import asyncio

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    RayTaskError,
)
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RequestCancelledError,
)

from dflash_serve.api.protocol import Delta, GenerationRequest
from dflash_serve.errors import (
    EngineDeadError,
    EngineStalledError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from dflash_serve.sampling import SamplingParams
from dflash_serve.serve import wire
from dflash_serve.serve.app import assemble
from dflash_serve.serve.ingress import HandleBackend, translate_error
from dflash_serve.serve.journal import ResumeLimits
from dflash_serve.serve.room import Room
from dflash_serve.serve.settings import ServeSettings


class FakeStream:
    """What a deployment handle returns for a streaming call."""

    def __init__(self, items, delay_s=0.0):
        self._items = iter(items)
        self._delay_s = delay_s
        self.cancelled = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(self._delay_s)
        item = next(self._items, None)
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self):
        self.cancelled = True


class FakeHandle:
    """A deployment handle over one prepared stream."""

    def __init__(self, *streams, answers=()):
        self._streams = list(streams)
        self.requests = []
        self._answers = answers

    def options(self, **_):
        return self

    def remote(self, data, _sender):
        self.requests.append(wire.decode_request(data))
        return self._streams.pop(0)

    def broadcast(self, _method):
        return self

    async def results_async(self, *, timeout_s, return_exceptions):
        if isinstance(self._answers, BaseException):
            raise self._answers
        return list(self._answers)


def backend(handle, wait_s=5.0, total_s=5.0, attempts=0, **options):
    limits = ResumeLimits(attempts=attempts, wait_s=wait_s, total_s=total_s)
    return HandleBackend({"m": handle}, limits, **options)


def request(model="m"):
    return GenerationRequest(
        request_id="a", model=model, prompt=[1], params=SamplingParams(max_tokens=2)
    )


def deltas(*reasons):
    return [wire.encode_delta(Delta(token_ids=[1], finish_reason=r)) for r in reasons]


def task_error(cause):
    return RayTaskError("generate", "traceback", cause)


async def collect(target, model="m"):
    return [delta async for delta in target.generate(request(model))]


async def test_finished_stream_is_not_cancelled():
    stream = FakeStream(deltas(None, "length"))
    assert len(await collect(backend(FakeHandle(stream)))) == 2
    assert not stream.cancelled


async def test_leaving_early_cancels_the_replica():
    stream = FakeStream(deltas(None, None, "length"))
    found = backend(FakeHandle(stream)).generate(request())
    await anext(found)
    await found.aclose()
    assert stream.cancelled


async def test_cancelled_consumer_cancels_the_replica():
    stream = FakeStream(deltas(None), delay_s=60)
    task = asyncio.ensure_future(collect(backend(FakeHandle(stream))))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.cancelled


async def test_errors_sent_as_data_are_raised():
    stream = FakeStream([wire.encode_error(RequestError("bad", "top_p"))])
    with pytest.raises(RequestError) as caught:
        await collect(backend(FakeHandle(stream)))
    assert caught.value.param == "top_p"


async def test_unknown_model_is_named():
    with pytest.raises(ModelNotFoundError, match="'x' is not served here; served: m"):
        await collect(backend(FakeHandle()), "x")


async def test_each_models_requests_go_to_its_own_replicas():
    handles = {name: FakeHandle(FakeStream(deltas("length"))) for name in ("m", "n")}
    target = HandleBackend(handles, ResumeLimits(attempts=0, wait_s=5.0, total_s=5.0))
    await collect(target, "n")
    assert target.models() == ["m", "n"]
    assert [len(handle.requests) for handle in handles.values()] == [0, 1]


async def test_health_names_the_model_that_has_no_healthy_replica():
    handles = {"m": FakeHandle(answers=[None]), "n": FakeHandle(answers=TimeoutError())}
    target = HandleBackend(handles, ResumeLimits(attempts=0, wait_s=5.0, total_s=5.0))
    with pytest.raises(UnavailableError, match="no replica of n"):
        await target.check_health()


def ingress_of(**changes):
    """The ingress that settings bind, as Serve sees it."""
    models = [{"model": "a", "target": "/m/a"} | changes, {"model": "b", "application": "b"}]
    return assemble(ServeSettings(models=models))._bound_deployment


def test_the_ingress_is_told_nothing_of_what_only_replicas_use():
    plain = ingress_of()
    changed = ingress_of(rank_cpus=3, replicas=2, max_running=4, graceful_shutdown_timeout_s=9)
    assert changed.init_args[0] == plain.init_args[0]
    assert changed._deployment_config == plain._deployment_config
    sleeper = ingress_of(autoscaling={"min_replicas": 0, "max_replicas": 1})
    assert sleeper.init_args[0].sleepers == ("a",)


def test_a_new_ingress_is_there_before_the_old_one_goes():
    assert ingress_of()._deployment_config.max_surge_percent == 100


async def test_waiting_too_long_for_the_first_token_is_overload():
    stream = FakeStream(deltas("length"), delay_s=60)
    with pytest.raises(OverloadedError, match="queue_timeout_s"):
        await collect(backend(FakeHandle(stream), wait_s=0.05))
    assert stream.cancelled


async def test_a_request_that_takes_too_long_is_ended():
    stream = FakeStream(deltas(None, None, None, None), delay_s=0.05)
    with pytest.raises(EngineStalledError, match="request_timeout_s"):
        await collect(backend(FakeHandle(stream), total_s=0.12))
    assert stream.cancelled


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ActorDiedError(), EngineDeadError),
        (task_error(ActorDiedError()), EngineDeadError),
        (task_error(RequestError("bad", "n")), RequestError),
        (BackPressureError(5, 4, 429, 3.0), OverloadedError),
        (RequestCancelledError("r"), EngineDeadError),
        (task_error(asyncio.CancelledError()), EngineDeadError),
        (ObjectLostError("ab", None, ""), EngineDeadError),
    ],
)
async def test_rays_errors_become_ours(error, expected):
    with pytest.raises(expected):
        await collect(backend(FakeHandle(FakeStream([error]))))


def test_retry_after_and_param_survive_translation():
    assert translate_error(BackPressureError(5, 4, 429, 3.0), "m").retry_after_s == 3.0
    assert translate_error(task_error(RequestError("bad", "n")), "m").param == "n"
    unknown = KeyError("x")
    assert translate_error(unknown, "m") is unknown


async def test_health_passes_while_one_replica_is_healthy():
    await backend(FakeHandle(answers=[None, EngineDeadError("x")])).check_health()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([task_error(EngineStalledError("stuck"))], EngineStalledError),
        ([], EngineDeadError),
        (TimeoutError(), EngineDeadError),
        (DeploymentUnavailableError("d"), EngineDeadError),
    ],
)
async def test_health_fails_without_a_healthy_replica(answers, expected):
    with pytest.raises(expected):
        await backend(FakeHandle(answers=answers)).check_health()


async def test_status_leaves_out_replicas_that_do_not_answer():
    assert await backend(FakeHandle(answers=[ActorDiedError()])).status() == []


async def test_a_dead_replicas_request_goes_on_at_another():
    first = FakeStream([*deltas(None, None), ActorDiedError()])
    second = FakeStream(deltas(None, "length"))
    handle = FakeHandle(first, second)
    assert len(await collect(backend(handle, attempts=1))) == 4
    assert [r.emitted_ids for r in handle.requests] == [[], [1, 1]]
    assert handle.requests[0].request_id != handle.requests[1].request_id


async def test_what_an_unreachable_replica_works_on_is_cancelled_before_it_goes_elsewhere():
    order = []

    class Unreachable(FakeStream):
        def cancel(self):
            order.append("cancel")
            self._items = iter([RequestCancelledError("r")])

    class Handle(FakeHandle):
        def remote(self, data, sender):
            order.append("submit")
            return super().remote(data, sender)

    first = Unreachable([*deltas(None), ActorUnavailableError("gone", None)])
    await collect(backend(Handle(first, FakeStream(deltas("length"))), attempts=1))
    assert order == ["submit", "cancel", "submit"]


async def test_a_replica_without_an_engine_is_passed_by():
    room = Room(believed_s=60)
    refusal = FakeStream([wire.encode_error(UnavailableError("being started"), unable="r1")])
    full = FakeStream([wire.encode_error(OverloadedError("full"))])
    target = backend(FakeHandle(refusal, full), room=room)
    with pytest.raises(OverloadedError):
        await collect(target)
    assert not room.maybe_at("r1")
    assert room.maybe_at("r2")


async def test_health_of_a_sleeping_model_passes_without_a_replica():
    asleep = backend(
        FakeHandle(answers=DeploymentUnavailableError(DeploymentID("Replica"))), sleepers=["m"]
    )
    await asleep.check_health()
    assert asleep.may_sleep("m")
    assert await asleep.status() == []


@pytest.mark.parametrize("answers", [TimeoutError(), [task_error(EngineDeadError("rank 1 died"))]])
async def test_health_of_a_model_that_may_sleep_fails_with_its_replicas(answers):
    awake = backend(FakeHandle(answers=answers), sleepers=["m"])
    with pytest.raises(EngineDeadError):
        await awake.check_health()


async def test_a_replica_that_cannot_is_asked_again_later():
    room = Room(believed_s=0.0)
    room.none_at("r1")
    assert room.maybe_at("r1")


async def test_without_any_replica_a_request_waits_and_then_says_so():
    streams = [FakeStream([DeploymentUnavailableError("d")]) for _ in range(100)]
    with pytest.raises(UnavailableError, match="no replica of m can take requests now"):
        await collect(backend(FakeHandle(*streams), wait_s=0.2))


async def test_own_metrics_are_there_before_the_first_failure():
    page = backend(FakeHandle()).own_metrics().decode()
    assert 'dflash_requests_resumed_total{engine="all",model_name="m"} 0.0' in page
