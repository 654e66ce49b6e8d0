"""Contents: prompts as long as the trace has them, shared where it says so, and the world's questions with their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from support.stub_target import PIXELS_PER_TOKEN, TOKENS_PER_REQUEST, TOKENS_PER_WORD, prompt_tokens
from triptych.loadgen.replay.content import Message, TraceContent, WorldContent
from triptych.loadgen.replay.pictures import Picture, PictureOptions, PicturePool
from triptych.loadgen.replay.sessions import MAX_SESSIONS, Sessions
from triptych.loadgen.replay.token_costs import ASSUMED_PER_WORD, TokenCosts, measure_token_costs
from triptych.loadgen.replay.words import Words
from triptych.loadgen.traces.row import TraceRow

COSTS = TokenCosts(TOKENS_PER_WORD, TOKENS_PER_REQUEST, 0.0, 1 / PIXELS_PER_TOKEN, is_measured=True)


@pytest.fixture(scope="module")
def pool() -> PicturePool:
    return PicturePool(PictureOptions(size=(280, 280)), seed=0)


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(0)


def body(message: Message, *before: bytes | memoryview) -> dict[str, Any]:
    return {"messages": json.loads(b"[" + b"".join([*before, *message.pieces]) + b"]")}


def text_of(message: Message) -> str:
    content = body(message)["messages"][0]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@pytest.mark.parametrize(
    "row",
    [
        TraceRow(0, 40, 7),
        TraceRow(0, 5000, 7),
        TraceRow(0, 100_000, 7),
        TraceRow(0, 700, 7, num_images=3),
        TraceRow(0, 2048 + 77, 7, prefix_ids=(1, 2, 3, 4), prefix_block_size=512),
        TraceRow(0, 2048, 7, num_images=2, prefix_ids=(1, 2, 3, 4), prefix_block_size=512),
        TraceRow(0, 1900, 7, prefix_ids=(1, 2, 3, 4), prefix_block_size=512),
    ],
)
def test_prompts_are_as_long_as_the_trace_has_them(row: TraceRow, pool: PicturePool, words: Words) -> None:
    message = TraceContent(words, pool, COSTS, seed=0).message(5, row, 0)
    assert prompt_tokens(body(message)) == pytest.approx(row.num_context_tokens, abs=2)
    assert (message.num_images, message.max_tokens, message.is_forced) == (row.num_images, 7, True)
    content = body(message)["messages"][0]["content"]
    assert isinstance(content, str) != bool(row.num_images)


def test_equal_prefix_ids_are_equal_texts(words: Words) -> None:
    content = TraceContent(words, None, COSTS, seed=0)

    def text(index: int, *ids: int, context: int = 400) -> str:
        return text_of(content.message(index, TraceRow(0, context, 1, prefix_ids=ids, prefix_block_size=90), 0))

    def num_shared_words(one: str, other: str) -> int:
        pairs = zip(one.split(), other.split(), strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.split()), len(other.split())))

    block = round(90 / TOKENS_PER_WORD)
    assert num_shared_words(text(1, 7, 8, 9), text(2, 7, 8, 9)) == 3 * block
    assert num_shared_words(text(1, 7, 8, 9), text(2, 7, 8, 10)) // block == 2
    assert num_shared_words(text(1, 7, 8), text(2, 8, 7)) < 4
    assert num_shared_words(text(1), text(2)) < 4
    assert text(1, 7, context=70) == text(2, 7, context=70)  # a block that the context cuts is still its beginning


def test_equal_image_ids_are_equal_pictures(pool: PicturePool, words: Words) -> None:
    content = TraceContent(words, pool, COSTS, seed=0)

    def pictures(index: int, *ids: int) -> list[str]:
        row = TraceRow(0, 400, 1, num_images=2, num_image_tokens=200, image_ids=ids)
        parts = body(content.message(index, row, 0))["messages"][0]["content"]
        return [part["image_url"]["url"] for part in parts if "image_url" in part]

    named = pictures(1, 7, 1 << 44)
    assert pictures(2, 7, 1 << 44) == named
    assert pictures(3, 1 << 44, 8)[0] == named[1]
    assert len({*named, *pictures(3, 8, 9), *pictures(7), *pictures(8)}) == 8


def test_a_turn_is_shorter_by_its_history(words: Words) -> None:
    content = TraceContent(words, None, COSTS, seed=0)
    whole, later = (content.message(3, TraceRow(0, 1000, 1), history) for history in (0, 700))
    assert len(text_of(whole).split()) - len(text_of(later).split()) == round(700 / TOKENS_PER_WORD)
    assert text_of(content.message(3, TraceRow(0, 10, 1), 700))


def test_the_same_seed_and_index_say_the_same(pool: PicturePool, words: Words) -> None:
    row = TraceRow(0, 300, 1, num_images=2)
    content, again = (TraceContent(words, pool, COSTS, seed=1) for _ in range(2))
    assert content.message(8, row, 0) == again.message(8, row, 0)
    assert content.message(8, row, 0) != content.message(9, row, 0)


def test_what_the_model_cannot_take_is_cut_and_counted(words: Words) -> None:
    content = TraceContent(words, None, TokenCosts(1.5, 10, max_model_len=1000), seed=0)
    for row in (TraceRow(0, 900, 40), TraceRow(0, 5000, 100), TraceRow(0, 5000, 5000)):
        message = content.message(0, row, 0)
        assert prompt_tokens(body(message)) + message.max_tokens <= 1000
    assert content.num_cut == 2


@pytest.mark.parametrize(
    ("num_images", "num_history_tokens", "num_left", "begins_anew"),
    [(4, 0, 4, False), (12, 0, 8, False), (12, 200, 8, True), (4, 440, 4, False), (4, 490, 4, True), (0, 899, 0, True)],
)
def test_pictures_and_turns_that_the_model_cannot_take_are_left_out(
    num_images: int, num_history_tokens: int, num_left: int, begins_anew: bool, pool: PicturePool, words: Words
) -> None:
    """A picture of 280 x 280 is 100 tokens, whatever the trace has; 950 of the context are for prompt and answer."""
    costs = replace(COSTS, max_model_len=1000)
    content = TraceContent(words, pool, costs, seed=0)
    message = content.message(0, TraceRow(0, 300, 60, num_images), num_history_tokens)
    assert (message.num_images, message.begins_anew) == (num_left, begins_anew)
    is_cut = begins_anew or num_left < num_images
    assert content.num_cut == is_cut
    left = 0 if begins_anew else num_history_tokens
    assert left + prompt_tokens(body(message)) + message.max_tokens <= 950


def test_prompts_that_are_longer_than_the_trace_has_them_are_counted(pool: PicturePool, words: Words) -> None:
    """A picture of 280 x 280 is 100 tokens; a conversation repeats 200."""
    content = TraceContent(words, pool, COSTS, seed=0)
    for row, history in (
        (TraceRow(0, 120, 1, 1), 0),
        (TraceRow(0, 90, 1, 1), 0),
        (TraceRow(0, 220, 1), 200),
        (TraceRow(0, 90, 1), 200),
    ):
        content.message(0, row, history)
    assert content.num_longer == 2


def test_image_tokens_of_the_trace_choose_the_pictures(words: Words) -> None:
    content = TraceContent(words, PicturePool(PictureOptions(), seed=0), COSTS, seed=0)
    for num_image_tokens in (300, 600, 2000):
        row = TraceRow(0, num_image_tokens + 100, 7, num_images=2, num_image_tokens=num_image_tokens)
        message = content.message(0, row, 0)
        num_words = len(text_of(message).split())
        assert prompt_tokens(body(message)) - TOKENS_PER_WORD * num_words == pytest.approx(num_image_tokens, rel=0.25)


def test_natural_answers_end_at_the_traces_length_at_the_latest(words: Words) -> None:
    message = TraceContent(words, None, COSTS, seed=0, is_natural=True).message(0, TraceRow(0, 50, 9), 0)
    assert (message.is_forced, message.max_tokens) == (False, 9)


@pytest.mark.parametrize("num_images", [0, 1, 2, 3, 5])
def test_the_worlds_questions_have_answers(num_images: int, pool: PicturePool) -> None:
    content = WorldContent(pool, seed=0)
    messages = [content.message(index, TraceRow(0, 9999, 9999, num_images=num_images), 0) for index in range(40)]
    assert all(message.answer and not message.is_forced for message in messages)
    assert len({message.answer for message in messages}) > 5
    asked = body(messages[0])["messages"][0]["content"]
    assert num_images == (0 if isinstance(asked, str) else len(asked) - 1)
    assert messages == [
        WorldContent(pool, 0).message(index, TraceRow(0, 1, 1, num_images=num_images), 0) for index in range(40)
    ]


def test_a_conversation_repeats_what_was_said(pool: PicturePool, words: Words) -> None:
    content = TraceContent(words, pool, COSTS, seed=0)
    history = Sessions().of("a")
    first = content.message(0, TraceRow(0, 300, 5, num_images=1), 0)
    history.add(first.pieces, 'he said "no"\n', 305)
    second = content.message(1, TraceRow(0, 500, 5), history.num_tokens)
    messages = body(second, *history.pieces)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0] == body(first)["messages"][0]
    assert messages[1]["content"] == 'he said "no"\n'
    history.forget()
    assert (history.pieces, history.num_tokens) == ([], 0)


def test_sessions_are_kept_by_name_and_bounded() -> None:
    sessions = Sessions()
    first = sessions.of("first")
    assert sessions.of("first") is first
    assert sessions.of(None) is not sessions.of(None)
    for number in range(MAX_SESSIONS - 1):
        sessions.of(str(number))
        assert sessions.of("first") is first
    for number in range(MAX_SESSIONS):
        sessions.of(f"more {number}")
    assert sessions.of("first") is not first


def test_token_costs_are_measured(pool: PicturePool) -> None:
    async def count(num_words: int, pictures: Sequence[Picture]) -> int:
        pixels = sum(picture.width * picture.height for picture in pictures)
        return round(12 + 1.25 * num_words + 3 * len(pictures) + pixels / 784)

    async def silent(num_words: int, pictures: Sequence[Picture]) -> int:
        return 0

    sizes = PicturePool(PictureOptions(), seed=0).extremes()
    costs = asyncio.run(measure_token_costs(count, sizes, 4096))
    assert (costs.per_word, costs.per_request, costs.max_model_len) == (1.25, 12, 4096)
    assert costs.of_picture(512 * 512) == pytest.approx(3 + 512 * 512 / 784, abs=2)
    fixed = asyncio.run(measure_token_costs(count, pool.extremes(), None))
    assert fixed.of_picture(280 * 280) == pytest.approx(103, abs=1)
    assumed = asyncio.run(measure_token_costs(silent, sizes, None))
    assert (assumed.per_word, assumed.is_measured) == (ASSUMED_PER_WORD, False)
