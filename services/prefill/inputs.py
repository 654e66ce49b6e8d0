"""The embeddings of one prompt's images: each is pulled when it is encoded and its KV is not there already. Event loop only.
Where an image comes in parts, each of them is an image here.

Those that the request has are pulled when they are wanted, awaited ones when they were offered, too. The KV of all others
should be cached here; when one of them is wanted after all our own embeddings will do, else it is a cache miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from triptych.services.host_context import HostContext
from triptych.services.prefill.checks import check_embeddings
from triptych.shared.engine.api import ImageSpan
from triptych.shared.errors import CACHE_MISS, InstanceLost, InternalError
from triptych.shared.messages import PlacedImage, TensorRef


class PromptInputs:
    """Owns the pulls.

    spans: the images in the prompt; `embeddings` is set as they land. num_landed: how many did.

    Args:
        pulls: bounds all pulls of the role. The transport would refuse too many, and then others were gone from their owner.
        room: waits for room for so many bytes more.
        on_landed: the embeddings of one are here.
        on_failed: those of one will never be.
    """

    def __init__(
        self,
        context: HostContext,
        images: tuple[PlacedImage, ...],
        pulls: asyncio.Semaphore,
        room: Callable[[int], Awaitable[None]],
        on_landed: Callable[[], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._context = context
        self._images = images
        self._pulls = pulls
        self._room = room
        self._on_landed = on_landed
        self._on_failed = on_failed
        self._refs: list[asyncio.Future[TensorRef]] = [loop.create_future() for _ in images]
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.spans = [ImageSpan(placed.offset, placed.image, None) for placed in images]
        self.num_landed = 0
        for index, placed in enumerate(images):
            if placed.embeddings is not None:
                self._refs[index].set_result(placed.embeddings)

    def offer(self, index: int, embeddings: TensorRef) -> None:
        """An awaited image is encoded. Idempotent.

        Raises:
            InternalError: there is no such image, or its embeddings don't fit it.
        """
        if not 0 <= index < len(self.spans):
            raise InternalError("the prompt has no such image", code="invalid_message")
        check_embeddings(self._images[index], embeddings)
        if not self._refs[index].done():
            self._refs[index].set_result(embeddings)

    def want(self, num_cached_tokens: int) -> None:
        """Begin to bring the embeddings of all images but those whose KV is among the first num_cached_tokens."""
        for index, span in enumerate(self.spans):
            if span.end > num_cached_tokens and index not in self._tasks:
                task = self._tasks[index] = asyncio.create_task(self._bring(index), name="embeddings of an image")
                task.add_done_callback(self._ended)

    async def here(self) -> None:
        """Returns when all that are wanted and encoded are here. Raises what `_bring` does."""
        await asyncio.gather(*(task for index, task in self._tasks.items() if self._refs[index].done()))

    def num_bytes(self, num_cached_tokens: int) -> int:
        """What the images take that are not among the first num_cached_tokens. Those that are awaited get their room when they
        come: until then others may have it."""
        spans = [span for span, placed in zip(self.spans, self._images, strict=True) if not placed.is_awaited]
        return sum(self._size(span) for span in spans if span.end > num_cached_tokens)

    def _size(self, span: ImageSpan) -> int:
        return span.image.num_tokens * self._context.engine.embedding_bytes

    async def close(self) -> None:
        """End the pulls, release what was our own."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for future in self._refs:
            if not future.cancel() and not future.cancelled():  # one that was awaited in vain is cancelled with its task
                self._context.drop(future.result())

    async def _bring(self, index: int) -> None:
        """Raises InstanceLost: the embeddings are gone, or nobody sends any."""
        placed, span = self._images[index], self.spans[index]
        if placed.embeddings is None and not placed.is_awaited and not self._refs[index].done():
            span.embeddings = self._context.embeddings.find(placed.image)
            if span.embeddings is None:
                raise InstanceLost("the KV of an image is no longer cached", code=CACHE_MISS)
        else:
            ref = await self._refs[index]  # no timeout: the request's own bounds it
            if placed.is_awaited:
                await self._room(self._size(span))
            async with self._pulls:
                span.embeddings = await self._context.pull(ref)
        self.num_landed += 1
        self._on_landed()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failed(error if isinstance(error, Exception) else InternalError())
