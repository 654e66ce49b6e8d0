"""The stages of one picture: it becomes known, and is then decoded and encoded, unless somebody holds its embeddings.

When an instance is lost, that picture alone goes through them again, elsewhere. Used by pictures.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from triptych.services.router.data_url import ImageSource
from triptych.services.router.dispatch import Work
from triptych.services.router.load_book import InstanceView
from triptych.services.router.media_gate import STORE_FULL
from triptych.services.router.routing import Choose
from triptych.services.router.stage_calls import StageCalls
from triptych.shared.errors import CACHE_MISS, BadRequest, InstanceLost, InternalError, Overloaded, TriptychError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import (
    EncodeReply,
    EncodeRequest,
    Heartbeat,
    InstanceId,
    Message,
    PreprocessReply,
    PreprocessRequest,
    TensorRef,
)
from triptych.shared.policies.pace import Pace
from triptych.shared.policies.routing import EMBEDDING_COSTS, Choice, ImageWork, choose_preprocess

R = TypeVar("R", bound=Message)
WHOLE_ATTEMPT = (STORE_FULL, CACHE_MISS, "request_released")  # codes of what another try with the same id cannot mend

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Picture:
    """One picture of an attempt.

    file_key: of one that was sent along. image: once it is known. pixels: once it is decoded; media_id, kept_at: where its file
    waits for that. is_new: it had to be decoded to be known. is_settled: set when it is clear whether its embeddings are
    needed; if not, is_left_out. encoder_id, due_at_s: where and when they are expected; is_placed: set when that is decided.
    at: where it went last; lost_at: where its tries ended.
    """

    index: int
    source: ImageSource
    file_key: bytes | None = None
    image: ImageInfo | None = None
    pixels: TensorRef | None = None
    media_id: str | None = None
    kept_at: InstanceId | None = None
    is_new: bool = False
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)
    is_left_out: bool = False
    is_placed: asyncio.Event = field(default_factory=asyncio.Event)
    encoder_id: InstanceId | None = None
    due_at_s: float | None = None
    at: InstanceId | None = None
    lost_at: list[InstanceId] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PictureStages:
    """Of one attempt. may_skip_decode: a picture that is known by its file need not be decoded to be identified. slack_s: until
    embeddings are due; None: there is no target."""

    calls: StageCalls
    may_skip_decode: bool
    slack_s: Callable[[], float | None]

    async def identify(self, picture: Picture) -> None:
        """Set its image, and its pixels where it had to be decoded for that. Raises TriptychError."""
        while picture.image is None:
            try:
                is_asked_for = picture.file_key is not None  # by us, already
                await self._preprocess(picture, self.may_skip_decode and not is_asked_for)
                picture.is_new = picture.pixels is not None
            except InstanceLost as error:
                self._note_lost(picture, error)

    async def embeddings(self, picture: Picture, holders: Collection[InstanceId], prompt_at: InstanceId | None) -> TensorRef:
        """Of a known picture: those that one of the holders has, else new ones. prompt_at: where its prompt will probably be
        computed. Raises TriptychError."""
        assert picture.image is not None
        num_tokens = picture.image.num_tokens
        if holders and (held := await self._held(picture, ImageWork(num_tokens, holders))) is not None:
            return held
        work = ImageWork(num_tokens, (), prompt_at, EMBEDDING_COSTS.transfer_s(num_tokens))
        while True:
            try:
                if picture.pixels is None:
                    await self._preprocess(picture, may_skip_decode=False)
                reply = await self._encoder(picture, work, self._expecting(picture, work), picture.pixels)
            except InstanceLost as error:
                self._note_lost(picture, error)
            else:
                self.calls.record.pictures["encoded"] += 1
                return reply.embeddings

    async def _held(self, picture: Picture, work: ImageWork) -> TensorRef | None:
        """None: nobody holds them after all."""
        choose = self.calls.routes.encoder(work)

        def holder_only(views: Sequence[InstanceView]) -> Choice:
            choice = choose(views)
            if choice is None or not choice.num_cached_tokens:
                raise InstanceLost("nobody holds the embeddings of an image any more", code=CACHE_MISS)
            picture.encoder_id = choice.instance_id
            picture.is_placed.set()
            return choice

        try:
            reply = await self._encoder(picture, work, holder_only, None)
        except InstanceLost as error:
            if error.code == STORE_FULL:
                raise
            self.calls.record.num_stale += 1
            return None
        self.calls.record.pictures["held"] += 1
        return reply.embeddings

    def _expecting(self, picture: Picture, work: ImageWork) -> Choose:
        """The rules' choice; it tells when the embeddings will be there."""
        choose = self.calls.routes.encoder(work)

        def choose_and_tell(views: Sequence[InstanceView]) -> Choice | None:
            choice = choose(views)
            if choice is not None:
                picture.encoder_id = choice.instance_id
                picture.is_placed.set()
                chosen = next(view for view in views if view.instance_id == choice.instance_id)
                picture.due_at_s = time.monotonic() + Pace.of(views).finish_s(chosen, work.num_tokens)
            return choice

        return choose_and_tell

    async def _encoder(self, picture: Picture, work: ImageWork, choose: Choose, pixels: TensorRef | None) -> EncodeReply:
        calls, image = self.calls, picture.image
        assert image is not None

        async def send(beat: Heartbeat, choice: Choice) -> EncodeReply:
            picture.at = beat.instance_id
            request = EncodeRequest(calls.request_id, calls.parts.router_id, image, pixels, calls.remaining_s(), self.slack_s())
            return await self._ask_for_room(beat, request, EncodeReply)

        _, reply = await calls.dispatch(Work("encoder", work.num_tokens, choose, send))
        return reply

    async def _preprocess(self, picture: Picture, may_skip_decode: bool) -> None:
        """Where its file waits already, if it does."""

        def keeper_only(views: Sequence[InstanceView]) -> Choice:
            if picture.kept_at not in [view.instance_id for view in views]:
                raise InstanceLost("the file of an image is gone with its instance", instance_id=picture.kept_at or "")
            return Choice(picture.kept_at, "has the file")

        async def send(beat: Heartbeat, choice: Choice) -> PreprocessReply:
            picture.at = beat.instance_id
            return await self._send_media(picture, beat, may_skip_decode)

        choose: Choose = choose_preprocess if picture.media_id is None else keeper_only
        instance_id, reply = await self.calls.dispatch(Work("preprocess", 1, choose, send))
        if picture.image not in (None, reply.image):  # what is at a URL may change
            raise InstanceLost("an image is another one than it was", code=CACHE_MISS)
        picture.image, picture.pixels = reply.image, reply.pixels
        picture.media_id, picture.kept_at = reply.media_id, instance_id
        if picture.file_key is not None:
            self.calls.parts.cache.files.keep(picture.file_key, reply.image)

    async def _send_media(self, picture: Picture, beat: Heartbeat, may_skip_decode: bool) -> PreprocessReply:
        calls, source, media_id = self.calls, picture.source, picture.media_id
        if media_id is None and source.content is not None:
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
            url=source.url if media_id is None else None,
            media_id=media_id,
            limits=source.limits,
            cache_salt=calls.terms.cache_salt,
            may_skip_decode=may_skip_decode,
        )
        return await self._ask_for_room(beat, request, PreprocessReply)

    async def _ask_for_room(self, beat: Heartbeat, request: Message, expected: type[R]) -> R:
        """`ask` for what stays there. A store that stays full may be full of parts of requests that wait for their rest, as
        this one does: it is asked nowhere else, the attempt is given up with all that it holds (see media_gate.py)."""
        try:
            return await self.calls.ask(beat.instance_id, request, expected)
        except Overloaded as error:
            if error.code != "tensor_store_full":
                raise
            raise InstanceLost("a stage had no room for the request's pictures", code=STORE_FULL) from error

    def _note_lost(self, picture: Picture, error: InstanceLost) -> None:
        """Returns when another try of this picture is due, from its file on: who pulled its pixels took them away.

        Raises:
            InstanceLost: the whole attempt is to be made again.
            TriptychError: it had its tries.
        """
        if error.code in WHOLE_ATTEMPT or self.calls.routes.is_coupled:
            raise error
        picture.pixels = picture.media_id = None
        if picture.at is not None:
            picture.lost_at.append(picture.at)
        _log.info(
            "a picture goes again", request_id=self.calls.request_id, picture=picture.index, code=error.code, at=picture.at
        )
        if len(picture.lost_at) >= self.calls.parts.limits.max_attempts:
            raise self._given_up(picture) from error

    def _given_up(self, picture: Picture) -> TriptychError:
        """As of a whole request (see retry.py): what ended an instance each time is not tried again."""
        name = f"image {picture.index + 1} of the request"
        error: TriptychError = Overloaded(f"what was held for {name} got lost on every attempt; try again later")
        if all(map(self.calls.parts.dispatcher.has_ended, picture.lost_at)):
            error = InternalError(f"{name} failed on every attempt")
        error.param = picture.source.param
        return error
