"""The pictures of one attempt, side by side: each is settled as soon as it is known, then encoded if it must be.

Those that are known at the same time share one question to the cache index. Used by attempt.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from triptych.cache.held_parts import HeldPart, held_part
from triptych.services.router.cached_parts import CachedParts
from triptych.services.router.encoding import Encoding
from triptych.services.router.job import Job
from triptych.services.router.picture import Picture, Shard
from triptych.services.router.picture_stages import PictureStages
from triptych.services.router.stage_calls import StageCalls
from triptych.shared.errors import InstanceLost, TriptychError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import Accepted, EmbeddingsReady, InstanceId, PlacedImage
from triptych.shared.policies.pace import Pace

PATIENCE_S = 0.1  # chosen: pictures of a request are mostly known within less of each other, but one may be far away


class Pictures:
    """`identify` once, then `start` in the group that owns what runs, then the rest. check_sizes: called when all are known,
    before the last is encoded; may raise."""

    def __init__(self, calls: StageCalls, job: Job, cached: CachedParts, check_sizes: Callable[[], object]) -> None:
        self._calls = calls
        self._cached = cached
        self._check_sizes = check_sizes
        self._keeps_any = calls.parts.cache.rules.keeps_any
        self._num_text_tokens = job.prompt.num_text_tokens
        self._stages = PictureStages(calls, self._keeps_any)
        self._encoding = Encoding(self._stages, self._slack_s, lambda: self.num_expected_tokens)
        self._siblings = job.siblings if len(calls.record.attempts) == 1 else None
        known = self._siblings.images if self._siblings is not None else ()
        self._pictures = [
            Picture(index, source, image=known[index] if known else source.image) for index, source in enumerate(job.sources)
        ]
        self._settling = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._pictures)

    @property
    def images(self) -> list[ImageInfo | None]:
        """None where it is not known yet."""
        return [picture.image for picture in self._pictures]

    @property
    def num_tokens(self) -> int:
        """Of those that are known."""
        return sum(image.num_tokens for image in self.images if image is not None)

    @property
    def num_needed_tokens(self) -> int:
        """The same of those whose embeddings are needed."""
        needed = (picture.image for picture in self._pictures if not picture.is_left_out)
        return sum(image.num_tokens for image in needed if image is not None)

    @property
    def num_expected_tokens(self) -> int:
        """Of all whose embeddings are needed, at least one of them known: the others count as these do on average."""
        num_known = sum(image is not None for image in self.images)
        return self.num_needed_tokens * len(self) // num_known

    def saved_s(self) -> dict[InstanceId, float]:
        """By encoder, what it takes to bring their embeddings from there."""
        saved_s: dict[InstanceId, float] = {}
        costs = self._calls.parts.transfers.embeddings
        for shard in itertools.chain.from_iterable(picture.shards for picture in self._pictures):
            if shard.encoder_id is not None:
                saved_s[shard.encoder_id] = saved_s.get(shard.encoder_id, 0.0) + costs.transfer_s(shard.image.num_tokens)
        return saved_s

    @property
    def need_room(self) -> bool:
        """Whether a stage will have to hold something of them."""
        return not all(picture.is_left_out for picture in self._pictures)

    @property
    def missing(self) -> list[tuple[Picture, Shard]]:
        """Those whose embeddings are needed and not there, in parts; all are settled."""
        return [(picture, shard) for picture, shard in self._in_parts() if _is_awaited(picture, shard)]

    @property
    def kept_at(self) -> set[InstanceId]:
        """Who keeps the file of a picture that was only identified, or pixels from which several encoders had their parts."""
        files = {picture.kept_at for picture in self._pictures if picture.media_id is not None and picture.kept_at is not None}
        return files | {one.pixels.owner for one in self._pictures if one.is_divided and one.pixels is not None}

    async def identify(self) -> None:
        """Those that are known by the bytes that were sent, and what is cached of them."""
        files = self._calls.parts.cache.files
        image_options, salt = self._calls.parts.cache.image, self._calls.terms.cache_salt
        unknown = [picture for picture in self._pictures if picture.image is None]
        sent = [(picture, picture.source.content) for picture in unknown if picture.source.content is not None]
        if sent and self._keeps_any:
            options = [image_options.within(picture.source.limits).key() for picture, _ in sent]
            hashing = (files.key_of(content, key, salt) for (_, content), key in zip(sent, options, strict=True))
            keys = await asyncio.gather(*hashing)
            for (picture, _), key, image in zip(sent, keys, await files.find(keys), strict=True):
                picture.file_key, picture.image = key, image
            if None not in self.images:
                self._check_sizes()
        await self._settle()

    def start(self, group: asyncio.TaskGroup, prompt_at: InstanceId | None) -> None:
        """Work for all that are needed."""
        self._tasks = [group.create_task(self._one(picture, prompt_at)) for picture in self._pictures]

    async def known(self) -> None:
        """Returns when all are settled, those that were new have an encoder, if there is one, and what is cached is known."""
        for picture in self._pictures:
            await picture.is_settled.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                for picture in self._pictures:
                    if picture.is_new:
                        await picture.is_placed.wait()
        await self._cached.ask()

    def encoded_at(self) -> dict[bytes, list[HeldPart]]:
        """By mm_hash, who has their embeddings, in which parts."""
        held: dict[bytes, list[HeldPart]] = {}
        for _, shard in self._in_parts():
            if shard.encoder_id is not None:
                held.setdefault(shard.image.mm_hash, []).append(HeldPart.of(shard.encoder_id, shard.image))
        return held

    async def encoded(self) -> None:
        """Returns when all embeddings are there. Cancelled when a picture fails: its group tells why."""
        await asyncio.gather(*self._tasks)

    def placed(self, offsets: Sequence[int]) -> tuple[PlacedImage, ...]:
        """As they are now, in parts; all are settled. Those of which it is not clear yet how they are encoded stay whole."""
        for picture in self._pictures:
            picture.shards = picture.in_parts()
        return tuple(
            PlacedImage(one.image, offsets[picture.index] + one.offset, one.embeddings, is_awaited=_is_awaited(picture, one))
            for picture, one in self._in_parts()
        )

    @contextmanager
    def forwarding(self, group: asyncio.TaskGroup, instance_id: InstanceId) -> Iterator[None]:
        """Inside the block that instance is told of embeddings as they come. They were placed before."""
        parts = enumerate(self._in_parts())
        telling = [group.create_task(self._forward(i, part[1], instance_id)) for i, part in parts if _is_awaited(*part)]
        try:
            yield
        finally:
            for task in telling:
                task.cancel()

    def stop(self) -> None:
        """What still runs is of no use any more, nor are the files."""
        for task in self._tasks:
            task.cancel()
        self._tasks, self._pictures = [], []

    async def _one(self, picture: Picture, prompt_at: InstanceId | None) -> None:
        if picture.image is None:
            await self._stages.identify(picture)
            if None not in self.images:
                self._check_sizes()  # don't encode what won't fit
        await self._settle()
        await picture.is_settled.wait()
        if picture.is_left_out:
            self._calls.record.pictures["kv"] += 1
            picture.is_placed.set()
            return
        await self._wait_for_turn(picture)
        held = [part for part in await self._held(picture) if self._calls.may_use("encoder", part.instance_id)]
        await self._encoding.encode(picture, held, prompt_at)

    async def _wait_for_turn(self, picture: Picture) -> None:
        """Encoders get pictures in the order in which prefill needs them, unless one takes long to be known."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                for before in self._pictures[: picture.index]:
                    await before.is_placed.wait()

    async def _held(self, picture: Picture) -> list[HeldPart]:
        """What is held of it, and by whom: the index tells, or the same picture earlier in the request."""
        assert picture.image is not None
        mm_hash = picture.image.mm_hash
        if self._calls.parts.cache.rules.keeps_embeddings:
            for twin, encoding in zip(self._pictures[: picture.index], self._tasks, strict=False):
                if twin.image is not None and twin.image.mm_hash == mm_hash and not twin.is_left_out:
                    picture.shards = picture.shards or [Shard(shard.image) for shard in twin.shards]
                    picture.is_placed.set()
                    await asyncio.wait([encoding])
                    return [HeldPart.of(shard.encoder_id, shard.image) for shard in twin.shards if shard.encoder_id]
        told = self._siblings.encoded.get(mm_hash, ()) if self._siblings is not None else ()
        return [*told, *map(held_part, self._cached.embeddings.get(mm_hash, ()))]

    def _slack_s(self) -> float | None:
        """Until embeddings are due: what is left after the prompt was computed. None: there is no target."""
        slack_s = self._calls.slack_s()
        if slack_s is None:
            return None
        pace = Pace.of(self._calls.parts.book.views("prefill"))
        return max(0.0, slack_s - (self._num_text_tokens + self.num_tokens) / pace.tokens_per_s)

    async def _settle(self) -> None:
        """A picture can be covered by cached KV when all before it are known. One that had to be decoded to be known does not
        wait for those: mostly it is new, but it may be one that somebody holds, in another file."""
        self._cached.advance(self.images)
        async with self._settling:
            ripe = [picture for picture in self._pictures if picture.image is not None and not picture.is_settled.is_set()]
            ripe = [picture for picture in ripe if picture.is_new or self._cached.is_ripe(picture.index)]
            if not ripe and self._pictures:
                return
            await self._cached.ask([picture.image.mm_hash for picture in ripe if picture.image is not None])
            for picture in ripe:
                picture.is_left_out = self._cached.leave_out(picture.index)
                picture.is_settled.set()

    async def _forward(self, index: int, shard: Shard, instance_id: InstanceId) -> None:
        await shard.is_encoded.wait()  # if that fails, this ends with its group
        assert shard.embeddings is not None
        ready = EmbeddingsReady(self._calls.request_id, index, shard.embeddings)
        with suppress(InstanceLost):  # then prefill's own answer tells, or it needed no embeddings and is done
            await self._calls.ask(instance_id, ready, Accepted)

    def _in_parts(self) -> list[tuple[Picture, Shard]]:
        return [(picture, shard) for picture in self._pictures for shard in picture.in_parts()]


def _is_awaited(picture: Picture, shard: Shard) -> bool:
    return not picture.is_left_out and shard.embeddings is None


def most_telling(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several pictures' errors, the one to act on: our own bug, else what only the client can change, else the rest."""
    order = ("bad_request", "internal", "overloaded", "instance_lost")

    def rank(error: BaseException) -> int:
        return order.index(error.kind) if isinstance(error, TriptychError) else -1

    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(most_telling(error) if isinstance(error, BaseExceptionGroup) else error)
    return min(flat, key=rank)
