"""One attempt at a request: its pictures' embeddings, the first token, the rest of the output.

The prefill instance is chosen when all embeddings are there (late binding), unless computing what comes before the missing ones
saves time; the decode instance when the first token is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from functools import partial

import msgspec

from triptych.services.router.cached_parts import CachedParts, UnifiedSequence
from triptych.services.router.forecast import overlap_verdict, probable_prefill, prompt_work, refuse_if_late
from triptych.services.router.job import Job
from triptych.services.router.pictures import Pictures, most_telling
from triptych.services.router.prompt import ExpandedPrompt, expand
from triptych.services.router.record import Phase
from triptych.services.router.stage_calls import StageCalls
from triptych.services.router.text_stages import ToDecode, ToPrefill, prefill, start_decode
from triptych.services.router.token_streams import Tokens
from triptych.shared.errors import BadRequest, InternalError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import PrefillReply
from triptych.shared.policies.routing import PromptWork
from triptych.shared.sampling_params import SamplingParams


class AttemptRun:
    """`tokens` once, then done. output: what earlier attempts gave, after which this one goes on; it grows. trusts_index:
    whether what the cache index says is believed, and asked for."""

    def __init__(self, calls: StageCalls, job: Job, output: list[int], trusts_index: bool = True) -> None:
        self._calls = calls
        self._job = job
        self._output = output
        self._prompt = job.prompt.followed_by(output)
        sequence = UnifiedSequence(self._prompt, calls.parts.cache, job.terms.cache_salt)
        is_asked = trusts_index and (bool(job.sources) or self._calls.kv_may_be_elsewhere)
        self._cached = CachedParts(sequence, partial(calls.may_use, "prefill"), is_asked)
        self._pictures = Pictures(calls, job, self._cached, self._max_tokens)
        self._images: list[ImageInfo] = []

    async def tokens(self) -> AsyncGenerator[Tokens]:
        """The output in pieces, the last with finish_reason. Raises TriptychError."""
        calls, parts, record = self._calls, self._calls.parts, self._calls.record
        if self._pictures and self._job.prompt.num_text_tokens >= parts.limits.max_model_len():
            self._max_tokens()
        await self._pictures.identify()
        if not self._job.follows:
            refuse_if_late(calls, self._job.prompt, self._pictures, self._cached)
        needs_room = self._pictures.need_room
        async with parts.gate.turn(record.arrived_at_s, calls.remaining_s()) if needs_room else nullcontext():
            sampling, first = await self._first_token()
        record.first_token_at_s = record.first_token_at_s or time.monotonic()
        if first.finish_reason == "stop":
            yield Tokens((), "stop")
            return
        self._output.append(first.first_token)
        yield _first_tokens(first)  # at once: its way to the client and the hand-over need not wait for each other
        if first.finish_reason is not None:
            return
        if first.kv is None:
            raise InternalError("a prefill instance neither ended the output nor handed over its KV")
        record.move(Phase.DECODE)
        given: ToDecode | None = ToDecode(first.kv, self._output, sampling)
        with parts.streams.open(calls.request_id, sampling.max_tokens, calls.remaining_s(), self._job.is_whole) as stream:
            while given is not None:
                decode_id = await start_decode(calls, self._job, given)
                self._job.let_go_of_files(self._images)
                stamp = calls.attempt.stamps[-1]
                with parts.book.hold(decode_id, "decode", given.kv.num_computed_tokens):
                    piece = Tokens(())
                    while piece.finish_reason is None and piece.kv is None:
                        piece = await stream.next()
                        self._output += piece.token_ids
                        if piece.time is not None:
                            stamp.end(time.monotonic(), piece.time)
                        yield piece
                given = None if piece.kv is None else ToDecode(piece.kv, self._output, sampling, decode_id)

    async def _first_token(self) -> tuple[SamplingParams, PrefillReply]:
        """The stages up to prefill: how the output is sampled, and its first token."""
        pictures, record, prompt = self._pictures, self._calls.record, self._job.prompt
        try:
            async with asyncio.TaskGroup() as group:
                pictures.start(group, probable_prefill(self._calls, self._work()) if pictures else None)
                await pictures.known()
                sampling = msgspec.structs.replace(self._job.sampling, max_tokens=self._max_tokens())
                images = [image for image in pictures.images if image is not None]
                expanded = expand(self._prompt, [image.num_tokens for image in images])
                self._calls.parts.demand.on_image_tokens(record, pictures.num_tokens)
                record.num_text_tokens, record.num_image_tokens = prompt.num_text_tokens, pictures.num_tokens
                if not overlap_verdict(self._calls, expanded, pictures, self._cached).is_yes:
                    await pictures.encoded()
                record.move(Phase.PREFILL)
                first = await self._prefill(expanded, sampling, group)
                if self._job.siblings is not None:
                    self._job.siblings.tell(images, pictures.encoded_at())
                if kept_at := pictures.kept_at:
                    self._calls.parts.release(self._calls.request_id, kept_at)  # files that nobody needs now
                pictures.stop()
        except BaseExceptionGroup as errors:
            raise most_telling(errors) from None
        if not self._output:  # else what an earlier attempt computed may be among them
            record.num_cached_tokens = first.num_cached_tokens
        self._images = images
        return sampling, first

    async def _prefill(self, expanded: ExpandedPrompt, sampling: SamplingParams, group: asyncio.TaskGroup) -> PrefillReply:
        pictures = self._pictures
        given = ToPrefill(
            prompt=expanded,
            work=self._work(),
            sampling=sampling,
            images=lambda: pictures.placed(expanded.offsets),
            while_there=lambda instance_id: pictures.forwarding(group, instance_id),
            num_output_tokens=len(self._output),
        )
        _, first = await prefill(self._calls, given, self._cached)
        return first

    def _work(self) -> PromptWork:
        return prompt_work(self._calls, self._prompt, self._pictures, self._cached)

    def _max_tokens(self) -> int:
        """How many output tokens are asked for and fit. Needs the sizes of all pictures.

        Raises:
            BadRequest: the prompt, or prompt and output, are longer than the context.
        """
        limit, wanted = self._calls.parts.limits.max_model_len(), self._job.sampling.max_tokens
        num_text = self._job.prompt.num_text_tokens
        num_image = self._pictures.num_tokens
        room = limit - num_text - num_image
        if room >= (wanted or 1):
            return wanted or room
        counted = f"the prompt has {num_text} text + {num_image} image tokens"
        if room < 1:
            text, param = f"{counted}; the context length is {limit}, output included", self._job.param
        else:
            text, param = f"{counted}, which leaves {room} of {limit} for the output; ask for at most that", "max_tokens"
        raise BadRequest(text, code="context_length_exceeded", param=param)


def _first_tokens(reply: PrefillReply) -> Tokens:
    logprobs = () if reply.logprobs is None else (reply.logprobs,)
    return Tokens((reply.first_token,), reply.finish_reason, logprobs=logprobs)
