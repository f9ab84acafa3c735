"""Every count that follows from a draft's block, in one value object.

Only this module reads `block_size`, `sample_from_anchor` and `num_speculative_tokens` of a draft
config. Fill-in layout: a block of g rows is the anchor and g−1 masks; row j ≥ 1
predicts the token at its own position, so g rows give g−1 proposals and g rows are verified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_serve.errors import ConfigError

__all__ = ["Geometry"]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Row counts of one decode step.

    Attributes:
        block: rows of the draft's trained block (anchor included).
        rows: g, the rows drafted and verified per step; 1 means no speculation.
    """

    block: int
    rows: int

    @classmethod
    def plain(cls) -> Geometry:
        """Decoding without a draft."""
        return cls(block=1, rows=1)

    @classmethod
    def from_draft(
        cls, fields: Mapping[str, Any], *, block_size: int | None, verify_length: int | None
    ) -> Geometry:
        """Read the block from a draft config.

        Args:
            fields: config.json of the draft with `dflash_config` laid over it.
            block_size: explicit override of the checkpoint's block.
            verify_length: rows per step; None takes the whole block.

        Raises:
            ConfigError: anchor-first layout, no block size anywhere, or a verify length outside
                1..block.
        """
        for flag in ("sample_from_anchor", "query_zero_predicts_next"):
            if fields.get(flag):
                raise ConfigError(
                    f"the draft sets {flag}: true (anchor-first layout); "
                    "supported: the fill-in layout (false)"
                )
        block = block_size if block_size is not None else fields.get("block_size")
        if block is None:
            raise ConfigError(
                "the draft config has no block_size; give it with --block-size "
                "(there is no default)"
            )
        if not isinstance(block, int) or isinstance(block, bool) or block < 1:
            raise ConfigError(f"block_size is {block!r}; it must be an integer of at least 1")
        rows = verify_length if verify_length is not None else block
        _check_rows(rows, block)
        return cls(block=block, rows=rows)

    def at(self, rows: int) -> Geometry:
        """The same draft with another number of rows per step."""
        _check_rows(rows, self.block)
        return dataclasses.replace(self, rows=rows)

    @property
    def query_rows(self) -> int:
        """Rows of the draft's forward pass."""
        return self.rows

    @property
    def proposals(self) -> int:
        """Tokens the draft proposes."""
        return self.rows - 1

    @property
    def verify_rows(self) -> int:
        """Rows of the target's forward pass."""
        return self.rows

    @property
    def lookahead(self) -> int:
        """Positions past the committed length that a step may write."""
        return self.rows


def _check_rows(rows: int, block: int) -> None:
    if not 1 <= rows <= block:
        raise ConfigError(f"verify_length is {rows}; allowed: 1 to the block size, {block}")
