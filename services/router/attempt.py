"""One attempt at a request: preprocess and encode per image side by side, prefill, decode.

Images go on to an encoder as soon as each is preprocessed. The prefill instance is chosen when all embeddings are there
(late binding), the decode instance when the first token is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from triptych.services.router.data_url import ImageSource
from triptych.services.router.dispatch import Dispatcher, Work
from triptych.services.router.load_book import LoadBook
from triptych.services.router.media_gate import STORE_FULL, MediaGate
from triptych.services.router.prompt import ExpandedPrompt, Prompt, expand
from triptych.services.router.record import Attempt, Phase, RequestRecord
from triptych.services.router.token_streams import Tokens, TokenStreams
from triptych.services.router.uploads import Uploader
from triptych.shared.bus import Bus
from triptych.shared.errors import BadRequest, InstanceLost, InternalError, Overloaded, TriptychError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import (
    MAX_INLINE_TOKENS,
    Accepted,
    DecodeRequest,
    EncodeReply,
    EncodeRequest,
    Heartbeat,
    InstanceId,
    KvRef,
    Message,
    PlacedImage,
    PrefillReply,
    PrefillRequest,
    PreprocessReply,
    PreprocessRequest,
    PromptTokens,
    TensorRef,
)
from triptych.shared.policies.batching import num_blocks_for
from triptych.shared.policies.routing import choose_decode, choose_encoder, choose_prefill, choose_preprocess
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.token_set import token_set
from triptych.shared.wire import MAX_PAYLOAD_BYTES

PLACED_IMAGE_BYTES = 512  # measured: up to 330 bytes on the wire with our ids
MESSAGE_SLACK_BYTES = 4096  # chosen: everything else of a PrefillRequest

T = TypeVar("T")
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be answered. sampling.max_tokens 0: what the context leaves. is_streaming: tokens go out as they come, so
    that after the first one no other attempt is possible. is_watched: they are looked at as they come, since a stop string may
    end the output. sources: the pictures, kept while another attempt may need them. param: the prompt's field, for errors."""

    prompt: Prompt
    sources: list[ImageSource]
    sampling: SamplingParams
    is_streaming: bool
    is_watched: bool = False
    param: str = "messages"

    @property
    def is_whole(self) -> bool:
        """Nobody looks at the output before its end."""
        return not (self.is_streaming or self.is_watched)


@dataclass(frozen=True, slots=True)
class Limits:
    """max_model_len: prompt and output tokens together. stop_token_ids: the model's own."""

    max_model_len: Callable[[], int]
    stop_token_ids: tuple[int, ...]
    max_attempts: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What all requests of a router share."""

    router_id: InstanceId
    bus: Bus
    book: LoadBook
    dispatcher: Dispatcher
    streams: TokenStreams
    uploader: Uploader
    gate: MediaGate
    limits: Limits
    release: Callable[[Attempt], None]


@dataclass(slots=True)
class AttemptRun:
    """`tokens` once, then done."""

    parts: Parts
    job: Job
    record: RequestRecord
    attempt: Attempt
    images: dict[int, ImageInfo] = field(default_factory=dict)

    async def tokens(self) -> AsyncGenerator[Tokens]:
        """The output in pieces, the last with finish_reason. Raises TriptychError."""
        if not self.job.sources or self.job.prompt.num_text_tokens >= self.parts.limits.max_model_len():
            self._max_tokens()
        if self.job.sources:
            async with self.parts.gate.turn(self.record.arrived_at_s, self._remaining_s()):
                sampling, prefill_id, first = await self._first_token()
        else:
            sampling, prefill_id, first = await self._first_token()
        self.record.first_token_at_s = time.monotonic()
        if first.finish_reason is not None:
            yield Tokens((), first.finish_reason) if first.finish_reason == "stop" else _first_tokens(first)
            return
        if first.kv is None:
            raise InternalError("a prefill instance neither ended the output nor handed over its KV")
        self.record.move(Phase.DECODE)
        with self.parts.streams.open(self.attempt.request_id, sampling.max_tokens, self.job.is_whole) as stream:
            decode_id = await self._start_decode(first.kv, first.first_token, prefill_id, sampling)
            stamp = self.attempt.stamps[-1]
            with self.parts.book.hold(decode_id, "decode", first.kv.num_computed_tokens):
                yield _first_tokens(first)
                is_over = False
                while not is_over:
                    piece = await stream.next(self._remaining_s())
                    is_over = piece.finish_reason is not None
                    if is_over:
                        stamp.end(time.monotonic(), piece.time)
                    yield piece

    async def _first_token(self) -> tuple[SamplingParams, InstanceId, PrefillReply]:
        """The stages up to prefill: how the output is sampled, who has its KV, and its first token."""
        embeddings = await self._all_embeddings()
        sampling = msgspec.structs.replace(self.job.sampling, max_tokens=self._max_tokens())
        infos = [self.images[i] for i in range(len(self.job.sources))]
        self.record.num_text_tokens = self.job.prompt.num_text_tokens
        self.record.num_image_tokens = sum(info.num_tokens for info in infos)
        expanded = expand(self.job.prompt, [info.num_tokens for info in infos])
        placed = tuple(map(PlacedImage, infos, expanded.offsets, embeddings))
        self.record.move(Phase.PREFILL)
        prefill_id, first = await self._prefill(expanded, placed, sampling)
        self.record.num_cached_tokens = first.num_cached_tokens
        return sampling, prefill_id, first

    def _remaining_s(self) -> float:
        return self.record.remaining_s(time.monotonic())

    def _max_tokens(self) -> int:
        """How many output tokens are asked for and fit. Needs the sizes of all images.

        Raises:
            BadRequest: the prompt, or prompt and output, are longer than the context.
        """
        limit, wanted = self.parts.limits.max_model_len(), self.job.sampling.max_tokens
        num_text = self.job.prompt.num_text_tokens
        num_image = sum(image.num_tokens for image in self.images.values())
        room = limit - num_text - num_image
        if room >= (wanted or 1):
            return wanted or room
        counted = f"the prompt has {num_text} text + {num_image} image tokens"
        if room < 1:
            text, param = f"{counted}; the context length is {limit}, output included", self.job.param
        else:
            text, param = f"{counted}, which leaves {room} of {limit} for the output; ask for at most that", "max_tokens"
        raise BadRequest(text, code="context_length_exceeded", param=param)

    # --- images ---------------------------------------------------------------------------------------------------------

    async def _all_embeddings(self) -> list[TensorRef]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._embeddings(i, source)) for i, source in enumerate(self.job.sources)]
        except BaseExceptionGroup as errors:
            raise _most_telling(errors) from None
        return [task.result() for task in tasks]

    async def _embeddings(self, index: int, source: ImageSource) -> TensorRef:
        preprocess = Work("preprocess", 1, choose_preprocess, partial(self._send_media, source))
        _, item = await self._dispatch(preprocess)
        self.images[index] = item.image
        if len(self.images) == len(self.job.sources):
            self._max_tokens()  # the last size is known: don't encode what won't fit
        encode = Work("encoder", item.image.num_tokens, choose_encoder, partial(self._send_pixels, item))
        _, encoded = await self._dispatch(encode)
        return encoded.embeddings

    async def _send_media(self, source: ImageSource, beat: Heartbeat) -> PreprocessReply:
        media_id = None
        if source.content is not None:
            try:
                media_id = await self.parts.uploader.media(beat, self.attempt.request_id, source.content, self._remaining_s())
            except BadRequest as error:
                error.param = error.param or source.param
                raise
        request = PreprocessRequest(
            request_id=self.attempt.request_id,
            router_id=self.parts.router_id,
            param=source.param,
            timeout_s=self._remaining_s(),
            url=source.url,
            media_id=media_id,
            limits=source.limits,
        )
        return await self._ask_for_room(beat, request, PreprocessReply)

    async def _send_pixels(self, item: PreprocessReply, beat: Heartbeat) -> EncodeReply:
        request = EncodeRequest(self.attempt.request_id, self.parts.router_id, item.image, item.pixels, self._remaining_s())
        return await self._ask_for_room(beat, request, EncodeReply)

    async def _ask_for_room(self, beat: Heartbeat, request: Message, expected: type[R]) -> R:
        """`_ask` for what stays there. A store that stays full may be full of parts of requests that wait for their rest, as
        this one does: it is asked nowhere else, the attempt is given up with all that it holds (see media_gate.py)."""
        try:
            return await self._ask(beat, request, expected)
        except Overloaded as error:
            if error.code != "tensor_store_full":
                raise
            raise InstanceLost("a stage had no room for the request's pictures", code=STORE_FULL) from error

    # --- text -----------------------------------------------------------------------------------------------------------

    async def _prefill(
        self, prompt: ExpandedPrompt, images: tuple[PlacedImage, ...], sampling: SamplingParams
    ) -> tuple[InstanceId, PrefillReply]:
        tokens = await self._prompt_tokens(prompt, len(images))

        async def send(beat: Heartbeat) -> PrefillReply:
            request = PrefillRequest(
                self.attempt.request_id, self.parts.router_id, tokens, images, sampling, self._remaining_s()
            )
            return await self._ask(beat, request, PrefillReply)

        return await self._dispatch(Work("prefill", tokens.num_tokens, choose_prefill, send))

    async def _prompt_tokens(self, prompt: ExpandedPrompt, num_images: int) -> PromptTokens:
        """Inline, or left at a preprocess instance where the message would get too large."""
        content = prompt.to_bytes()
        num_bytes = len(content) + num_images * PLACED_IMAGE_BYTES + MESSAGE_SLACK_BYTES
        if len(prompt.token_ids) <= MAX_INLINE_TOKENS and num_bytes <= MAX_PAYLOAD_BYTES:
            return PromptTokens(len(prompt.token_ids), inline=content)

        async def send(beat: Heartbeat) -> TensorRef:
            return await self.parts.uploader.blob(beat, self.attempt.request_id, content, self._remaining_s())

        _, leased = await self._dispatch(Work("preprocess", 1, choose_preprocess, send))
        return PromptTokens(len(prompt.token_ids), leased=leased)

    async def _start_decode(self, kv: KvRef, first_token: int, prefill_id: InstanceId, sampling: SamplingParams) -> InstanceId:
        """Hand over to a decode instance; tokens come on the stream from then on."""
        num_prompt_tokens = self.record.num_text_tokens + self.record.num_image_tokens

        async def send(beat: Heartbeat) -> Accepted:
            self.parts.streams.expect(self.attempt.request_id, beat.instance_id)
            request = DecodeRequest(
                request_id=self.attempt.request_id,
                router_id=self.parts.router_id,
                kv=kv,
                first_token=first_token,
                num_prompt_tokens=num_prompt_tokens,
                sampling=sampling,
                timeout_s=self._remaining_s(),
                prompt_token_set=token_set(self.job.prompt.token_ids) if sampling.repetition_penalty != 1 else b"",
                whole=self.job.is_whole,
            )
            return await self._ask(beat, request, Accepted)

        num_blocks = num_blocks_for(num_prompt_tokens + 1, kv.block_size)
        choose = partial(choose_decode, num_blocks=num_blocks, prefill_id=prefill_id)
        decode_id, _ = await self._dispatch(Work("decode", num_prompt_tokens, choose, send))
        return decode_id

    async def _dispatch(self, work: Work[T]) -> tuple[InstanceId, T]:
        return await self.parts.dispatcher.dispatch(work, self.attempt, self.record.deadline_s)

    async def _ask(self, beat: Heartbeat, request: Message, expected: type[R]) -> R:
        reply = await self.parts.bus.request(beat.instance_id, request, self._remaining_s())
        if not isinstance(reply, expected):
            raise InternalError("a stage answered with a message of another kind")
        return reply


def _first_tokens(reply: PrefillReply) -> Tokens:
    logprobs = () if reply.logprobs is None else (reply.logprobs,)
    return Tokens((reply.first_token,), reply.finish_reason, logprobs=logprobs)


def _most_telling(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several images' errors, the one to act on: our own bug, else what only the client can change, else the rest."""
    order = ("bad_request", "internal", "overloaded", "instance_lost")

    def rank(error: BaseException) -> int:
        return order.index(error.kind) if isinstance(error, TriptychError) else -1

    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(_most_telling(error) if isinstance(error, BaseExceptionGroup) else error)
    return min(flat, key=rank)
