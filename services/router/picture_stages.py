"""The stages of pictures: each is preprocessed and then encoded, all of a request side by side. Used by attempt.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from triptych.services.router.data_url import ImageSource
from triptych.services.router.dispatch import Work
from triptych.services.router.media_gate import STORE_FULL
from triptych.services.router.stage_calls import StageCalls
from triptych.shared.errors import BadRequest, InstanceLost, Overloaded, TriptychError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import (
    EncodeReply,
    EncodeRequest,
    Heartbeat,
    Message,
    PreprocessReply,
    PreprocessRequest,
    TensorRef,
)
from triptych.shared.policies.routing import choose_encoder, choose_preprocess

R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class PictureStages:
    """`embeddings` once. infos: of the pictures that are preprocessed by now, by index. check_sizes: called when all are,
    before the last is encoded; may raise."""

    calls: StageCalls
    sources: Sequence[ImageSource]
    check_sizes: Callable[[], object]
    infos: dict[int, ImageInfo] = field(default_factory=dict)

    async def embeddings(self) -> list[TensorRef]:
        """Of all pictures, in order. Raises TriptychError, the most telling one of several."""
        if not self.sources:
            return []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(i, source)) for i, source in enumerate(self.sources)]
        except BaseExceptionGroup as errors:
            raise _most_telling(errors) from None
        return [task.result() for task in tasks]

    async def _one(self, index: int, source: ImageSource) -> TensorRef:
        """It goes on to an encoder as soon as it is preprocessed."""
        preprocess = Work("preprocess", 1, choose_preprocess, partial(self._send_media, source))
        _, item = await self.calls.dispatch(preprocess)
        self.infos[index] = item.image
        if len(self.infos) == len(self.sources):
            self.check_sizes()  # don't encode what won't fit
        encode = Work("encoder", item.image.num_tokens, choose_encoder, partial(self._send_pixels, item))
        _, encoded = await self.calls.dispatch(encode)
        return encoded.embeddings

    async def _send_media(self, source: ImageSource, beat: Heartbeat) -> PreprocessReply:
        calls = self.calls
        media_id = None
        if source.content is not None:
            try:
                media_id = await calls.parts.uploader.media(beat, calls.request_id, source.content, calls.remaining_s())
            except BadRequest as error:
                error.param = error.param or source.param
                raise
        request = PreprocessRequest(
            request_id=calls.request_id,
            router_id=calls.parts.router_id,
            param=source.param,
            timeout_s=calls.remaining_s(),
            url=source.url,
            media_id=media_id,
            limits=source.limits,
        )
        return await self._ask_for_room(beat, request, PreprocessReply)

    async def _send_pixels(self, item: PreprocessReply, beat: Heartbeat) -> EncodeReply:
        calls = self.calls
        request = EncodeRequest(calls.request_id, calls.parts.router_id, item.image, item.pixels, calls.remaining_s())
        return await self._ask_for_room(beat, request, EncodeReply)

    async def _ask_for_room(self, beat: Heartbeat, request: Message, expected: type[R]) -> R:
        """`ask` for what stays there. A store that stays full may be full of parts of requests that wait for their rest, as
        this one does: it is asked nowhere else, the attempt is given up with all that it holds (see media_gate.py)."""
        try:
            return await self.calls.ask(beat, request, expected)
        except Overloaded as error:
            if error.code != "tensor_store_full":
                raise
            raise InstanceLost("a stage had no room for the request's pictures", code=STORE_FULL) from error


def _most_telling(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several images' errors, the one to act on: our own bug, else what only the client can change, else the rest."""
    order = ("bad_request", "internal", "overloaded", "instance_lost")

    def rank(error: BaseException) -> int:
        return order.index(error.kind) if isinstance(error, TriptychError) else -1

    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(_most_telling(error) if isinstance(error, BaseExceptionGroup) else error)
    return min(flat, key=rank)
