"""The stages of text: prefill gets the prompt, decode the KV that prefill made. Used by attempt.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import msgspec

from triptych.services.router.cached_parts import CachedParts
from triptych.services.router.dispatch import Work
from triptych.services.router.job import Job
from triptych.services.router.load_book import InstanceView
from triptych.services.router.prompt import ExpandedPrompt
from triptych.services.router.routing import Choose
from triptych.services.router.stage_calls import StageCalls
from triptych.shared.errors import CACHE_MISS, InstanceLost
from triptych.shared.messages import (
    MAX_INLINE_TOKENS,
    Accepted,
    DecodeRequest,
    Heartbeat,
    InstanceId,
    KvRef,
    PlacedImage,
    PrefillReply,
    PrefillRequest,
    PrefixSource,
    PromptTokens,
    TensorRef,
)
from triptych.shared.policies.batching import num_blocks_for
from triptych.shared.policies.routing import Choice, PromptWork, choose_preprocess
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.token_bytes import pack_tokens
from triptych.shared.token_set import token_set
from triptych.shared.wire import MAX_PAYLOAD_BYTES

PLACED_IMAGE_BYTES = 512  # measured: up to 330 bytes on the wire with our ids
MESSAGE_SLACK_BYTES = 4096  # chosen: everything else of a PrefillRequest


@dataclass(frozen=True, slots=True)
class ToPrefill:
    """What goes to prefill. images: as they are when it is sent. while_there: entered with the chosen instance.
    num_output_tokens: of the prompt's last tokens, those that are output already."""

    prompt: ExpandedPrompt
    work: PromptWork
    sampling: SamplingParams
    images: Callable[[], tuple[PlacedImage, ...]]
    while_there: Callable[[InstanceId], AbstractContextManager[object]]
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToDecode:
    """What goes on at a decode instance. output: the tokens so far; kv has all but the last. moved_from: who handed it over."""

    kv: KvRef
    output: Sequence[int]
    sampling: SamplingParams
    moved_from: InstanceId | None = None


async def prefill(calls: StageCalls, given: ToPrefill, cached: CachedParts) -> tuple[InstanceId, PrefillReply]:
    """Who did it, and the first token. Raises TriptychError."""
    tokens = await _prompt_tokens(calls, given.prompt, num_places=len(given.images()))

    async def send(beat: Heartbeat, choice: Choice) -> PrefillReply:
        source = choice.pull_from
        request = PrefillRequest(
            request_id=calls.request_id,
            router_id=calls.parts.router_id,
            prompt=tokens,
            images=given.images(),
            sampling=given.sampling,
            timeout_s=calls.remaining_s(),
            cache_salt=calls.terms.cache_salt,
            prefix=None if source is None else PrefixSource(source, cached.num_blocks(source)),
            slack_s=calls.slack_s(),
            num_output_tokens=given.num_output_tokens,
        )
        with given.while_there(beat.instance_id):
            return await calls.ask(beat.instance_id, request, PrefillReply)

    choose = _relying_on(cached, calls.routes.prefill(given.work))
    return await calls.dispatch(Work("prefill", given.work.num_tokens, choose, send))


def _relying_on(cached: CachedParts, choose: Choose) -> Choose:
    """Pictures were left out since their KV is cached: an instance that has it not gets it, whatever the rules say."""

    def choose_with_kv(views: Sequence[InstanceView]) -> Choice | None:
        choice = choose(views)
        if choice is None or cached.has_what_is_relied_on(choice.pull_from or choice.instance_id):
            return choice
        source = cached.source()
        if source is None:
            raise InstanceLost("nobody holds the KV of an image any more", code=CACHE_MISS)
        return replace(choice, reason=f"{choice.reason}; the KV of its images comes from {source}", pull_from=source)

    return choose_with_kv


async def _prompt_tokens(calls: StageCalls, prompt: ExpandedPrompt, num_places: int) -> PromptTokens:
    """Inline, or left at a preprocess instance where the message would get too large."""
    content = prompt.to_bytes()
    num_bytes = len(content) + num_places * PLACED_IMAGE_BYTES + MESSAGE_SLACK_BYTES
    if len(prompt.token_ids) <= MAX_INLINE_TOKENS and num_bytes <= MAX_PAYLOAD_BYTES:
        return PromptTokens(len(prompt.token_ids), inline=content)
    return PromptTokens(len(prompt.token_ids), leased=await _left(calls, content))


async def _left(calls: StageCalls, content: bytes) -> TensorRef:
    """Left at a preprocess instance, to be pulled by whoever needs it."""

    async def send(beat: Heartbeat, choice: Choice) -> TensorRef:
        return await calls.parts.uploader.blob(beat, calls.request_id, content, calls.remaining_s())

    _, leased = await calls.dispatch(Work("preprocess", 1, choose_preprocess, send))
    return leased


async def start_decode(calls: StageCalls, job: Job, given: ToDecode) -> InstanceId:
    """Hand over to a decode instance; tokens come on the request's stream from then on. Raises TriptychError."""
    num_prompt_tokens = calls.record.num_text_tokens + calls.record.num_image_tokens
    penalised = token_set(job.prompt.token_ids) if given.sampling.repetition_penalty != 1 else b""
    output, long_output = pack_tokens(given.output), None
    if len(output) + len(penalised) + MESSAGE_SLACK_BYTES > MAX_PAYLOAD_BYTES:
        output, long_output = b"", await _left(calls, output)
    kv = _fitting(given.kv, len(output) + len(penalised))

    async def send(beat: Heartbeat, choice: Choice) -> Accepted:
        calls.parts.streams.expect(calls.request_id, beat.instance_id, len(given.output))
        request = DecodeRequest(
            request_id=calls.request_id,
            router_id=calls.parts.router_id,
            kv=kv,
            output=output,
            num_prompt_tokens=num_prompt_tokens,
            sampling=given.sampling,
            timeout_s=calls.remaining_s(),
            prompt_token_set=penalised,
            whole=job.is_whole,
            long_output=long_output,
        )
        return await calls.ask(beat.instance_id, request, Accepted)

    num_blocks = num_blocks_for(kv.num_computed_tokens + 1, kv.block_size)
    choose = calls.routes.decode(num_blocks, kv.tensor.owner)
    if given.moved_from is not None:
        choose = _elsewhere(given.moved_from, choose)
    is_begun = given.moved_from is not None
    decode_id, _ = await calls.dispatch(Work("decode", kv.num_computed_tokens, choose, send, is_begun))
    return decode_id


def _elsewhere(source: InstanceId, choose: Choose) -> Choose:
    """Not where it was; but when nobody else takes it, back there, which is tried once."""
    back = iter((Choice(source, "nobody else takes it"),))
    return lambda views: choose([view for view in views if view.instance_id != source]) or next(back, None)


def _fitting(kv: KvRef, num_other_bytes: int) -> KvRef:
    """As it goes into a message with so many other bytes: without the keys, which only caches need, where they are too many."""
    is_fitting = len(kv.block_keys) + len(kv.key_tail) + num_other_bytes + MESSAGE_SLACK_BYTES <= MAX_PAYLOAD_BYTES
    return kv if is_fitting else msgspec.structs.replace(kv, block_keys=b"", key_tail=b"")
