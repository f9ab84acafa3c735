"""Choosing who runs the ranks."""

from __future__ import annotations

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient, Executor

__all__ = ["start_engine"]


def start_engine(config: EngineConfig, executor: Executor | None = None) -> EngineClient:
    """Load the models and return a ready engine; blocks until then.

    Args:
        config: the engine configuration.
        executor: an executor made elsewhere (the Ray one); None makes the one `config` names.

    Raises:
        ConfigError: anything about the configuration or the checkpoints that cannot be served.
        EngineDeadError: a rank died while loading.
    """
    if executor is None:
        executor = _make(config)
    return EngineClient(
        executor,
        start_timeout_s=config.start_timeout_s,
        hang_timeout_s=config.hang_timeout_s,
    )


def _make(config: EngineConfig) -> Executor:
    from dflash_serve.engine.inproc import InprocExecutor
    from dflash_serve.engine.mp import MpExecutor
    from dflash_serve.errors import ConfigError

    if config.executor == "inproc":
        return InprocExecutor(config)
    if config.executor == "mp":
        return MpExecutor(config)
    raise ConfigError("executor 'ray' runs inside the Ray Serve replica; use 'inproc' or 'mp' here")
