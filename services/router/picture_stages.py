"""The stages of one picture until it is encoded: it becomes known, and is decoded, at once or when its pixels are needed.

When an instance is lost, that picture alone goes through them again, elsewhere. Used by pictures.py and encoding.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from triptych.services.router.dispatch import Work
from triptych.services.router.job import MAX_GIVEN_UP
from triptych.services.router.load_book import InstanceView
from triptych.services.router.media_gate import STORE_FULL
from triptych.services.router.picture import Picture, Tries
from triptych.services.router.routing import Choose
from triptych.services.router.stage_calls import StageCalls
from triptych.shared.errors import CACHE_MISS, GIVEN_UP, BadRequest, InstanceLost, InternalError, Overloaded, TriptychError
from triptych.shared.messages import Heartbeat, PreprocessReply, PreprocessRequest, TensorRef
from triptych.shared.policies.routing import Choice, choose_preprocess

R = TypeVar("R")
SMALL_FILE_BYTES = 16 << 10  # chosen: such a file delays other messages little, and an upload takes 1 ms longer (measured)
WHOLE_ATTEMPT = (STORE_FULL, CACHE_MISS, "request_released")  # codes of what another try with the same id cannot mend

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PictureStages:
    """Of one attempt. may_skip_decode: a picture that is known by its file need not be decoded to be identified."""

    calls: StageCalls
    may_skip_decode: bool

    async def identify(self, picture: Picture) -> None:
        """Set its image, and its pixels where it had to be decoded for that. Raises TriptychError."""
        while picture.image is None:
            try:
                is_asked_for = picture.file_key is not None  # by us, already
                await self._preprocess(picture, picture.tries, self.may_skip_decode and not is_asked_for)
                picture.is_new = picture.pixels is not None
            except InstanceLost as error:
                self.note_lost(picture, picture.tries, error)
                picture.media_id = None

    async def pixels(self, picture: Picture, tries: Tries) -> TensorRef | None:
        """Of a known picture, for one who tries to have it encoded. Raises TriptychError."""
        async with picture.decoding:
            if picture.pixels is None:
                await self._preprocess(picture, tries, may_skip_decode=False)
        return picture.pixels

    async def _preprocess(self, picture: Picture, tries: Tries, may_skip_decode: bool) -> None:
        """Where its file waits already, if it does."""
        if picture.source.is_gone:
            raise Overloaded(f"image {picture.index + 1} of the request was held where it got lost; try again later")

        def keeper_only(views: Sequence[InstanceView]) -> Choice:
            if picture.kept_at not in [view.instance_id for view in views]:
                raise InstanceLost("the file of an image is gone with its instance", instance_id=picture.kept_at or "")
            return Choice(picture.kept_at, "has the file")

        async def send(beat: Heartbeat, choice: Choice) -> PreprocessReply:
            tries.at = beat.instance_id
            return await self._send_media(picture, beat, may_skip_decode)

        choose: Choose = choose_preprocess if picture.media_id is None else keeper_only
        instance_id, reply = await self.calls.dispatch(Work("preprocess", 1, choose, send))
        if picture.file_key is not None:
            self.calls.parts.cache.files.keep(picture.file_key, reply.image)
        if picture.image not in (None, reply.image):  # what is at a URL may change, and the index be wrong
            raise InstanceLost("an image is another one than it was", code=CACHE_MISS)
        picture.image, picture.pixels = reply.image, reply.pixels
        picture.media_id, picture.kept_at = reply.media_id, instance_id

    async def _send_media(self, picture: Picture, beat: Heartbeat, may_skip_decode: bool) -> PreprocessReply:
        calls, source, media_id = self.calls, picture.source, picture.media_id
        content = (source.content or b"") if media_id is None else b""
        is_small = len(content) <= SMALL_FILE_BYTES
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
            content=content if is_small else b"",
        )
        try:
            if is_small:
                return await self.with_room(calls.ask(beat.instance_id, request, PreprocessReply))
            return await self.with_room(calls.parts.uploader.picture(beat, request, content))
        except BadRequest as error:
            error.param = error.param or source.param
            raise

    async def with_room(self, asking: Awaitable[R]) -> R:
        """The answer, of which a part stays there. A store that stays full may be full of parts of requests that wait for their
        rest, as this one does: it is asked nowhere else, the attempt is given up with all that it holds (see media_gate.py)."""
        try:
            return await asking
        except Overloaded as error:
            if error.code != "tensor_store_full":
                raise
            raise InstanceLost("a stage had no room for the request's pictures", code=STORE_FULL) from error

    def note_lost(self, picture: Picture, tries: Tries, error: InstanceLost) -> None:
        """Returns when another try is due. One that ended with its instance's role is nobody's failure.

        Raises:
            InstanceLost: the whole attempt is to be made again.
            TriptychError: it had its tries.
        """
        if error.code in WHOLE_ATTEMPT or self.calls.routes.is_coupled:
            raise error
        if error.code == GIVEN_UP:
            tries.num_given_up += 1
        elif tries.at is not None:
            tries.lost_at.append(tries.at)
        _log.info("a picture goes again", request_id=self.calls.request_id, picture=picture.index, code=error.code, at=tries.at)
        if self._is_lost_too_often(tries) or tries.num_given_up >= MAX_GIVEN_UP:
            raise self._given_up(picture, tries) from error

    def _is_lost_too_often(self, tries: Tries) -> bool:
        return len(tries.lost_at) >= self.calls.parts.limits.max_attempts

    def _given_up(self, picture: Picture, tries: Tries) -> TriptychError:
        """As of a whole request (see retry.py): what ended an instance each time is not tried again."""
        name = f"image {picture.index + 1} of the request"
        error: TriptychError = Overloaded(f"what was held for {name} got lost on every attempt; try again later")
        if self._is_lost_too_often(tries) and all(map(self.calls.parts.dispatcher.has_ended, tries.lost_at)):
            error = InternalError(f"{name} failed on every attempt")
        error.param = picture.source.param
        return error
