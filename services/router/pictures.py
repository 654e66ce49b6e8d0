"""The pictures of one attempt, side by side: each is settled as soon as it is known, then encoded if it must be.

Those that are known at the same time share one question to the cache index. Used by attempt.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from triptych.services.router.cached_parts import CachedParts
from triptych.services.router.job import Job
from triptych.services.router.picture_stages import Picture, PictureStages
from triptych.services.router.stage_calls import StageCalls
from triptych.shared.errors import InstanceLost, TriptychError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import Accepted, EmbeddingsReady, InstanceId, PlacedImage, TensorRef
from triptych.shared.policies.pace import Pace
from triptych.shared.policies.routing import EMBEDDING_COSTS

Encoding = asyncio.Task[TensorRef | None]

PATIENCE_S = 0.1  # chosen: pictures of a request are mostly known within less of each other, but one may be far away


class Pictures:
    """`identify` once, then `start` in the group that owns what runs, then the rest. check_sizes: called when all are known,
    before the last is encoded; may raise."""

    def __init__(self, calls: StageCalls, job: Job, cached: CachedParts, check_sizes: Callable[[], object]) -> None:
        rules = calls.parts.cache.rules
        self._calls = calls
        self._cached = cached
        self._check_sizes = check_sizes
        self._keeps_any = rules.keeps_kv or rules.keeps_embeddings
        self._num_text_tokens = job.prompt.num_text_tokens
        self._stages = PictureStages(calls, self._keeps_any, self._slack_s)
        self._pictures = [Picture(index, source) for index, source in enumerate(job.sources)]
        self._settling = asyncio.Lock()
        self._tasks: list[Encoding] = []

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

    def saved_s(self) -> dict[InstanceId, float]:
        """By encoder, what it takes to bring their embeddings from there."""
        saved_s: dict[InstanceId, float] = {}
        for picture in self._pictures:
            if picture.encoder_id is not None and picture.image is not None:
                transfer_s = EMBEDDING_COSTS.transfer_s(picture.image.num_tokens)
                saved_s[picture.encoder_id] = saved_s.get(picture.encoder_id, 0.0) + transfer_s
        return saved_s

    @property
    def need_room(self) -> bool:
        """Whether a stage will have to hold something of them."""
        return not all(picture.is_left_out for picture in self._pictures)

    @property
    def missing(self) -> list[Picture]:
        """Those whose embeddings are needed and not there; all settled."""
        pairs = zip(self._pictures, self._tasks, strict=True)
        return [picture for picture, task in pairs if not picture.is_left_out and not task.done()]

    @property
    def kept_at(self) -> set[InstanceId]:
        """Who keeps the file of a picture that was only identified."""
        return {picture.kept_at for picture in self._pictures if picture.media_id is not None and picture.kept_at is not None}

    async def identify(self) -> None:
        """Those that are known by the bytes that were sent, and what is cached of them."""
        files = self._calls.parts.cache.files
        image_options, salt = self._calls.parts.cache.image, self._calls.terms.cache_salt
        sent = [(picture, picture.source.content) for picture in self._pictures if picture.source.content is not None]
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
        """Returns when all are settled, and those that were new have an encoder, if there is one."""
        for picture in self._pictures:
            await picture.is_settled.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                for picture in self._pictures:
                    if picture.is_new:
                        await picture.is_placed.wait()

    async def encoded(self) -> None:
        """Returns when all embeddings are there. Cancelled when a picture fails: its group tells why."""
        await asyncio.gather(*self._tasks)

    def placed(self, offsets: Sequence[int]) -> tuple[PlacedImage, ...]:
        """As they are now; all are settled."""
        placed = []
        for picture, task, offset in zip(self._pictures, self._tasks, offsets, strict=True):
            assert picture.image is not None
            is_awaited = not picture.is_left_out and not task.done()
            embeddings = None if picture.is_left_out or is_awaited else task.result()
            placed.append(PlacedImage(picture.image, offset, embeddings, is_awaited))
        return tuple(placed)

    @contextmanager
    def forwarding(self, group: asyncio.TaskGroup, instance_id: InstanceId) -> Iterator[None]:
        """Inside the block that instance is told of embeddings as they come."""
        telling = [group.create_task(self._forward(picture, instance_id)) for picture in self.missing]
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

    async def _one(self, picture: Picture, prompt_at: InstanceId | None) -> TensorRef | None:
        if picture.image is None:
            await self._stages.identify(picture)
            if None not in self.images:
                self._check_sizes()  # don't encode what won't fit
        await self._settle()
        await picture.is_settled.wait()
        if picture.is_left_out:
            self._calls.record.pictures["kv"] += 1
            picture.is_placed.set()
            return None
        await self._wait_for_turn(picture)
        holders = [one for one in await self._holders(picture) if self._calls.may_use("encoder", one)]
        return await self._stages.embeddings(picture, holders, prompt_at)

    async def _wait_for_turn(self, picture: Picture) -> None:
        """Encoders get pictures in the order in which prefill needs them, unless one takes long to be known."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                for before in self._pictures[: picture.index]:
                    await before.is_placed.wait()

    async def _holders(self, picture: Picture) -> Collection[InstanceId]:
        """Who has its embeddings: the index tells, or the same picture earlier in the request."""
        assert picture.image is not None
        mm_hash = picture.image.mm_hash
        if self._calls.parts.cache.rules.keeps_embeddings:
            for twin, encoding in zip(self._pictures[: picture.index], self._tasks, strict=False):
                if twin.image is not None and twin.image.mm_hash == mm_hash and not twin.is_left_out:
                    picture.is_placed.set()
                    await asyncio.wait([encoding])
                    return [twin.encoder_id] if twin.encoder_id is not None else []
        return self._cached.embeddings.get(mm_hash, ())

    def _slack_s(self) -> float | None:
        """Until embeddings are due: what is left after the prompt was computed. None: there is no target."""
        slack_s = self._calls.slack_s()
        if slack_s is None:
            return None
        pace = Pace.of(self._calls.parts.book.views("prefill"))
        return max(0.0, slack_s - (self._num_text_tokens + self.num_tokens) / pace.tokens_per_s)

    async def _settle(self) -> None:
        """A picture can be covered by cached KV when all before it are known. A new one does not wait for them."""
        async with self._settling:
            self._cached.advance(self.images)
            ripe = [picture for picture in self._pictures if picture.image is not None and not picture.is_settled.is_set()]
            ripe = [picture for picture in ripe if picture.is_new or self._cached.is_ripe(picture.index)]
            if not ripe and self._pictures:
                return
            await self._cached.ask([picture.image.mm_hash for picture in ripe if picture.image is not None])
            for picture in ripe:
                picture.is_left_out = self._cached.leave_out(picture.index)
                picture.is_settled.set()

    async def _forward(self, picture: Picture, instance_id: InstanceId) -> None:
        task = self._tasks[picture.index]
        await asyncio.wait([task])
        if task.cancelled() or task.exception() is not None or (embeddings := task.result()) is None:
            return
        ready = EmbeddingsReady(self._calls.request_id, picture.index, embeddings)
        with suppress(InstanceLost):  # then prefill's own answer tells, or it needed no embeddings and is done
            await self._calls.ask(instance_id, ready, Accepted)


def most_telling(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several pictures' errors, the one to act on: our own bug, else what only the client can change, else the rest."""
    order = ("bad_request", "internal", "overloaded", "instance_lost")

    def rank(error: BaseException) -> int:
        return order.index(error.kind) if isinstance(error, TriptychError) else -1

    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(most_telling(error) if isinstance(error, BaseExceptionGroup) else error)
    return min(flat, key=rank)
