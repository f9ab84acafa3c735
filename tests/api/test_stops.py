"""Stop strings: where the text ends, what is held back, which ids are counted."""

from __future__ import annotations

import random

import pytest

from dflash_serve.api.stops import StopBuffer


def run(stops: list[str], blocks: list[list[str]]) -> tuple[str, list[int], bool, list[str]]:
    """Push blocks of token texts (ids are running numbers), releasing after every block."""
    buffer = StopBuffer(stops)
    texts: list[str] = []
    token_ids: list[int] = []
    number = 0
    for block in blocks:
        for text in block:
            buffer.push(number, text)
            number += 1
        released = buffer.release()
        texts.append(released.text)
        token_ids += released.token_ids
        if buffer.matched:
            break
    released = buffer.flush()
    texts.append(released.text)
    token_ids += released.token_ids
    return "".join(texts), token_ids, buffer.matched, texts


def cut_by_characters(stops: list[str], text: str) -> str | None:
    """Reference: the text before the match that ends first, the longest of several."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return None


def test_a_stop_early_in_a_large_block_ends_the_text_there() -> None:
    tokens = ["a", "XY", *"bcdefghijklmno"]
    assert len(tokens) == 16
    assert run(["XY"], [tokens])[:3] == ("a", [0, 1], True)


def test_a_stop_that_begins_in_the_block_before_is_found() -> None:
    text, token_ids, matched, texts = run(["XY"], [["a", "bX"], ["Yc", "d"]])
    assert (text, token_ids, matched) == ("ab", [0, 1], True)
    assert "X" not in "".join(texts)


def test_a_stop_over_three_blocks_is_never_begun() -> None:
    _, _, matched, texts = run(["own fox"], [["my "], ["ow", "n"], [" f"], ["ox", "!"]])
    assert matched
    assert texts == ["my ", "", "", "", ""]


def test_held_text_is_delivered_when_the_stop_does_not_complete() -> None:
    text, token_ids, matched, _ = run(["own fox"], [["my own"], [" f"], ["ig"]])
    assert (text, token_ids, matched) == ("my own fig", [0, 1, 2], False)


def test_held_text_is_delivered_when_the_stream_ends() -> None:
    assert run(["own fox"], [["my own f"]])[:3] == ("my own f", [0], False)


def test_a_stop_at_the_very_start_leaves_no_text_but_counts_its_token() -> None:
    assert run(["ab"], [["a", "b", "c"]])[:3] == ("", [0], True)


def test_text_is_released_by_whole_tokens_only() -> None:
    buffer = StopBuffer(["ZZ"])
    buffer.push(0, "ab")
    buffer.push(1, "cdZ")
    assert buffer.release() == ("ab", [0])
    buffer.push(2, "e")
    assert buffer.release() == ("cdZe", [1, 2])


def test_without_stops_everything_is_released_at_once() -> None:
    buffer = StopBuffer([])
    buffer.push(7, "abc")
    assert buffer.release() == ("abc", [7])


def test_the_bytes_of_a_character_in_which_the_stop_begins_are_all_counted() -> None:
    assert run(["😀"], [["a", "", "", "😀", "b"]])[:3] == ("a", [0, 1, 2, 3], True)


def test_a_stop_can_end_in_text_that_came_without_an_id() -> None:
    buffer = StopBuffer(["b!"])
    buffer.push(0, "ab")
    buffer.push_text("!")
    assert buffer.matched
    assert buffer.flush() == ("a", [0])


def test_of_two_stops_the_one_that_ends_first_wins() -> None:
    assert run(["bcde", "c"], [["abcde"]])[0] == "ab"
    assert run(["bc", "c"], [["abcde"]])[0] == "a"


@pytest.mark.parametrize("seed", range(20))
def test_the_result_does_not_depend_on_how_the_text_is_cut(seed: int) -> None:
    generator = random.Random(seed)

    def word(longest: int) -> str:
        return "".join(generator.choices("ab", k=generator.randint(1, longest)))

    for _ in range(50):
        stops = [word(5) for _ in range(generator.randint(1, 3))]
        tokens = [generator.choice(["", word(4)]) for _ in range(12)]
        blocks: list[list[str]] = [[]]
        for token in tokens:
            blocks[-1].append(token)
            if generator.random() < 0.4:
                blocks.append([])
        whole = "".join(tokens)
        text, token_ids, matched, _ = run(stops, blocks)
        expected = cut_by_characters(stops, whole)
        assert matched == (expected is not None)
        assert text == (whole if expected is None else expected)
        assert token_ids == list(range(len(token_ids)))
        decoded = "".join(tokens[: len(token_ids)])
        assert decoded.startswith(text)
        if expected is not None:
            assert len("".join(tokens[: len(token_ids) - 1])) <= len(text)
            assert len(decoded) > len(text)
