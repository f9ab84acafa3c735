"""What crosses a deployment handle: requests, deltas and errors, as msgpack bytes.

Errors travel as data. An exception raised in a replica would reach the ingress wrapped by Ray,
and Serve would log a traceback for every mistake a client makes.
"""

from __future__ import annotations

import msgspec

from dflash_serve import errors
from dflash_serve.api.protocol import (
    Delta,
    GenerationRequest,
    ReplicaStatus,
    TraceFiles,
    TraceRequest,
)
from dflash_serve.errors import DFlashError, OverloadedError, RequestError, UnavailableError

__all__ = [
    "decode_delta",
    "decode_order",
    "decode_request",
    "decode_status",
    "decode_traced",
    "encode_delta",
    "encode_error",
    "encode_order",
    "encode_request",
    "encode_status",
    "encode_traced",
    "unable_replica",
]


class _Failure(msgspec.Struct, omit_defaults=True):
    kind: str
    message: str
    param: str | None = None
    retry_after_s: float = 1.0
    replica: str | None = None


class _Traced(msgspec.Struct, omit_defaults=True):
    """What came of a trace."""

    files: TraceFiles | None = None
    failure: _Failure | None = None


class _Item(msgspec.Struct, omit_defaults=True):
    """One element of a stream: a delta or the error that ends it."""

    delta: Delta | None = None
    failure: _Failure | None = None


_encoder = msgspec.msgpack.Encoder()
_request = msgspec.msgpack.Decoder(GenerationRequest)
_item = msgspec.msgpack.Decoder(_Item)
_order = msgspec.msgpack.Decoder(TraceRequest)
_traced = msgspec.msgpack.Decoder(_Traced)
_status = msgspec.msgpack.Decoder(ReplicaStatus)


def encode_request(request: GenerationRequest) -> bytes:
    """Serialise a request."""
    return _encoder.encode(request)


def decode_request(data: bytes) -> GenerationRequest:
    """Inverse of `encode_request`."""
    return _request.decode(data)


def encode_delta(delta: Delta) -> bytes:
    """Serialise one element of a stream."""
    return _encoder.encode(_Item(delta=delta))


def encode_error(error: DFlashError, unable: str | None = None) -> bytes:
    """Serialise the error that ends a stream.

    Args:
        unable: the replica that sends it, where it can take no request for the time being.
    """
    return _encoder.encode(_Item(failure=_failure(error, unable)))


def _failure(error: DFlashError, unable: str | None = None) -> _Failure:
    return _Failure(
        kind=type(error).__name__,
        message=str(error),
        param=getattr(error, "param", None),
        retry_after_s=getattr(error, "retry_after_s", 1.0),
        replica=unable,
    )


def decode_delta(data: bytes) -> Delta:
    """Inverse of `encode_delta`.

    Raises:
        DFlashError: the element holds an error; it is raised as the class it was.
    """
    item = _item.decode(data)
    if item.failure is not None:
        raise _rebuild(item.failure)
    assert item.delta is not None, "a stream element holds a delta or an error"
    return item.delta


def unable_replica(data: bytes) -> str | None:
    """The replica that says, with the error in this element, that it can take no request."""
    failure = _item.decode(data).failure
    return None if failure is None else failure.replica


def encode_status(status: ReplicaStatus) -> bytes:
    """Serialise a replica's status."""
    return _encoder.encode(status)


def decode_status(data: bytes) -> ReplicaStatus:
    """Inverse of `encode_status`."""
    return _status.decode(data)


def encode_order(order: TraceRequest) -> bytes:
    """Serialise the order of a trace."""
    return _encoder.encode(order)


def decode_order(data: bytes) -> TraceRequest:
    """Inverse of `encode_order`."""
    return _order.decode(data)


def encode_traced(outcome: TraceFiles | DFlashError) -> bytes:
    """Serialise what came of a trace."""
    if isinstance(outcome, DFlashError):
        return _encoder.encode(_Traced(failure=_failure(outcome)))
    return _encoder.encode(_Traced(files=outcome))


def decode_traced(data: bytes) -> TraceFiles:
    """Inverse of `encode_traced`.

    Raises:
        DFlashError: there is no trace; the error is raised as the class it was.
    """
    traced = _traced.decode(data)
    if traced.failure is not None:
        raise _rebuild(traced.failure)
    assert traced.files is not None, "it holds files or an error"
    return traced.files


def _rebuild(failure: _Failure) -> DFlashError:
    kind = getattr(errors, failure.kind) if failure.kind in errors.__all__ else DFlashError
    if issubclass(kind, RequestError):
        return kind(failure.message, failure.param)
    if issubclass(kind, OverloadedError | UnavailableError):
        return kind(failure.message, failure.retry_after_s)
    error: DFlashError = kind(failure.message)
    return error
