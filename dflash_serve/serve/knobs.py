"""What a deployment may change while it runs: Serve's `user_config` of a replica deployment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_serve.errors import ConfigError
from dflash_serve.scheduler.tuning import Tuning

__all__ = ["SoftKnobs"]


class SoftKnobs(BaseModel):
    """Soft knobs of one replica; what is left out is as the engine was started.

    Attributes:
        verify_length: g of every step, one that the engine was started for.
        speculation: False verifies one row a step and drafts nothing.
        max_running: requests with a slot at once, at most as many as the engine was sized for.
        log_level: of the replica's process; the ranks keep theirs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    verify_length: int | None = Field(default=None, ge=1)
    speculation: bool = True
    max_running: int | None = Field(default=None, ge=1)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @classmethod
    def parse(cls, given: dict[str, Any] | None) -> SoftKnobs:
        """Read a `user_config`.

        Raises:
            ConfigError: names each field at fault, those that are soft, and where the others go.
        """
        try:
            return cls.model_validate(given or {})
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(str(part) for part in fault['loc'])} is {fault['input']!r}: "
                f"{fault['msg']}"
                for fault in error.errors()
            )
            raise ConfigError(
                f"user_config: {faults}. Soft knobs are {', '.join(cls.model_fields)}; anything "
                "else belongs under args and takes a new deployment"
            ) from error

    def tuning(self) -> Tuning:
        """The part that the engine applies between two steps."""
        return Tuning(
            verify_length=self.verify_length,
            speculation=self.speculation,
            max_running=self.max_running,
        )
