"""The detokenizer returns whole characters and, joined, what decoding at once gives."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from dflash_serve.api.codec import TextCodec
from dflash_serve.api.detokenize import Detokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = [
    "The quick brown fox",
    "příliš žluťoučký kůň",
    "漢字とかな",
    "a 😀🎉 b👩‍👩‍👧 c",
    "  leading and  double   spaces \n\n\ttabs",
    "def f(x):\n    return x ** 2  # ≥ 0\n",
]


def streamed(codec: TextCodec, token_ids: list[int]) -> list[str]:
    detokenizer = codec.detokenizer([])
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_equal_the_text_and_hold_no_half_character(
    codec: TextCodec, text: str
) -> None:
    pieces = streamed(codec, codec.encode(text))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_random_ids_give_the_same_text_as_decoding_all_at_once(codec: TextCodec) -> None:
    generator = random.Random(5)
    for _ in range(200):
        token_ids = [generator.randrange(codec.size or 0) for _ in range(30)]
        assert "".join(streamed(codec, token_ids)) == codec.decode(token_ids)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_character_cut_by_the_end_becomes_a_replacement_mark(
    codec: TextCodec, length: int
) -> None:
    token_ids = codec.encode("😀")
    assert len(token_ids) == 4, "the tokenizer must spell this character byte by byte"
    pieces = streamed(codec, token_ids[:length])
    assert pieces == [*[""] * length, REPLACEMENT]


def test_a_resumed_request_goes_on_inside_a_character(codec: TextCodec) -> None:
    token_ids = codec.encode("ab😀c")
    detokenizer = codec.detokenizer(token_ids[:4])
    assert "".join(detokenizer.push(token_id) for token_id in token_ids[4:]) == "😀c"


def test_special_tokens_have_no_text(codec: TextCodec) -> None:
    fox = codec.encode("fox")
    assert "".join(streamed(codec, [1, *fox, 0, 0, *fox, 2])) == "foxfox"


def test_a_long_run_of_special_tokens_does_not_make_decoding_longer(codec: TextCodec) -> None:
    longest = 0

    def decode(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return codec.decode(token_ids)

    fox = codec.encode(" fox")
    detokenizer = Detokenizer(decode)
    token_ids = [*fox, *[0] * 500, *fox]
    assert "".join(detokenizer.push(token_id) for token_id in token_ids) == " fox fox"
    assert longest < 40


def test_without_a_tokenizer_every_text_is_empty() -> None:
    detokenizer = TextCodec(None).detokenizer([3])
    assert [detokenizer.push(1), detokenizer.flush()] == ["", ""]


def test_word_pieces_with_byte_fallback_keep_their_spaces() -> None:
    words = ["<unk>", "▁the", "▁fox", "es", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    token_ids = [1, 2, 3, *(4 + byte for byte in "ž😀".encode()), 2]
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert "".join(pieces) == "the foxesž😀 fox" == tokenizer.decode(token_ids)
    assert not any(REPLACEMENT in piece for piece in pieces)
