"""Every error the package raises on purpose.

    DFlashError
    ├── ConfigError            a setting or a model config that cannot be served
    │   ├── CheckpointError    tensors or files that do not fit their config
    │   ├── PairError          a target and a draft that do not belong together
    │   └── CapacityError      a memory budget too small for the model
    ├── RequestError           a request the server must refuse (HTTP 400); names the field
    │   ├── ModelNotFoundError an unknown model name (HTTP 404)
    │   ├── ConflictError      what is asked for is being done already (HTTP 409)
    │   └── ForbiddenError     what the operator has not switched on (HTTP 403)
    ├── OverloadedError        no room now, try again later (HTTP 429)
    ├── ConsensusError         the ranks committed different tokens; ends the engine
    ├── EngineDeadError        a rank died or the engine stopped (HTTP 503)
    │   └── UnavailableError   no engine is there to take a request yet, or any more (HTTP 503)
    └── EngineStalledError     work is pending and no step completes (HTTP 503)

Each text holds the value given, what is allowed, and what to do.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ConflictError",
    "ConsensusError",
    "DFlashError",
    "EngineDeadError",
    "EngineStalledError",
    "ForbiddenError",
    "ModelNotFoundError",
    "OverloadedError",
    "PairError",
    "RequestError",
    "UnavailableError",
]


class DFlashError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(DFlashError, ValueError):
    """A setting or model config that cannot be served."""


class CheckpointError(ConfigError):
    """Missing, unexpected, truncated or misshapen tensors or files."""


class PairError(ConfigError):
    """A target and a draft that do not belong together."""


class CapacityError(ConfigError):
    """A memory budget too small; the text names the smallest that works."""


class RequestError(DFlashError, ValueError):
    """A request that must be refused; `param` is the request field at fault.

    Args:
        message: what was given, what is allowed.
        param: the name of the request field, or None when no single field is at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(RequestError):
    """A model name this server does not serve."""


class ConflictError(RequestError):
    """What is asked for is being done already; try again when that is over."""


class ForbiddenError(RequestError):
    """What the operator has not switched on."""


class OverloadedError(DFlashError):
    """No room for the request now; `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(DFlashError):
    """A rank process died, or the engine was shut down."""


class UnavailableError(EngineDeadError):
    """No engine can take a request now: it is being started, or it is leaving.

    Nothing was computed for the request, so that it may be sent again, here or elsewhere.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConsensusError(DFlashError):
    """The ranks of one engine committed different tokens; the front end sees EngineDeadError."""


class EngineStalledError(DFlashError):
    """Work is pending but no step has completed within the time allowed."""
