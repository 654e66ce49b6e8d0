"""One attempt at a request: its pictures' embeddings, the first token, the rest of the output.

The prefill instance is chosen when all embeddings are there (late binding), the decode instance when the first token is.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext

import msgspec

from triptych.services.router.job import Job
from triptych.services.router.picture_stages import PictureStages
from triptych.services.router.prompt import expand
from triptych.services.router.record import Phase
from triptych.services.router.stage_calls import StageCalls
from triptych.services.router.text_stages import prefill, start_decode
from triptych.services.router.token_streams import Tokens
from triptych.shared.errors import BadRequest, InternalError
from triptych.shared.messages import InstanceId, PlacedImage, PrefillReply
from triptych.shared.sampling_params import SamplingParams


class AttemptRun:
    """`tokens` once, then done."""

    def __init__(self, calls: StageCalls, job: Job) -> None:
        self._calls = calls
        self._job = job
        self._pictures = PictureStages(calls, job.sources, self._max_tokens)

    async def tokens(self) -> AsyncGenerator[Tokens]:
        """The output in pieces, the last with finish_reason. Raises TriptychError."""
        calls, parts, record = self._calls, self._calls.parts, self._calls.record
        has_pictures = bool(self._job.sources)
        if has_pictures and self._job.prompt.num_text_tokens >= parts.limits.max_model_len():
            self._max_tokens()
        async with parts.gate.turn(record.arrived_at_s, calls.remaining_s()) if has_pictures else nullcontext():
            sampling, prefill_id, first = await self._first_token()
        record.first_token_at_s = time.monotonic()
        if first.finish_reason is not None:
            yield Tokens((), first.finish_reason) if first.finish_reason == "stop" else _first_tokens(first)
            return
        if first.kv is None:
            raise InternalError("a prefill instance neither ended the output nor handed over its KV")
        record.move(Phase.DECODE)
        with parts.streams.open(calls.request_id, sampling.max_tokens, calls.remaining_s(), self._job.is_whole) as stream:
            decode_id = await start_decode(calls, self._job, first.kv, first.first_token, prefill_id, sampling)
            stamp = calls.attempt.stamps[-1]
            with parts.book.hold(decode_id, "decode", first.kv.num_computed_tokens):
                yield _first_tokens(first)
                is_over = False
                while not is_over:
                    piece = await stream.next()
                    is_over = piece.finish_reason is not None
                    if is_over:
                        stamp.end(time.monotonic(), piece.time)
                    yield piece

    async def _first_token(self) -> tuple[SamplingParams, InstanceId, PrefillReply]:
        """The stages up to prefill: how the output is sampled, who has its KV, and its first token."""
        record, prompt = self._calls.record, self._job.prompt
        embeddings = await self._pictures.embeddings()
        sampling = msgspec.structs.replace(self._job.sampling, max_tokens=self._max_tokens())
        infos = [info for _, info in sorted(self._pictures.infos.items())]
        record.num_text_tokens = prompt.num_text_tokens
        record.num_image_tokens = sum(info.num_tokens for info in infos)
        expanded = expand(prompt, [info.num_tokens for info in infos])
        placed = tuple(map(PlacedImage, infos, expanded.offsets, embeddings))
        record.move(Phase.PREFILL)
        prefill_id, first = await prefill(self._calls, expanded, placed, sampling)
        record.num_cached_tokens = first.num_cached_tokens
        return sampling, prefill_id, first

    def _max_tokens(self) -> int:
        """How many output tokens are asked for and fit. Needs the sizes of all pictures.

        Raises:
            BadRequest: the prompt, or prompt and output, are longer than the context.
        """
        limit, wanted = self._calls.parts.limits.max_model_len(), self._job.sampling.max_tokens
        num_text = self._job.prompt.num_text_tokens
        num_image = sum(info.num_tokens for info in self._pictures.infos.values())
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
