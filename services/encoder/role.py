"""The encoder role: pulls an image's pixels, runs the vision tower over a batch of images, leases the embeddings.

Images are taken first come, first served; one that breaks the vision tower fails alone. Used by the instance host.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from triptych.shared.budget import Budget
from triptych.shared.engine.isolate import as_typed, each_alone
from triptych.shared.engine.loop import StepLoop
from triptych.shared.engine.role import LEASE_GRACE_S, MAX_PULLS, HostContext, Intake, deadline, settle
from triptych.shared.errors import InternalError
from triptych.shared.image_info import ImageInfo
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import EncodeReply, EncodeRequest, InstanceRequest, StageTime
from triptych.shared.policies.batching import num_to_batch

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch

IN_HAND_FACTOR = 2  # chosen: while one batch is encoded, the pixels of the next are pulled
MAX_BATCH_IMAGES = 64  # chosen: bounds a batch of tiny images


@dataclass(slots=True, eq=False)
class _Job:
    """pixels: uint8 [height, width, 3]. begun_at_s: when its batch began, monotonic."""

    image: ImageInfo
    pixels: torch.Tensor
    result: asyncio.Future[torch.Tensor]
    begun_at_s: float = 0.0


class EncoderRole:
    """Implements StageRole."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._intake = Intake("encoder", context.settings.max_waiting)
        self._in_hand = Budget(IN_HAND_FACTOR * context.settings.max_encode_tokens)
        self._pulls = asyncio.Semaphore(MAX_PULLS)
        self._queue: deque[_Job] = deque()
        self._loop = StepLoop("encoder", self._step, self._on_error)
        self._batch: list[_Job] = []
        self._num_requests = 0
        self._num_pending_tokens = 0

    async def start(self) -> None:
        self._intake.is_open = True
        self._loop.start()

    def stop_intake(self) -> None:
        self._intake.is_open = False

    def is_idle(self) -> bool:
        return self._num_requests == 0 and not self._loop.is_stepping

    async def stop(self) -> None:
        self.stop_intake()
        await self._loop.stop()

    def load(self) -> StageLoad:
        num_running = len(self._batch)
        return StageLoad("encoder", max(self._num_requests - num_running, 0), num_running, self._num_pending_tokens)

    async def handle(self, request: InstanceRequest) -> EncodeReply:
        """Encode one image.

        Raises:
            TriptychError: refused, its inputs are gone, it broke the vision tower, or its time ran out.
        """
        if not isinstance(request, EncodeRequest):
            raise InternalError(f"an encoder has no use for a {type(request).__name__}")
        self._intake.check(self._num_requests - len(self._batch))
        _check(request)
        self._num_requests += 1
        self._num_pending_tokens += request.image.num_tokens
        try:
            async with deadline(request.timeout_s):
                return await self._encode_one(request)
        finally:
            self._num_requests -= 1
            self._num_pending_tokens -= request.image.num_tokens

    async def _encode_one(self, request: EncodeRequest) -> EncodeReply:
        arrived_at_s = time.monotonic()
        async with self._in_hand.hold(request.image.num_tokens):
            async with self._pulls:
                pull_began_s = time.monotonic()
                pixels = await self._context.pull(request.pixels)
                transfer_s = time.monotonic() - pull_began_s
            job = _Job(request.image, pixels, asyncio.get_running_loop().create_future())
            self._queue.append(job)
            self._loop.wake()
            embeddings = await job.result
            self._context.drop(request.pixels)
            compute_s = time.monotonic() - job.begun_at_s
            # still in hand: while the store is full no more images are pulled and encoded
            ref = await self._context.transport.put(embeddings, request.request_id, request.timeout_s + LEASE_GRACE_S)
        queued_s = job.begun_at_s - arrived_at_s - transfer_s
        return EncodeReply(ref, StageTime("encoder", self._context.instance_id, queued_s, transfer_s, compute_s))

    async def _step(self) -> bool:
        self._batch = self._take_batch()
        if not self._batch:
            return False
        await self._encode(self._batch)
        self._batch = []
        return True

    def _take_batch(self) -> list[_Job]:
        self._queue = deque(job for job in self._queue if not job.result.done())  # without the cancelled
        sizes = [job.image.num_tokens for job in islice(self._queue, MAX_BATCH_IMAGES)]
        return [self._queue.popleft() for _ in range(num_to_batch(sizes, self._context.settings.max_encode_tokens))]

    async def _encode(self, batch: list[_Job]) -> None:
        engine, now_s = self._context.engine, time.monotonic()
        for job in batch:
            job.begun_at_s = now_s

        def encode(jobs: list[_Job]) -> list[torch.Tensor | Exception]:
            return each_alone(lambda some: engine.encode([job.image for job in some], [job.pixels for job in some]), jobs)

        outcomes = await self._context.compute(encode, batch)
        for job, outcome in zip(batch, outcomes, strict=True):
            settle(job.result, as_typed(outcome, "encoding the image") if isinstance(outcome, Exception) else outcome)

    def _on_error(self, error: Exception) -> None:
        """A step raised, which is a bug: end all that wait rather than let them hang."""
        for job in (*self._batch, *self._queue):
            settle(job.result, as_typed(error, "the encoder"))
        self._batch = []
        self._queue.clear()


def _check(request: EncodeRequest) -> None:
    image, pixels = request.image, request.pixels
    if pixels.shape != (image.height, image.width, 3) or pixels.dtype != "uint8":
        raise InternalError("the pixels are not what the image's size says", code="invalid_message")
    if image.num_tokens < 1:
        raise InternalError("the image has no vision tokens", code="invalid_message")
