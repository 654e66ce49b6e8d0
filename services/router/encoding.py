"""How a known picture gets its embeddings: from whoever holds them, else encoded; whole, or divided among several encoders.

When an encoder is lost, what it had of the picture goes elsewhere, and nothing else. Used by pictures.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from triptych.cache.held_parts import HeldPart, cover
from triptych.services.router.dispatch import Work
from triptych.services.router.load_book import InstanceView
from triptych.services.router.media_gate import STORE_FULL
from triptych.services.router.picture import Picture, Shard
from triptych.services.router.picture_stages import PictureStages
from triptych.services.router.routing import Choose
from triptych.shared.errors import CACHE_MISS, InstanceLost, InternalError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import EncodeReply, EncodeRequest, Heartbeat, InstanceId, TensorRef
from triptych.shared.policies.pace import Pace
from triptych.shared.policies.routing import Choice, ImageWork
from triptych.shared.policies.sharding import DivisibleImage, Share


@dataclass(frozen=True, slots=True)
class Encoding:
    """Of one attempt. slack_s: until embeddings are due; None: there is no target. num_tokens: of all its pictures."""

    stages: PictureStages
    slack_s: Callable[[], float | None]
    num_tokens: Callable[[], int]

    async def encode(self, picture: Picture, held: Collection[HeldPart], prompt_at: InstanceId | None) -> None:
        """Returns when the embeddings of all its shards are there. held: what is thought to be held of it. prompt_at: where its
        prompt will probably be computed. Raises TriptychError, of several shards in a group."""
        assert picture.image is not None
        if not picture.shards:
            picture.shards = self._shards(picture.image, held, prompt_at)
        if picture.is_divided:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(picture, shard, held, prompt_at)) for shard in picture.shards]
            were_held = [task.result() for task in tasks]
        else:
            were_held = [await self._one(picture, picture.shards[0], held, prompt_at)]
        self.stages.calls.record.pictures["held" if all(were_held) else "encoded"] += 1

    def _shards(self, image: ImageInfo, held: Collection[HeldPart], prompt_at: InstanceId | None) -> list[Shard]:
        """As its parts are held; if none is, as the policy divides it."""
        if held or image.num_pieces == 1:
            return [Shard(part) for part in cover(image, held)]
        piece_tokens = image.num_tokens // image.num_pieces
        whole = DivisibleImage(image.num_pieces, piece_tokens, prompt_at, self._transfer_s(image.num_tokens))
        shards: list[Shard] = []
        first = 0
        for share in self.stages.calls.routes.shares(whole):
            shards.append(Shard(image.part(first, share.num_pieces), share))
            first += share.num_pieces
        return shards or [Shard(image)]

    def _transfer_s(self, num_tokens: int) -> float:
        return self.stages.calls.parts.transfers.embeddings.transfer_s(num_tokens)

    async def _one(self, picture: Picture, shard: Shard, held: Collection[HeldPart], prompt_at: InstanceId | None) -> bool:
        """Whether its embeddings were held; otherwise they were made."""
        num_tokens = shard.image.num_tokens
        holders = [part.instance_id for part in held if part.is_of(shard.image)]
        if holders and await self._held(picture, shard, ImageWork(num_tokens, holders)):
            return True
        work = ImageWork(num_tokens, (), prompt_at, self._transfer_s(num_tokens))
        while not shard.is_encoded.is_set():
            pixels = None
            try:
                pixels = await self.stages.pixels(picture, shard.tries)
                await self._ask(picture, shard, work, self._expecting(picture, shard, work), pixels)
            except InstanceLost as error:
                self.stages.note_lost(picture, shard.tries, error)
                is_left = picture.is_divided and pixels is not None and error.instance_id == shard.tries.at
                if picture.pixels is pixels and not is_left:  # else they are still where all shards have them from
                    picture.pixels = picture.media_id = None
            except InternalError as error:
                error.param = error.param or picture.source.param
                raise
        return False

    async def _held(self, picture: Picture, shard: Shard, work: ImageWork) -> bool:
        """False: nobody holds them after all."""
        choose = self.stages.calls.routes.encoder(work)

        def holder_only(views: Sequence[InstanceView]) -> Choice:
            choice = choose(views)
            if choice is None or not choice.num_cached_tokens:
                raise InstanceLost("nobody holds the embeddings of an image any more", code=CACHE_MISS)
            picture.place(shard, choice.instance_id)
            return choice

        try:
            await self._ask(picture, shard, work, holder_only, None)
        except InstanceLost as error:
            if error.code == STORE_FULL:
                raise
            self.stages.calls.record.num_stale += 1
        return shard.is_encoded.is_set()

    def _expecting(self, picture: Picture, shard: Shard, work: ImageWork) -> Choose:
        """Whose share it is, if that one takes it, or else the rules' choice; it tells when the embeddings will be there."""
        rules = self.stages.calls.routes.encoder(work)

        def choose_and_tell(views: Sequence[InstanceView]) -> Choice | None:
            choice = _as_shared(shard.share, views) or rules(views)
            if choice is not None:
                chosen = next(view for view in views if view.instance_id == choice.instance_id)
                due_at_s = time.monotonic() + Pace.of(views).finish_s(chosen, work.num_tokens)
                picture.place(shard, choice.instance_id, due_at_s)
            return choice

        return choose_and_tell

    async def _ask(self, picture: Picture, shard: Shard, work: ImageWork, choose: Choose, pixels: TensorRef | None) -> None:
        """Sets its embeddings."""
        calls = self.stages.calls

        async def send(beat: Heartbeat, choice: Choice) -> EncodeReply:
            shard.tries.at = beat.instance_id
            what = (shard.image, pixels, calls.remaining_s(), self.slack_s(), self.num_tokens())
            request = EncodeRequest(calls.request_id, calls.parts.router_id, *what)
            return await self.stages.with_room(calls.ask(beat.instance_id, request, EncodeReply))

        _, reply = await calls.dispatch(Work("encoder", work.num_tokens, choose, send))
        shard.embeddings = reply.embeddings
        shard.is_encoded.set()


def _as_shared(share: Share | None, views: Sequence[InstanceView]) -> Choice | None:
    if share is None or all(view.instance_id != share.instance_id for view in views):
        return None
    return Choice(share.instance_id, share.reason)
