"""The draft's mask token: from its config, from the tokenizer, or newly made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dflash_serve.engine.vocabulary import Vocabulary
from tests.tiny import TinyPair
from tests.unit.folders import REMOVED, edit_config, write_tokenizer
from tests.unit.loading import load, refusal

Copy = Callable[[str], TinyPair]
WORDS = {"?": 0, "a": 1, "b": 2}
MASK = "<|MASK|>"


def pair_with(
    private: Copy,
    mask_id: object,
    tokens: Mapping[str, int] | None = None,
    mask_token: object = REMOVED,
) -> TinyPair:
    """A pair whose draft gives this id, and whose target has a tokenizer with these tokens."""
    pair = private("qwen3")
    fields = {"mask_token_id": mask_id, "mask_token": mask_token}
    edit_config(Path(pair.draft), {f"dflash_config.{n}": v for n, v in fields.items()})
    if tokens is not None:
        write_tokenizer(Path(pair.target), tokens)
    return pair


@pytest.mark.parametrize("tokens", [None, WORDS, WORDS | {MASK: 299}], ids=["none", "other", "has"])
def test_given_id_is_used(tokens: Mapping[str, int] | None, private: Copy) -> None:
    assert load(pair_with(private, 299, tokens)).settings.mask_id == 299


@pytest.mark.parametrize("tokens", [None, WORDS], ids=["no tokenizer", "tokenizer"])
def test_given_id_outside_the_embedding_is_refused(
    tokens: Mapping[str, int] | None, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refusal(pair_with(private, 320, tokens), monkeypatch)
    assert "320" in text
    assert "allowed: 0 to 319" in text


def test_given_id_that_the_tokenizer_contradicts_is_refused(
    private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refusal(pair_with(private, 299, WORDS | {MASK: 7}), monkeypatch)
    assert "299" in text
    assert "7" in text
    assert MASK in text


@pytest.mark.parametrize("mask_id", [-1, "4", True, 4.0], ids=repr)
def test_given_id_that_is_no_token_id_is_refused(
    mask_id: object, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repr(mask_id) in refusal(pair_with(private, mask_id), monkeypatch)


def test_missing_id_without_a_tokenizer_is_refused(
    private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refusal(pair_with(private, REMOVED), monkeypatch)
    assert "tokenizer.json" in text
    assert "mask_token_id" in text


def test_missing_id_comes_from_the_tokenizer(private: Copy) -> None:
    assert load(pair_with(private, REMOVED, WORDS | {MASK: 77})).settings.mask_id == 77


def test_missing_id_is_looked_up_under_the_drafts_own_token(private: Copy) -> None:
    pair = pair_with(private, REMOVED, WORDS | {"[M]": 5, MASK: 6}, mask_token="[M]")
    assert load(pair).settings.mask_id == 5


def test_missing_id_of_an_unknown_token_is_the_next_free_one(private: Copy) -> None:
    settings = load(pair_with(private, None, WORDS)).settings
    assert settings.mask_id == 3
    assert settings.valid_vocab == 3, "the new id must never be produced"


def test_next_free_id_outside_the_embedding_is_refused(
    private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refusal(pair_with(private, REMOVED, WORDS | {"last": 319}), monkeypatch)
    assert "320" in text
    assert "allowed: 0 to 319" in text


@pytest.mark.parametrize("token", ["", 5, None], ids=repr)
def test_mask_token_that_is_no_text_is_refused(
    token: object, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_with(private, 299, mask_token=token)
    assert repr(token) in refusal(pair, monkeypatch)


def test_vocabulary_counts_to_the_largest_id(tmp_path: Path) -> None:
    assert Vocabulary.load(str(tmp_path)) is None
    write_tokenizer(tmp_path, WORDS | {"far": 40})
    found = Vocabulary.load(str(tmp_path))
    assert found is not None
    assert found.size == 41
    assert found.ids["far"] == 40
