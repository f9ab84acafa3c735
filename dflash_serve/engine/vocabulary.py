"""The tokenizer's vocabulary, as far as the engine needs it: its size and the mask token."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dflash_serve.errors import ConfigError
from dflash_serve.log import get_logger
from dflash_serve.model_config import DraftConfig

__all__ = ["Vocabulary", "mask_token_id"]

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Tokens and ids of a tokenizer.

    Attributes:
        ids: id of every token, added ones (the tokenizer's own mask token too) included.
    """

    ids: dict[str, int]

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values(), default=-1) + 1

    @classmethod
    def load(cls, folder: str) -> Vocabulary | None:
        """Read tokenizer.json of a checkpoint; None when it has none."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            return None
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
        return cls(ids)


def mask_token_id(draft: DraftConfig, vocab_size: int, vocabulary: Vocabulary | None) -> int:
    """The id of the draft's mask token.

    Args:
        vocab_size: rows of the target's embedding; it is never resized.
        vocabulary: the target's tokenizer, or None.

    Raises:
        ConfigError: an id outside the embedding, one that the tokenizer contradicts, or none
            where no tokenizer can supply it.
    """
    known = None if vocabulary is None else vocabulary.ids.get(draft.mask_token)
    mask_id = draft.mask_token_id
    if mask_id is None:
        mask_id = _from_tokenizer(draft, vocabulary, known)
    elif known is not None and known != mask_id:
        raise ConfigError(
            f"mask_token_id is {mask_id}, but the tokenizer gives {draft.mask_token!r} the id "
            f"{known}; correct one of them in the draft's config"
        )
    if mask_id >= vocab_size:
        raise ConfigError(
            f"the mask token's id is {mask_id}; the target's embedding has {vocab_size} rows, "
            f"allowed: 0 to {vocab_size - 1}"
        )
    return mask_id


def _from_tokenizer(draft: DraftConfig, vocabulary: Vocabulary | None, known: int | None) -> int:
    if vocabulary is None:
        raise ConfigError(
            f"the draft config has no mask_token_id and the target has no tokenizer.json to look "
            f"{draft.mask_token!r} up in; set dflash_config.mask_token_id"
        )
    if known is not None:
        return known
    logger.info(
        "mask token %r is not in the tokenizer; it takes the next free id, %d",
        draft.mask_token,
        vocabulary.size,
    )
    return vocabulary.size
