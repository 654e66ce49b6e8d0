"""Everything before the first request of the trace: target, pictures, what prompts cost in tokens, isolated latencies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from triptych.loadgen.replay.content import Content, Message, TraceContent, WorldContent, user_message
from triptych.loadgen.replay.exchange import Exchange
from triptych.loadgen.replay.isolated import measure_isolated
from triptych.loadgen.replay.open_loop import OpenLoop, SendOptions
from triptych.loadgen.replay.options import ReplayOptions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.pictures import Picture, PicturePool
from triptych.loadgen.replay.slo import Isolated
from triptych.loadgen.replay.stream import AnswerStream
from triptych.loadgen.replay.target import Target, TargetFailed, find_target
from triptych.loadgen.replay.token_costs import CountPrompt, TokenCosts, measure_token_costs
from triptych.loadgen.replay.words import Words
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import Trace, TraceError

NUM_PEEKED = 1000  # rows that are looked at before: whether there are pictures, which sizes there are; chosen
ISOLATED_INDEX, COUNTING_INDEX = 1 << 40, 2 << 40  # beyond every trace: what is measured before is never repeated


@dataclass(frozen=True, slots=True)
class Prepared:
    """rows: of the whole trace. total: how many, where that is known. costs: None where lengths are not asked for."""

    target: Target
    content: Content
    rows: Iterator[TraceRow]
    total: int | None
    costs: TokenCosts | None
    isolated: dict[str, Isolated]
    notes: tuple[str, ...]


async def prepare(http: aiohttp.ClientSession, trace: Trace, options: ReplayOptions, tell: Callable[[str], None]) -> Prepared:
    """Ask the target for what has to be known, one request at a time.

    Raises:
        TargetFailed: it isn't there, or refused.
        TraceError: it has no row.
    """
    target = await find_target(http, options.target, options.model)
    peeked = await asyncio.to_thread(lambda: list(itertools.islice(trace, NUM_PEEKED)))
    if not peeked:
        raise TraceError(
            "no request of the trace is left to be sent: it ends before --start, or its rates are scaled to nothing"
        )
    is_whole = len(peeked) < NUM_PEEKED
    has_pictures = any(row.num_images for row in peeked)
    pool = None
    if has_pictures or not is_whole:
        tell("Drawing pictures ...")
        pool = await asyncio.to_thread(PicturePool, options.pictures, options.send.seed)
    costs = None
    if options.content == "world":
        content: Content = WorldContent(pool, options.send.seed)
    else:
        tell("Measuring what prompts cost in tokens ...")
        words = Words(options.send.seed)
        count_prompt = _prompt_counter(Exchange(http, target), words, is_forced=not options.is_natural)
        costs = await _token_costs(count_prompt, pool, target.max_model_len, has_pictures)
        content = TraceContent(words, pool, costs, options.send.seed, options.is_natural)
    isolated = dict(options.isolated)
    if options.unmeasured_classes:
        tell("Measuring isolated latencies ...")
        isolated |= await _measure_isolated(Exchange(http, target), content, peeked, options)
    if isinstance(content, TraceContent):
        content.num_cut = content.num_longer = 0  # what was measured alone is no part of the replay
    rows = itertools.chain(peeked, trace)
    total = len(peeked) if is_whole else None
    return Prepared(target, content, rows, total, costs, isolated, tuple(_notes(costs, pool if has_pictures else None)))


async def _token_costs(
    count_prompt: CountPrompt, pool: PicturePool | None, max_model_len: int | None, has_pictures: bool
) -> TokenCosts:
    """has_pictures: the first rows have some. Else later ones may, and a target that takes none is none the worse for it."""
    pictures = [] if pool is None else pool.extremes()
    try:
        return await measure_token_costs(count_prompt, pictures, max_model_len)
    except TargetFailed:
        if has_pictures or not pictures:
            raise
        return await measure_token_costs(count_prompt, (), max_model_len)


def _prompt_counter(exchange: Exchange, words: Words, is_forced: bool) -> CountPrompt:
    """is_forced: asks as the replay will, so that a target that does not know `ignore_eos` says so now."""
    calls = itertools.count(COUNTING_INDEX)

    async def count(num_words: int, pictures: Sequence[Picture]) -> int:
        text = words.text(2 * next(calls), num_words)
        stream = AnswerStream()
        await exchange.ask((), Message(user_message((), pictures, text), len(pictures), 1, is_forced), stream)
        if stream.error is not None:
            what = "a first picture" if pictures else "a first request"
            hint = "; --natural asks without ignore_eos" if is_forced and stream.error == "http_400" else ""
            raise TargetFailed(f"the target did not answer {what}: {stream.error}, {stream.told}{hint}")
        return stream.num_prompt_tokens

    return count


async def _measure_isolated(
    exchange: Exchange, content: Content, rows: Sequence[TraceRow], options: ReplayOptions
) -> dict[str, Isolated]:
    errors: dict[str, str] = {}

    async def send(alone: Iterator[TraceRow]) -> list[RequestOutcome]:
        outcomes: list[RequestOutcome] = []
        one_at_a_time = SendOptions(concurrency=1, first_index=ISOLATED_INDEX)
        loop = OpenLoop(exchange, content, one_at_a_time, outcomes.append)
        await loop.run(alone, asyncio.Event())
        errors.update(loop.error_examples)
        return outcomes

    found = await measure_isolated(rows, options.unmeasured_classes, options.num_isolated, send)
    if errors and not found:
        raise TargetFailed("no isolated latency could be measured: " + ", ".join(map(": ".join, errors.items())))
    return found


def _notes(costs: TokenCosts | None, pool: PicturePool | None) -> Iterator[str]:
    if costs is None:
        yield "Prompts and answers are as long as the world's questions and answers, not as in the trace."
    elif costs.is_measured:
        yield f"Prompts are filled to the trace's lengths with words, {costs.per_word:.2f} tokens each as this target counts."
    else:
        yield f"The target's usage tells no lengths: {costs.per_word:.2f} tokens a word are a guess, prompts' lengths too."
    if pool is not None:
        yield f"Pictures are drawings, median file {pool.median_bytes:,} bytes: photographs of the same size are larger files."
