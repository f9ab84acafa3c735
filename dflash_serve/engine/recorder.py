"""The flight recorder: a rank's last steps, written to a file when its engine ends badly.

Plans, what they brought, and checksums; ids only, never text. The folder and the files can be
read by their owner alone, since ids are the clients' words (no torch).
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from dflash_serve import __version__
from dflash_serve.config import EngineConfig
from dflash_serve.errors import ConfigError
from dflash_serve.log import get_logger
from dflash_serve.scheduler.plan import StepPlan, StepResult

__all__ = ["FlightRecord", "Recorder", "StepRecord", "load_record"]

logger = get_logger(__name__)
_STEPS = 64
_FILES = 64
_PATTERN = "dflash-rank*.json"


class StepRecord(msgspec.Struct, kw_only=True):
    """One step.

    Attributes:
        result: None for a step that was under way at the end.
        checksum: of what it committed, 16 hexadecimal digits.
        launched: Unix time.
        seconds: from the launch to the reading of its results.
    """

    plan: StepPlan
    result: StepResult | None = None
    checksum: str | None = None
    launched: float
    seconds: float | None = None


class FlightRecord(msgspec.Struct, kw_only=True):
    """What a file holds.

    Attributes:
        package: version of this package that wrote it.
        reason: why it was written.
        written: local time, ISO 8601.
        config: fields of the engine's configuration.
        max_model_len, page_size: in tokens, as the engine resolved them.
        steps: oldest first.
    """

    format: int = 1
    package: str
    rank: int
    world_size: int
    reason: str
    written: str
    config: dict[str, Any]
    max_model_len: int
    page_size: int
    steps: list[StepRecord]


class Recorder:
    """Keeps the last steps of one rank in memory.

    Args:
        config: `record_dir` says where files go; None stands for a folder of this user's in the
            system's temporary one.
        max_model_len, page_size: in tokens, resolved.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        world_size: int,
        *,
        max_model_len: int,
        page_size: int,
    ) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._max_model_len = max_model_len
        self._page_size = page_size
        self._steps: deque[StepRecord] = deque(maxlen=_STEPS)
        self._open: dict[int, StepRecord] = {}
        self._path: Path | None = None

    def launched(self, plan: StepPlan) -> None:
        """A step is about to begin."""
        record = StepRecord(plan=plan, launched=time.time())
        self._steps.append(record)
        self._open[plan.step] = record

    def settled(self, step: int, result: StepResult, checksum: int) -> None:
        """A step's results have been read."""
        record = self._open.pop(step)
        record.result = result
        record.checksum = f"{checksum:016x}"
        record.seconds = time.time() - record.launched

    def dump(self, reason: str) -> Path:
        """Write the file, once for all reasons, and log where it is.

        Raises:
            OSError: the folder cannot be written.
            RuntimeError: `record_dir` begins with ~ and there is no home folder.
            ValueError: the reason or a path is no text that UTF-8 can hold.
        """
        if self._path is not None:
            return self._path
        record = FlightRecord(
            package=__version__,
            rank=self._rank,
            world_size=self._world_size,
            reason=reason,
            written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            config=dataclasses.asdict(self._config),
            max_model_len=self._max_model_len,
            page_size=self._page_size,
            steps=self._copy(),
        )
        folder = _folder(self._config)
        name = f"dflash-rank{self._rank}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.json"
        self._path = _write(folder / name, msgspec.json.encode(record))
        logger.error("the last %d steps are in %s", len(record.steps), self._path)
        _prune(folder)
        return self._path

    def _copy(self) -> list[StepRecord]:
        """The steps, although another thread may be adding one."""
        while True:
            try:
                return list(self._steps)
            except RuntimeError:
                continue


def load_record(path: Path) -> FlightRecord:
    """Read a file that a recorder wrote.

    Raises:
        ConfigError: there is no such file, or it is none of a recorder's.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=FlightRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no flight record that can be read: {error}") from error


def _folder(config: EngineConfig) -> Path:
    if config.record_dir is not None:
        folder = Path(config.record_dir).expanduser()
    else:
        folder = Path(tempfile.gettempdir()) / f"dflash-records-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; set record_dir to your own")
    return folder


def _write(path: Path, data: bytes) -> Path:
    """Write a file that nobody else can read; it appears whole or not at all."""
    draft = path.with_suffix(".part")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return draft.replace(path)


def _prune(folder: Path) -> None:
    """Keep the newest files: an engine that dies again and again must not fill the disk."""
    files = sorted(folder.glob(_PATTERN), key=lambda file: file.stat().st_mtime)
    for file in files[:-_FILES]:
        file.unlink(missing_ok=True)
