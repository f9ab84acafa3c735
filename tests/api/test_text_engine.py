"""The text side of one engine: stop strings, counts, limits, aborts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from dflash_serve.api.codec import TextCodec
from dflash_serve.api.protocol import Delta
from dflash_serve.api.replica import LocalBackend, TextEngine
from dflash_serve.errors import (
    DFlashError,
    EngineDeadError,
    EngineStalledError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
)
from tests.api.fakes import MAX_MODEL_LEN, MODEL, FakeEngine, completion, engine_info, gather

Make = Callable[..., tuple[TextEngine, FakeEngine]]
STORY = "Once upon a time there was a small brown fox that liked its own fox hole."


def total(deltas: list[Delta]) -> tuple[str, list[int], str | None]:
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
    assert len(reasons) == 1, "exactly one delta ends a choice"
    assert deltas[-1].finish_reason is not None
    return (
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        reasons[0],
    )


@pytest.mark.parametrize("block", [1, 3, 16])
async def test_a_stop_string_inside_a_block_cuts_text_and_ids_alike(
    make_text_engine: Make, codec: TextCodec, block: int
) -> None:
    text_engine, engine = make_text_engine(STORY, block)
    text, token_ids, reason = total(
        await gather(text_engine.generate(completion(stop=("own fox",))))
    )
    assert (text, reason) == ("Once upon a time there was a small br", "stop")
    assert codec.decode(token_ids).startswith(text)
    assert not codec.decode(token_ids[:-1]).startswith(text + "o")
    assert engine.aborted == ["r"], "the engine must not go on behind the stop string"
    assert text_engine.status().stats.finished["stop"] == 1


@pytest.mark.parametrize("max_tokens", range(1, 21))
async def test_max_tokens_gives_exactly_that_many_ids(
    make_text_engine: Make, max_tokens: int
) -> None:
    text_engine, _ = make_text_engine(STORY, 8)
    deltas = await gather(text_engine.generate(completion(max_tokens=max_tokens)))
    _, token_ids, reason = total(deltas)
    assert (len(token_ids), reason) == (max_tokens, "length")
    for delta in deltas:
        assert delta.accepted <= len(delta.token_ids)


async def test_the_end_of_sequence_id_is_counted_and_has_no_text(codec: TextCodec) -> None:
    fox = codec.encode("the fox")
    text_engine = TextEngine(FakeEngine([*fox, 0, *fox], 16), codec, MODEL)
    assert total(await gather(text_engine.generate(completion()))) == ("the fox", [*fox, 0], "stop")


async def test_a_stop_string_before_the_end_of_sequence_in_one_block_wins(
    codec: TextCodec,
) -> None:
    engine = FakeEngine([*codec.encode("the fox!"), 0], 16)
    text_engine = TextEngine(engine, codec, MODEL)
    text, token_ids, reason = total(await gather(text_engine.generate(completion(stop=("ox",)))))
    assert (text, reason) == ("the f", "stop")
    assert 0 not in token_ids
    assert engine.aborted == []


async def test_text_held_for_a_stop_string_is_delivered_at_the_length_limit(
    make_text_engine: Make, codec: TextCodec
) -> None:
    text_engine, _ = make_text_engine("my own f", 1)
    text, token_ids, reason = total(
        await gather(text_engine.generate(completion(stop=("own fox",))))
    )
    assert (text, reason) == ("my own f", "length")
    assert token_ids == codec.encode("my own f")


@pytest.mark.parametrize("block", [1, 2, 16])
async def test_a_character_over_two_blocks_arrives_whole(
    make_text_engine: Make, block: int
) -> None:
    text_engine, _ = make_text_engine("a😀漢b", block)
    deltas = await gather(text_engine.generate(completion()))
    assert total(deltas)[0] == "a😀漢b"
    assert not any("\N{REPLACEMENT CHARACTER}" in delta.text for delta in deltas)


async def test_a_character_cut_by_max_tokens_becomes_a_replacement_mark(
    make_text_engine: Make,
) -> None:
    text_engine, _ = make_text_engine("a😀", 2)
    text, token_ids, _ = total(await gather(text_engine.generate(completion(max_tokens=3))))
    assert (text, len(token_ids)) == ("a\N{REPLACEMENT CHARACTER}", 3)


async def test_the_first_delta_carries_prompt_and_cache_hits(
    make_text_engine: Make, codec: TextCodec
) -> None:
    text_engine, _ = make_text_engine(STORY)
    deltas = await gather(text_engine.generate(completion("The fox")))
    assert deltas[0].prompt_ids == codec.encode("The fox")
    assert deltas[0].cached_tokens == 0
    assert all(delta.prompt_ids is None for delta in deltas[1:])


async def test_a_continued_request_delivers_only_what_is_new(
    make_text_engine: Make, codec: TextCodec
) -> None:
    story = codec.encode(STORY)
    text_engine, engine = make_text_engine(STORY)
    deltas = await gather(text_engine.generate(completion(emitted_ids=story[:9])))
    text, token_ids, _ = total(deltas)
    assert token_ids == story[9:]
    assert codec.decode(story[:9]) + text == STORY
    assert engine.submitted[0].emitted_ids == story[:9]


async def test_leaving_the_iteration_aborts_the_request(make_text_engine: Make) -> None:
    text_engine, engine = make_text_engine(STORY, hang_after=2)
    deltas = text_engine.generate(completion())
    await anext(deltas)
    await deltas.aclose()
    assert (engine.running, engine.aborted) == (set(), ["r"])
    assert text_engine.status().stats.finished["abort"] == 1


async def test_a_hundred_cancelled_requests_leave_nothing_running(
    make_text_engine: Make,
) -> None:
    text_engine, engine = make_text_engine(STORY, hang_after=1)
    requests = [completion(request_id=f"r{i}") for i in range(100)]
    tasks = [asyncio.create_task(gather(text_engine.generate(r))) for r in requests]
    while engine.outstanding < 100:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    status = text_engine.status()
    assert status.outstanding == 0
    assert status.stats.finished == {"stop": 0, "length": 0, "abort": 100, "error": 0}


async def test_a_prompt_longer_than_the_context_names_both_lengths(
    make_text_engine: Make,
) -> None:
    text_engine, engine = make_text_engine(STORY)
    with pytest.raises(RequestError, match=rf"{MAX_MODEL_LEN} tokens; .* {MAX_MODEL_LEN - 1}"):
        await gather(text_engine.generate(completion([5] * MAX_MODEL_LEN)))
    assert engine.submitted == []
    await gather(text_engine.generate(completion([5] * (MAX_MODEL_LEN - 1))))
    assert engine.submitted[0].params.max_tokens == 1


async def test_max_tokens_that_do_not_fit_are_refused_and_the_room_is_named(
    make_text_engine: Make,
) -> None:
    text_engine, engine = make_text_engine(STORY)
    with pytest.raises(RequestError, match="max_tokens at most 246") as refused:
        await gather(text_engine.generate(completion([5] * 10, max_tokens=247)))
    assert refused.value.param == "max_tokens"
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": [5, 320]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"stop_token_ids": (320,)}, "stop_token_ids"),
        ({"temperature": -0.5}, "temperature"),
    ],
)
async def test_bad_input_never_reaches_the_engine(
    make_text_engine: Make, changes: dict[str, object], param: str
) -> None:
    text_engine, engine = make_text_engine(STORY)
    with pytest.raises(RequestError) as refused:
        await gather(text_engine.generate(completion(**changes)))  # type: ignore[arg-type]
    assert refused.value.param == param
    assert engine.submitted == []
    assert sum(text_engine.status().stats.finished.values()) == 0


async def test_a_top_k_that_keeps_everything_is_off(make_text_engine: Make) -> None:
    text_engine, engine = make_text_engine(STORY)
    await gather(text_engine.generate(completion(top_k=320)))
    assert engine.submitted[0].params.top_k == 0


async def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    engine = FakeEngine([7, 8, 9])
    text_engine = TextEngine(engine, TextCodec(None), MODEL)
    assert total(await gather(text_engine.generate(completion([5])))) == ("", [7, 8, 9], "length")
    for changes in ({"prompt": "text"}, {"prompt": [5], "stop": ("x",)}):
        with pytest.raises(RequestError, match="no tokenizer"):
            await gather(text_engine.generate(completion(**changes)))  # type: ignore[arg-type]


async def test_a_long_prompt_is_encoded_outside_the_event_loop(codec: TextCodec) -> None:
    engine = FakeEngine(codec.encode("ok"), info=engine_info(max_model_len=100_000))
    text_engine = TextEngine(engine, codec, MODEL)
    prompt = "The fox. " * 2_000
    await gather(text_engine.generate(completion(prompt)))
    assert engine.submitted[0].prompt_ids == codec.encode(prompt)


async def test_more_requests_than_allowed_are_refused_and_room_comes_back(
    codec: TextCodec,
) -> None:
    text_engine = TextEngine(FakeEngine([7] * 20), codec, MODEL, max_outstanding=1)
    first = text_engine.generate(completion())
    await anext(first)
    with pytest.raises(OverloadedError, match="holds 1 requests"):
        await gather(text_engine.generate(completion(request_id="r2")))
    await first.aclose()
    await gather(text_engine.generate(completion(request_id="r3")))


async def test_the_tokens_held_are_those_in_pages_and_in_prompts_without_an_answer(
    codec: TextCodec,
) -> None:
    engine = FakeEngine([7] * 20, hang_after=1)
    text_engine = TextEngine(engine, codec, MODEL)
    first = text_engine.generate(completion(prompt=[5] * 40))
    await anext(first)
    assert text_engine.held_tokens == 0
    engine.hang_after = 0
    second = asyncio.create_task(gather(text_engine.generate(completion(request_id="r2"))))
    while engine.outstanding < 2:
        await asyncio.sleep(0)
    (submit,) = (s for s in engine.submitted if s.request_id == "r2")
    engine.stats.pages_used = 3
    assert text_engine.held_tokens == 3 * engine.info.page_size + len(submit.prompt_ids)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await first.aclose()
    engine.stats.pages_used = 0
    assert text_engine.held_tokens == 0


async def test_a_dead_engine_and_a_failed_request_are_told_apart(make_text_engine: Make) -> None:
    text_engine, _ = make_text_engine(STORY, die_after=1)
    with pytest.raises(EngineDeadError, match="rank 1"):
        await gather(text_engine.generate(completion()))
    text_engine, _ = make_text_engine(STORY, error_after=1)
    with pytest.raises(DFlashError, match="NaN") as failed:
        await gather(text_engine.generate(completion()))
    assert not isinstance(failed.value, EngineDeadError)
    assert text_engine.status().stats.finished["error"] == 1


async def test_the_local_backend_routes_by_name(codec: TextCodec) -> None:
    engines = [FakeEngine([7]), FakeEngine([8])]
    backend = LocalBackend(
        TextEngine(engines[0], codec, "a"), TextEngine(engines[1], codec, "b", {"tp": 1})
    )
    assert backend.models() == ["a", "b"]
    await gather(backend.generate(completion(model="b")))
    assert [len(engine.submitted) for engine in engines] == [0, 1]
    with pytest.raises(ModelNotFoundError, match="served: a, b"):
        backend.generate(completion(model="c"))
    assert [status.config for status in await backend.status()] == [{}, {"tp": 1}]
    engines[1].health = EngineStalledError("no step for 31 s")
    with pytest.raises(EngineStalledError):
        await backend.check_health()
