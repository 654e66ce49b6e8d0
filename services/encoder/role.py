"""The encoder role: pulls an image's pixels, has them encoded, leases the embeddings. What the instance has already, or is
about to have for another request, is not encoded again.

This is the intake; the queue and the steps are in batch.py. Used by the instance host.
"""

from __future__ import annotations

import asyncio
import time

from triptych.services.encoder.batch import EncodeBatch, EncodeJob
from triptych.services.host_context import HostContext
from triptych.shared.budget import Budget
from triptych.shared.engine.loop import StepLoop
from triptych.shared.engine.role import LEASE_GRACE_S, MAX_PULLS, Intake, deadline, given_up, settle
from triptych.shared.errors import CACHE_MISS, GIVEN_UP, InstanceLost, InternalError, TriptychError
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import EncodeReply, EncodeRequest, InstanceRequest, StageTime, TensorRef

IN_HAND_FACTOR = 2  # chosen: while one batch is encoded, the pixels of the next are pulled


class EncoderRole:
    """Implements StageRole."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._intake = Intake("encoder", context.settings.max_waiting)
        self._batch = EncodeBatch(context)
        self._in_hand: Budget[EncodeJob] = Budget(IN_HAND_FACTOR * context.settings.max_encode_tokens, self._batch.in_order)
        self._pulls = asyncio.Semaphore(MAX_PULLS)
        self._loop = StepLoop("encoder", self._batch.step, self._batch.fail_all)
        self._jobs: dict[object, EncodeJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_requests = 0

    async def start(self) -> None:
        self.open_intake()
        self._loop.start()

    def open_intake(self) -> None:
        self._intake.is_open = True

    def close_intake(self) -> None:
        self._intake.is_open = False

    def is_idle(self) -> bool:
        return self._num_requests == 0 and not self._tasks and not self._loop.is_stepping

    async def stop(self) -> None:
        self.close_intake()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._loop.stop()
        for job in self._jobs.values():
            settle(job.result, given_up())

    def load(self) -> StageLoad:
        num_running = self._batch.num_running
        num_pending_tokens = sum(job.image.num_tokens for job in self._jobs.values() if not job.result.done())
        num_waiting = max(self._num_requests - num_running, 0)
        return StageLoad("encoder", num_waiting, num_running, num_pending_tokens, self._batch.rate.tokens_per_s)

    async def handle(self, request: InstanceRequest) -> EncodeReply:
        """Lease the embeddings of one image, or part of one.

        Raises:
            TriptychError: refused, its inputs are gone, it broke the vision tower, or its time ran out.
        """
        if not isinstance(request, EncodeRequest):
            raise InternalError(f"an encoder has no use for a {type(request).__name__}")
        self._intake.check(self._num_requests - self._batch.num_running)
        _check(request)
        self._num_requests += 1
        try:
            async with deadline(request.timeout_s):
                return await self._encode_one(request)
        finally:
            self._num_requests -= 1

    async def _encode_one(self, request: EncodeRequest) -> EncodeReply:
        """Until its embeddings are found, or made, or there are no pixels of its own to make them of."""
        cache, arrived_at_s = self._context.embeddings, time.monotonic()
        while True:
            found = cache.find(request.image, is_expected=request.pixels is None)
            if found is not None:
                ref = await cache.lease(request.image, found, request.request_id, request.timeout_s + LEASE_GRACE_S)
                spent = StageTime("encoder", self._context.instance_id, time.monotonic() - arrived_at_s)
                return EncodeReply(ref, spent, is_cached=True)
            key: object = request.image.key if cache.is_on else object()
            others = self._jobs.get(key)
            try:
                return await self._share(key, others or self._new_job(key, request), request, arrived_at_s)
            except TriptychError as error:
                was_own = others is None or others.begun_at_s > 0
                if was_own or error.code == GIVEN_UP:  # else it was another one's pixels that could not be had
                    raise

    def _new_job(self, key: object, request: EncodeRequest) -> EncodeJob:
        if request.pixels is None:
            raise InstanceLost("the embeddings of an image are no longer here", code=CACHE_MISS)
        job = EncodeJob(request.image, asyncio.get_running_loop().create_future(), time.monotonic(), request.slack_s)
        job.task = asyncio.create_task(self._bring(key, job, request.pixels), name="pixels of an image")
        self._tasks.add(job.task)
        job.task.add_done_callback(self._tasks.discard)
        self._jobs[key] = job
        return job

    async def _share(self, key: object, job: EncodeJob, request: EncodeRequest, arrived_at_s: float) -> EncodeReply:
        """Wait for a job, perhaps with others, and lease what comes of it."""
        job.join(request, arrived_at_s)
        try:
            embeddings = await asyncio.shield(job.result)
            encoded_at_s = time.monotonic()
            lease_s = request.timeout_s + LEASE_GRACE_S
            ref = await self._context.embeddings.lease(request.image, embeddings, request.request_id, lease_s)
        finally:
            job.num_requests -= 1
            if job.num_requests == 0:
                self._forget(key, job)
                job.result.cancel()
                job.task.cancel()
        begun_at_s = max(job.begun_at_s, arrived_at_s)
        transfer_s = min(job.transfer_s, begun_at_s - arrived_at_s)
        queued_s = begun_at_s - arrived_at_s - transfer_s
        spent = StageTime("encoder", self._context.instance_id, queued_s, transfer_s, encoded_at_s - begun_at_s)
        return EncodeReply(ref, spent)

    async def _bring(self, key: object, job: EncodeJob, pixels: TensorRef) -> None:
        """Pull a job's pixels and queue it. It is in hand until the last request that waits for it leaves, which cancels this:
        while the store is full no more images are pulled and encoded. The pixels of a part others pull as well: they end with
        their request."""
        is_whole = job.image.first_piece is None
        try:
            async with self._in_hand.hold(job.image.num_tokens, job):
                async with self._pulls:
                    pull_began_s = time.monotonic()
                    pulled = await self._context.pull(pixels, release=is_whole)
                    # Our own end with the request that brought them, and others may wait for what is made of them.
                    job.pixels = pulled.clone() if pixels.owner == self._context.instance_id else pulled
                    job.transfer_s = time.monotonic() - pull_began_s
                self._context.metrics.pixel_transfers.inc()
                self._batch.add(job)
                self._loop.wake()
                await asyncio.Event().wait()
        except Exception as error:
            self._forget(key, job)
            settle(job.result, error)
        finally:
            if is_whole:
                self._context.drop(pixels)

    def _forget(self, key: object, job: EncodeJob) -> None:
        """Nobody joins it from now on."""
        if self._jobs.get(key) is job:
            del self._jobs[key]


def _check(request: EncodeRequest) -> None:
    image, pixels = request.image, request.pixels
    if pixels is not None and (pixels.shape != (image.height, image.width, 3) or pixels.dtype != "uint8"):
        raise InternalError("the pixels are not what the image's size says", code="invalid_message")
    if image.num_tokens < 1:
        raise InternalError("the image has no vision tokens", code="invalid_message")
